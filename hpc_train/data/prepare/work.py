"""`hpc-train prepare`: turn texts, or token files of other programs, into shards with a manifest.

Rank 0 begins a preparation, all ranks work on it, and rank 0 finishes it. The data folder gets its
name last, so a folder with that name is complete. What a killed preparation has finished stays in a
partial folder, and the same command continues there.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train import files
from hpc_train.data.check import check_shards
from hpc_train.data.manifest import Manifest, Shard, parse_manifest
from hpc_train.data.prepare.dealing import Dealing, make_portions
from hpc_train.data.prepare.inputs import NAMES_LOGGED, InputFile, InputPart, TokenRecipe
from hpc_train.data.prepare.partial import (
    PLAN,
    Preparation,
    ShardPortion,
    held_partial,
    load_plan,
    publish,
    store_plan,
    writing_to,
)
from hpc_train.data.prepare.portions import bytes_per_token, cut_portions, read_part, whole_parts
from hpc_train.data.prepare.request import PrepareRequest, text_request
from hpc_train.data.prepare.texts import is_text_part
from hpc_train.data.tokenizer import BYTES, NO_TOKENIZER, Tokenizer, loads
from hpc_train.data.write import write_shard
from hpc_train.errors import DataError, plural, some_of

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
LARGEST_SHARD = 1.5  # a portion of more shards than this is cut
FIRST_TOKENS = 1 << 20  # room in a shard's buffer, which grows


def prepare_text(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = BYTES,
    shard_mb: float = 256,
    validation: float = 0.01,
    text_key: str = "text",
) -> Manifest:
    """Turn texts into token shards in this process alone.

    `request.text_request` describes the arguments.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: there is no text, `out` exists already or is being prepared, or a file cannot be
            read or written.
        SetupError: a library is needed and missing.
    """
    request = text_request(
        paths,
        out,
        tokenizer=tokenizer,
        shard_mb=shard_mb,
        validation=validation,
        text_key=text_key,
    )
    with begun(request) as preparation:
        work(Dealing(preparation))
        return finish(preparation)


@contextmanager
def begun(request: PrepareRequest) -> Iterator[Preparation[TokenRecipe]]:
    """Begin a preparation, or continue one that has the same key. Only rank 0 calls.

    The partial folder is held until the block ends. If the block fails and no portion is finished,
    the partial folder is removed.

    Raises:
        DataError: the folder exists already, is being prepared, or cannot be written; or a file
            cannot be read.
    """
    with held_partial(request.target, request.key) as folder:
        if not (folder / PLAN).exists():
            _make_plan(request, folder)
        yield load_plan(request.target, folder, request.recipe, _is_sound)


def _make_plan(request: PrepareRequest, folder: Path) -> None:
    recipe, splits = request.recipe, request.split()
    tokens = max(1, int(request.shard_mb * (1 << 20)) // recipe.dtype.itemsize)
    given = dict.fromkeys(part.file for parts in splits.values() for part in parts)
    nbytes = tokens * bytes_per_token(whole_parts([*given]), recipe, _codec(recipe))
    named = {
        f"{split}-{number:05d}": portion
        for split, parts in splits.items()
        for number, portion in enumerate(cut_portions(parts, nbytes))
    }
    if request.options.get("validation") and not splits["validation"]:
        cut = not any(file.compressed for file in given)
        why = "the text is too short" if cut else "compressed files are not cut"
        logger.warning("nothing is held out for validation: %s", why)
    plan = {
        name: (sum(part.nbytes for part in parts), [_row(part) for part in parts])
        for name, parts in named.items()
    }
    store_plan(folder, plan, tokens)


def _row(part: InputPart) -> list[Any]:
    return [[*vars(part.file).values()], part.begin, part.end, part.first, part.last]


def _parts(preparation: Preparation[TokenRecipe], portion: ShardPortion) -> list[InputPart]:
    """The parts of files in a portion."""
    rows = preparation.content(portion)
    return [InputPart(InputFile(*file), *rest) for file, *rest in rows]


def _codec(recipe: TokenRecipe) -> Tokenizer | None:
    return loads(recipe.tokenizer) if recipe.tokenizer else None


def work(dealing: Dealing[TokenRecipe]) -> None:
    """Make portions until there is none left. Every rank calls; they need not wait for each other.

    It returns early if another rank has failed.

    Raises:
        DataError: a file cannot be read, has changed or has an error, or the disk is full.
    """
    codec = cache(lambda: _codec(dealing.preparation.recipe))
    make_portions(dealing, lambda portion: _make_portion(dealing, portion, codec()))


def _make_portion(
    dealing: Dealing[TokenRecipe], portion: ShardPortion, codec: Tokenizer | None
) -> None:
    preparation, recipe = dealing.preparation, dealing.preparation.recipe
    parts = _parts(preparation, portion)
    size, about = preparation.shard_size, _about(recipe, parts)
    writer = ShardWriter(dealing.scratch, portion.name, size, recipe.dtype, about)
    documents, left_out = 0, []
    for part in parts:
        if recipe.in_place:
            writer.refer_to(Path(part.file.path), part.file.offset + part.begin)
        if part.file.format == "text" and not part.file.compressed and not is_text_part(part):
            assert codec is not None
            left_out.append(part.file.path)
            documents += _write_gap(writer, part, codec, recipe.dtype)
            continue
        for tokens, first in read_part(part, recipe, codec, dealing.tell):
            writer.add(tokens, first=first)
            documents += first
        if part.first and part.begin and part.file.format == "text":
            documents -= 1  # the other split has its begin
    shards = writer.finish()
    for name in {name for shard in shards for name in (shard.name, shard.source) if name}:
        files.call("rename", os.rename, dealing.scratch / name, preparation.shards / name)
    files.sync_folder(preparation.shards)
    entry = {
        "split": portion.name.partition("-")[0],
        "documents": documents,
        "left_out": left_out,
        "shards": [asdict(shard) for shard in shards],
    }
    files.write_text(preparation.entry(portion.name), json.dumps(entry))


def _write_gap(writer: ShardWriter, part: InputPart, codec: Tokenizer, dtype: np.dtype[Any]) -> int:
    """Write what separates the texts before and behind a part that is left out.

    Other ranks may make these texts, and do not know of it. So the document behind it begins with
    tokens that are written here: those in front of a text or, if there are none, the separator.

    Returns:
        How many documents begin behind it.
    """
    separator = [] if codec.separator is None else [codec.separator]
    end, begin = [] if part.first else separator, [] if part.last else [*codec.front]
    if not (part.last or begin):
        end, begin = [], separator
    for tokens, first in ((end, False), (begin, True)):
        if tokens:
            writer.add(np.array(tokens, dtype), first=first)
    return len(begin) > 0


def _about(recipe: TokenRecipe, parts: Sequence[InputPart]) -> dict[str, str]:
    """What the file of a shard says of itself to people who open it."""
    names = [Path(part.file.path).name for part in parts]
    return {
        "schema": "tokens: consecutive tokens; documents: where documents begin among them",
        # As it always was: the manifest has the file's size, and a run is resumed on equal ones.
        "tokenizer": _tokenizer_name(recipe) if recipe.tokenizer else "unknown",
        "source": some_of(names, NAMES_LOGGED),
    }


def _tokenizer_name(recipe: TokenRecipe) -> str:
    """What a folder calls the tokenizer of its tokens."""
    return (
        TOKENIZER_FILE if recipe.tokenizer not in ("", BYTES) else recipe.tokenizer or NO_TOKENIZER
    )


class ShardWriter:
    """Writes the tokens of a portion as one shard, or as several if they are many.

    It takes memory for one and a half shards at most, and for the begins of documents.

    Args:
        folder: the folder to write to.
        name: the name of the portion.
        size: number of tokens in a shard.
        dtype: the type of the tokens.
        about: attributes of the files.
    """

    def __init__(
        self, folder: Path, name: str, size: int, dtype: np.dtype[Any], about: Mapping[str, str]
    ) -> None:
        self.folder, self.name, self.size, self.about = folder, name, size, about
        self._most = max(size, int(LARGEST_SHARD * size))
        self._buffer = np.empty(min(self._most, FIRST_TOKENS), dtype)
        self._count = 0
        self._documents = array("q")
        self._shards: list[Shard] = []
        self._source: tuple[Path, int] | None = None

    def refer_to(self, source: Path, offset: int) -> None:
        """Write what was added. The next tokens stay in a file of others.

        Args:
            source: the file that has them, one after the other and of the writer's type.
            offset: offset of the first one, in bytes.
        """
        if self._count:
            self._write(self._count)
        self._source = source, offset

    def add(self, tokens: np.ndarray, *, first: bool) -> None:
        """Add tokens (N,).

        Args:
            tokens: the tokens.
            first: whether a document begins with them.
        """
        if first and (not self._documents or self._documents[-1] != self._count):
            self._documents.append(self._count)
        while len(tokens):
            if self._count == self._most:
                self._write(self.size)
            if self._count == len(self._buffer):
                self._buffer.resize(min(self._most, 2 * self._count), refcheck=False)
            taken = tokens[: len(self._buffer) - self._count]
            self._buffer[self._count : self._count + len(taken)] = taken
            self._count += len(taken)
            tokens = tokens[len(taken) :]

    def finish(self) -> list[Shard]:
        """Write what is left. Returns all shards."""
        if self._count:
            self._write(self._count)
        return self._shards

    def _write(self, count: int) -> None:
        suffix = f"-{len(self._shards)}" if self._shards else ""
        documents = np.array(self._documents, np.int64)
        inside = documents < count
        path = self.folder / f"{self.name}{suffix}.h5"
        tokens = self._buffer[:count]
        shard = write_shard(path, tokens, documents[inside], self.about, self._source)
        self._shards.append(shard)
        if self._source:
            self._source = self._source[0], self._source[1] + tokens.nbytes
        left = self._count - count
        self._buffer[:left] = self._buffer[count : self._count].copy()
        self._count = left
        self._documents = array("q", (documents[~inside] - count).tolist())


def finish(preparation: Preparation[TokenRecipe]) -> Manifest:
    """Write the manifest, and give the data folder its name. Only rank 0 calls, after all others.

    Returns:
        The manifest of the new folder.

    Raises:
        DataError: there are no tokens, or the folder cannot be written.
    """
    with writing_to(preparation.target):
        entries = [
            json.loads(preparation.entry(portion.name).read_text(encoding="utf-8"))
            for portion in preparation.portions
        ]
        left_out = sorted({path for entry in entries for path in entry["left_out"]})
        if left_out:
            logger.warning(
                "left out what is not UTF-8 text in %s, such as %s",
                plural(len(left_out), "file"),
                ", ".join(left_out[:NAMES_LOGGED]),
            )
        manifest = _manifest(preparation.recipe, entries)
        if "train" not in manifest.splits:
            held = "have no tokens" if not manifest.splits else "leave no tokens to train on"
            raise DataError(f"the files {held}", "give files with more text")
        if manifest.tokenizer == TOKENIZER_FILE:
            files.write_text(preparation.shards / TOKENIZER_FILE, preparation.recipe.tokenizer)
        publish(preparation.shards, preparation.target, manifest.to_json())
    return manifest


def _manifest(recipe: TokenRecipe, entries: Sequence[Any]) -> Manifest:
    """The manifest of some portions, which went through a file, and so through all checks."""
    splits: dict[str, Any] = {}
    for entry in entries:
        if entry["shards"]:
            splits.setdefault(entry["split"], []).extend(entry["shards"])
    draft = Manifest(
        vocab=recipe.vocab,
        dtype=str(recipe.dtype),
        tokenizer=_tokenizer_name(recipe),
        documents=sum(entry["documents"] for entry in entries),
        splits=splits,
    )
    return parse_manifest(json.loads(draft.to_json()))


def _is_sound(preparation: Preparation[TokenRecipe], entry: Any) -> bool:
    try:
        check_shards(preparation.shards, _manifest(preparation.recipe, [entry]))
    except (DataError, KeyError, TypeError, ValueError):
        return False
    return True
