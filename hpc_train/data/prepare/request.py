"""What a user wants to be prepared, with the files that were found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.data.prepare.foreign import USUAL_LAYOUT, TokenLayout, list_token_files, one_type
from hpc_train.data.prepare.inputs import InputFile, InputPart, TokenRecipe
from hpc_train.data.prepare.partial import check_outside, check_sizes, check_target, key_of_tree
from hpc_train.data.prepare.portions import split_inputs, whole_parts
from hpc_train.data.prepare.texts import TEXT_PIECE_BYTES, list_texts, only_texts
from hpc_train.data.tokenizer import BYTES, END_OF_TEXT, Tokenizer, describe_tokenizer, loads
from hpc_train.errors import DataError

logger = logging.getLogger(__name__)

PLAN_FORMAT = 5  # a higher one, after the plan or the tokens have changed, continues no older plan


@dataclass(frozen=True)
class PrepareRequest:
    """What a user wants to be prepared.

    Args:
        target: the data folder to make.
        recipe: how tokens are made.
        shard_mb: approximate size of a shard in MiB.
        options: further options that the result depends on.
        listed: all files that were found.
        split: makes the parts of each split. It may open every file.
    """

    target: Path
    recipe: TokenRecipe
    shard_mb: float
    options: Mapping[str, float]
    listed: Sequence[InputFile]
    split: Callable[[], dict[str, list[InputPart]]]

    @property
    def key(self) -> str:
        """A hash of everything that the result depends on."""
        tree = [
            PLAN_FORMAT,
            TEXT_PIECE_BYTES,
            asdict(self.recipe),
            self.shard_mb,
            dict(self.options),
            [[*vars(file).values()] for file in self.listed],
        ]
        return key_of_tree(tree)


def text_request(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = BYTES,
    shard_mb: float = 256,
    validation: float = 0.01,
    text_key: str = "text",
) -> PrepareRequest:
    """List texts, and describe what to make of them.

    Args:
        paths: files, or folders that are searched with their subfolders. Files may be compressed
            (.gz, .zst). Each file is a text, and each line of a JSON lines file (.jsonl) is one.
            Files that are not UTF-8 text are skipped; the log says how many.
        out: the data folder to make.
        tokenizer: "bytes", or a file of the `tokenizers` library, which is copied to `out`.
        shard_mb: approximate size of a shard in MiB.
        validation: share of the text, by bytes, that is held out for validation. Files are sorted
            by a hash of their names, so that both splits have a mixture. The file at the border is
            cut, unless it is compressed.
        text_key: the key of the text in JSON lines.

    Raises:
        DataError: a path does not exist, `out` exists already or is inside of a path, or a value is
            not allowed.
        SetupError: the `tokenizers` library is needed and missing.
    """
    check_outside(out, paths, "prepared: what it holds would become text, too")
    check_sizes(shard_mb, validation)
    description = describe_tokenizer(tokenizer)
    codec = loads(description)
    _tell_separator(codec)
    recipe = TokenRecipe(description, codec.vocab, text_key)
    listed = list_texts(paths)
    return PrepareRequest(
        Path(out),
        recipe,
        shard_mb,
        {"validation": validation},
        listed,
        lambda: split_inputs(only_texts(listed), validation),
    )


def _tell_separator(codec: Tokenizer) -> None:
    """Log which tokens are put in front of each text, and which one behind it."""
    for number in codec.front:
        logger.info("token %d (%r) is put in front of each text", number, codec.decode([number]))
    if codec.separator is None:
        known = ", ".join(END_OF_TEXT)
        logger.warning("no token is put behind texts: the tokenizer has none of %s", known)
    else:
        text = codec.decode([codec.separator])
        logger.info("token %d (%r) is put behind each text", codec.separator, text)


def tokens_request(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    held_out: Sequence[str | Path] = (),
    vocab: int = 0,
    tokenizer: str = "",
    shard_mb: float = 256,
    layout: TokenLayout = USUAL_LAYOUT,
) -> PrepareRequest:
    """List token files of other programs, and describe what to make of them.

    Tokens stay in the files that have them, and shards refer to them, if all files allow it: if
    they have one type, one after the other.

    Args:
        paths: token files to train on, as `foreign.list_token_files` describes them.
        out: the data folder to make.
        held_out: token files for validation.
        vocab: vocabulary size; 0 takes the tokenizer's.
        tokenizer: the tokenizer's file, which is copied to `out`; "" if there is none.
        shard_mb: approximate size of a shard in MiB.
        layout: how the files have their tokens.

    Raises:
        DataError: a file is none of these, or is in both splits; `out` exists already, or a value
            is not allowed.
        SetupError: a library is needed and missing.
    """
    target = Path(out)
    check_target(target)
    check_sizes(shard_mb)
    description = describe_tokenizer(tokenizer) if tokenizer else ""
    size = max(vocab, loads(description).vocab if description else 0)
    if not size:
        raise DataError("the vocabulary size is not known", "give --vocab or --tokenizer")
    if size > 1 << 32:
        raise DataError(f"the vocabulary has {size} tokens", f"give {1 << 32} or fewer")
    splits = {
        "train": list_token_files(paths, layout),
        "validation": list_token_files(held_out, layout),
    }
    trained = {Path(one.path).resolve() for one in splits["train"]}
    for one in splits["validation"]:
        if Path(one.path).resolve() in trained:
            raise DataError(
                f"{one.path} is given to train on, and by --held_out, too", "give it once"
            )
    given = [*splits["train"], *splits["validation"]]
    kind, why = ("", "") if layout.copy else one_type(given, size)
    if why:
        logger.info("the tokens are copied: %s", why)
    return PrepareRequest(
        target,
        TokenRecipe(description, size, layout.column, kind),
        shard_mb,
        {"held_out": len(splits["validation"])},
        given,
        lambda: {split: whole_parts(some) for split, some in splits.items()},
    )
