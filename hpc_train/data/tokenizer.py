"""Tokenizers: one that takes each byte as a token, and those of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpc_train.errors import DataError, SetupError, UserError

BYTES = "bytes"
NO_TOKENIZER = "none"  # of tokens whose tokenizer is not known
END_OF_TEXT = (
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "[SEP]",
    "<|end_of_text|>",
)  # the first one that is there


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    `vocab` is the number of different tokens. `front` has the tokens that are put in front of each
    text. `separator` is the token that is put behind each text; None if there is none.
    """

    vocab: int
    front: Sequence[int]
    separator: int | None

    def encode(self, text: bytes) -> Sequence[int] | bytes:
        """The tokens of UTF-8 text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become replacement characters."""


class ByteTokenizer:
    """Takes each byte as a token. Zero bytes, which text does not have, separate texts."""

    vocab = 256
    front: Sequence[int] = ()
    separator: int | None = 0

    def encode(self, text: bytes) -> bytes:
        """The bytes of the text, unchanged."""
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes read as UTF-8; others become replacement characters."""
        return bytes(tokens).decode("utf-8", errors="replace")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library (tokenizer.json of many models).

    Args:
        description: the JSON that the library saves.

    Raises:
        SetupError: the library is missing.
        DataError: the description is not that of a tokenizer.
    """

    def __init__(self, description: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise SetupError(
                "the tokenizers library is missing", "`pip install 'hpc_train[tokenizers]'`"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(description)
        except Exception as error:  # noqa: BLE001  # it raises nothing more specific
            raise DataError(
                f"not a tokenizer file ({error})", "give another one, or bytes"
            ) from None
        # Many files have the settings of the training that they come from. Here texts are whole,
        # and a text has the same tokens each time.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if hasattr(self._tokenizer.model, "dropout"):
            self._tokenizer.model.dropout = None
        self.vocab = 1 + max(self._tokenizer.get_vocab().values(), default=0)  # ids may have gaps
        numbers = (self._tokenizer.token_to_id(token) for token in END_OF_TEXT)
        self.separator = next((number for number in numbers if number is not None), None)
        self.front: Sequence[int] = self._front()

    def _front(self) -> list[int]:
        """The tokens that the tokenizer's template has in front of a text, such as Llama's."""
        whole, plain = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False)
        )
        for place in range(len(whole) - len(plain) + 1):
            if plain and whole[place : place + len(plain)] == plain:
                front: list[int] = whole[:place]
                return front
        return []

    def encode(self, text: bytes) -> Sequence[int]:
        """The tokens of UTF-8 text, without the special tokens that a template would add."""
        encoding = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        numbers: Sequence[int] = encoding.ids
        return numbers

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, including special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def describe_tokenizer(name: str, folder: Path | None = None) -> str:
    """The description that `loads` makes a tokenizer from: "bytes", or the text of its file.

    Args:
        name: "bytes", or a file's path. Or a folder's "none", which describes itself.
        folder: the data folder that must contain the file, and the file that it links to. The text
            goes into checkpoints, so a folder must not be able to name any other file of this
            machine. Shards may be links to anywhere, as only tokens are taken from them.

    Raises:
        DataError: the file cannot be read, or is not in the folder.
    """
    if name == BYTES or (name == NO_TOKENIZER and folder is not None):
        return name
    path = Path(name) if folder is None else folder / name
    try:
        if folder is not None and not _is_inside(path, folder):
            raise DataError(f"tokenizer {path} is not a file of its folder", "copy the file there")
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: links in a circle
        raise DataError(f"tokenizer {path}: {error}", "give a tokenizer file, or bytes") from None


def as_recorded(description: str, vocab: int) -> str:
    """What a data folder or a checkpoint tells of its tokenizer.

    Earlier versions wrote "bytes" for tokens without a tokenizer, too. Too small a vocabulary for
    all bytes gives these away.

    Args:
        description: what it has written down.
        vocab: its vocabulary size.
    """
    return NO_TOKENIZER if description == BYTES and vocab < ByteTokenizer.vocab else description


def _is_inside(path: Path, folder: Path) -> bool:
    real = path.resolve()
    return real.parent == folder.resolve() and (real.is_file() or not real.exists())


def loads(description: str) -> Tokenizer:
    """Make a tokenizer from its description.

    Raises:
        SetupError, DataError: as `LibraryTokenizer` raises them.
        UserError: it is "none".
    """
    if description == NO_TOKENIZER:
        raise UserError(
            "the tokenizer of the tokens is not known",
            "prepare the data with --tokenizer, and train on it",
        )
    return ByteTokenizer() if description == BYTES else LibraryTokenizer(description)
