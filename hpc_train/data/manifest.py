"""The manifest of a prepared data folder: which shards there are, and what is in each.

`manifest.json` is written last, so a folder that has one is complete. It tells where each shard's
tokens start in its file: readers go there directly and never open HDF5 in the training loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import DataError

FILE_NAME = "manifest.json"
FORMAT = "hpc_train.tokens/1"
PREPARE_AGAIN = "run `hpc-train prepare` again into a new folder"


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


@dataclass(frozen=True)
class Manifest:
    """A prepared data folder.

    Args:
        vocab: number of different tokens there can be.
        dtype: NumPy name of the tokens' little-endian integer type.
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


def read(directory: Path) -> Manifest:
    """Read a data folder's manifest.

    Raises:
        DataError: there is none, or it is not such a file.
    """
    path = directory / FILE_NAME
    try:
        return parse(json.loads(path.read_text()))
    except FileNotFoundError:
        raise DataError(
            f"{directory} holds no prepared data (no {FILE_NAME})",
            f"`hpc-train prepare text PATH... --out {directory}` makes it",
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "make it readable") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error})", PREPARE_AGAIN) from None


def parse(tree: dict[str, Any]) -> Manifest:
    """Make a manifest from its file's JSON tree.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not such a tree.
    """
    if tree.pop("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    splits = {
        split: tuple(Shard(**shard) for shard in shards)
        for split, shards in tree.pop("splits").items()
    }
    manifest = Manifest(**tree, splits=splits)
    if not (isinstance(manifest.vocab, int) and manifest.vocab > 0):
        raise ValueError(f"vocab is {manifest.vocab!r}")
    return manifest
