"""The manifest of a prepared data folder: which shards there are, and what is in each.

`manifest.json` is written last, so a folder that has one is complete. It tells where each shard's
tokens start in its file: readers go there directly and never open HDF5 in the training loop.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpc_train.errors import DataError

FILE_NAME = "manifest.json"
FORMAT = "hpc_train.tokens/1"
PREPARE_AGAIN = "run `hpc-train prepare` again into a new folder"
SPLITS = ("train", "validation")
# What tokens may be, with the bytes of each. Bytes of a file that became numbers of another kind,
# such as Python objects, would be a way into this process's memory.
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
LARGEST_SIZE = 1 << 62  # sizes and sums of them stay below it, and so within 64 bits
FILE_BYTES = 1 << 28  # a manifest has some 200 bytes per shard
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # of a file in the folder itself
HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Shard:
    """One HDF5 file with one contiguous, uncompressed dataset `tokens`.

    Args:
        name: file name in the data folder.
        file_bytes: size of the whole file.
        tokens: number of tokens.
        offset: byte of the file at which the first token lies.
        hash: xxh3-128 of the tokens' bytes, hexadecimal.
    """

    name: str
    file_bytes: int
    tokens: int
    offset: int
    hash: str

    def nbytes(self, dtype: str) -> int:
        """Bytes of its tokens, which are of that type."""
        return self.tokens * TOKEN_BYTES[dtype]


@dataclass(frozen=True)
class Manifest:
    """A prepared data folder.

    Args:
        vocab: number of different tokens there can be.
        dtype: the tokens' type, little-endian: uint8, uint16 or uint32.
        tokenizer: "bytes", or the name of the tokenizer file in the folder.
        documents: number of texts that the tokens come from.
        splits: the shards of "train" and, where there are any, "validation".
    """

    vocab: int
    dtype: str
    tokenizer: str
    documents: int
    splits: Mapping[str, tuple[Shard, ...]]

    def tokens(self, split: str) -> int:
        """Number of tokens of a split; 0 for one that the folder does not have."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def to_json(self) -> str:
        """The manifest file's text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """A hash that is the same for the same tokens in the same shards."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read a data folder's manifest.

    Raises:
        DataError: there is none, or it is not such a file.
    """
    path = directory / FILE_NAME
    try:
        if not path.is_file():  # what is not there, or is a pipe that nobody writes to
            raise FileNotFoundError
        if path.stat().st_size > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        return parse_manifest(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise DataError(
            f"{directory} holds no prepared data (no {FILE_NAME})",
            f"`hpc-train prepare text PATH... --out {directory}` makes it",
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "make it readable") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error})", PREPARE_AGAIN) from None


def parse_manifest(tree: Any) -> Manifest:
    """Make a manifest from its file's JSON tree, and check every value of it.

    Raises:
        ValueError: it is not such a tree.
    """
    if isinstance(tree, dict) and tree.get("format") != FORMAT:
        raise ValueError(f"its format is {_short(tree.get('format'))}, not {FORMAT}")
    keys = [field.name for field in fields(Manifest)]
    _check_keys("the manifest", tree, ["format", *keys])
    given = {key: tree[key] for key in keys}
    dtype, splits = given["dtype"], given["splits"]
    if not isinstance(dtype, str) or dtype not in TOKEN_BYTES:
        raise ValueError(f"dtype is {dtype!r}, not one of {', '.join(TOKEN_BYTES)}")
    _check_number("vocab", given["vocab"], 1, 1 << 8 * TOKEN_BYTES[dtype])
    _check_number("documents", given["documents"], 0, LARGEST_SIZE)
    _check_text("tokenizer", given["tokenizer"], PLAIN_NAME, "a plain file name")
    if not isinstance(splits, dict) or not set(splits) <= {*SPLITS}:
        raise ValueError(f"splits are {_short(splits)}, not some of {', '.join(SPLITS)}")
    shards = {split: _shards(split, found, dtype) for split, found in splits.items()}
    every = [shard for some in shards.values() for shard in some]
    if len({shard.name for shard in every}) < len(every):
        raise ValueError("two shards have the same name")
    if sum(shard.file_bytes for shard in every) > LARGEST_SIZE:
        raise ValueError("the shards have more bytes together than a file system can hold")
    return Manifest(**{**given, "splits": shards})


def _shards(split: str, trees: Any, dtype: str) -> tuple[Shard, ...]:
    if not isinstance(trees, list):
        raise ValueError(f"split {split} is no list of shards")
    return tuple(_shard(f"shard {n} of {split}", tree, dtype) for n, tree in enumerate(trees))


def _shard(what: str, tree: Any, dtype: str) -> Shard:
    _check_keys(what, tree, [field.name for field in fields(Shard)])
    _check_text(f"{what}: name", tree["name"], PLAIN_NAME, "a plain file name")
    _check_text(f"{what}: hash", tree["hash"], HASH, "32 hexadecimal digits")
    for key, least in (("file_bytes", 0), ("tokens", 1), ("offset", 0)):
        _check_number(f"{what}: {key}", tree[key], least, LARGEST_SIZE)
    shard = Shard(**tree)
    if shard.offset + shard.nbytes(dtype) > shard.file_bytes:
        raise ValueError(f"{what}: its tokens end behind the end of the file")
    return shard


def _check_keys(what: str, tree: Any, keys: list[str]) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"{what} is no object with keys")
    if missing := [key for key in keys if key not in tree]:
        raise ValueError(f"{what} lacks the key {missing[0]}")
    if unknown := sorted(set(tree) - set(keys)):
        raise ValueError(f"{what} has the unknown key {_short(unknown[0])}")


def _check_number(what: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:  # True is an int, too
        raise ValueError(f"{what} is {_short(value)}, no whole number from {least} to {most}")


def _check_text(what: str, value: Any, pattern: re.Pattern[str], wanted: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {_short(value)}, not {wanted}")


def _short(value: Any) -> str:
    """A value as it is shown in a line: a damaged one may be of any length."""
    return text if len(text := ascii(value)) <= 80 else f"{text[:80]}..."
