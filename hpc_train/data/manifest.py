"""The manifest of a prepared data folder: a list of its shards and of their contents.

`manifest.json` is written last, so a folder that has one is complete. It has the offset of each
shard's tokens in its file. Readers read there directly and never open HDF5 in the training loop.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpc_train.data.tokenizer import BYTES, NO_TOKENIZER, as_recorded, describe_tokenizer
from hpc_train.errors import DataError, plural

FILE_NAME = "manifest.json"
FORMAT = "hpc_train.tokens/4"
DATA_KINDS = {"hpc_train.tokens": "tokens of texts", "hpc_train.table": "rows of a table"}
PREPARE_AGAIN = "run `hpc-train prepare` again into a new folder"
SPLITS = ("train", "validation")
# The types of tokens, and the bytes of one token. No other types are read: a file could otherwise
# ask for Python objects, whose bytes are addresses in this process's memory.
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
HASHED_BYTES = 1 << 16  # bytes that one hash is of
LARGEST_SIZE = 1 << 62  # limit of sizes and their sums, so that they fit into 64 bits
FILE_BYTES = 1 << 28  # largest manifest; one has some 300 bytes per shard
M = TypeVar("M")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # a file in the folder itself
HASH = re.compile(r"[0-9a-f]{32}")


class StoredShard(Protocol):
    """An HDF5 file with contiguous, uncompressed datasets, as readers see it.

    It has a file `name` in the data folder, the size `file_bytes` of the file, the name `source` of
    the link to a file that has the first dataset, "" if the shard has it itself, and the `hash` of
    the bytes of its dataset `hashes`: xxh3-128, hexadecimal.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def file_bytes(self) -> int: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def hash(self) -> str: ...  # noqa: D102

    def nbytes(self, dtype: str) -> int:
        """Size of the first dataset in bytes, if its type is `dtype`."""

    def extents(self, dtype: str) -> dict[str, tuple[int, int]]:
        """The offset and the size in bytes of each dataset, if the first one's type is `dtype`.

        Samples are in the first one. The last one, `hashes`, has the xxh3-64 of each block of
        HASHED_BYTES of the others, in their order, uint64. Last blocks may be shorter.
        """


_S = TypeVar("_S", bound=StoredShard)
S_co = TypeVar("S_co", bound=StoredShard, covariant=True)


class StoredData(Protocol[S_co]):
    """What readers of shards need of a manifest."""

    @property
    def dtype(self) -> str:
        """NumPy's name for the type of what the shards' first dataset has."""

    @property
    def limit(self) -> int | None:
        """The numbers of the first dataset are below it. None: they are no numbers."""

    @property
    def splits(self) -> Mapping[str, tuple[S_co, ...]]:
        """The shards of each split."""


@dataclass(frozen=True)
class Shard:
    """One HDF5 file with contiguous, uncompressed datasets: `tokens`, `documents` and `hashes`.

    Offsets are positions in the file, in bytes. The tokens may lie in a file of others.

    Args:
        name: file name in the data folder.
        file_bytes: size of the whole file.
        source: name of the link in the data folder to the file that has the tokens; "" if the
            shard has them itself.
        tokens: number of tokens.
        offset: offset of the first token.
        documents: number of documents that begin in the shard. The dataset `documents` has the
            position of the first token of each, int64.
        documents_offset: offset of `documents`; 0 if no document begins here.
        hashes_offset: offset of `hashes`. It has the xxh3-64 of each block of HASHED_BYTES, uint64:
            first the blocks of tokens, then those of documents. Last blocks may be shorter.
        hash: xxh3-128 of the bytes of `hashes`, hexadecimal.
    """

    name: str
    file_bytes: int
    source: str
    tokens: int
    offset: int
    documents: int
    documents_offset: int
    hashes_offset: int
    hash: str

    def nbytes(self, dtype: str) -> int:
        """Size of the tokens in bytes, if their type is `dtype`."""
        return self.tokens * TOKEN_BYTES[dtype]

    def extents(self, dtype: str) -> dict[str, tuple[int, int]]:
        """The offset and the size in bytes of each dataset, if the tokens' type is `dtype`."""
        tokens, documents = self.nbytes(dtype), 8 * self.documents
        blocks = -(-tokens // HASHED_BYTES) + -(-documents // HASHED_BYTES)
        return {
            "tokens": (self.offset, tokens),
            "documents": (self.documents_offset, documents),
            "hashes": (self.hashes_offset, 8 * blocks),
        }


@dataclass(frozen=True)
class Manifest:
    """A prepared data folder.

    Args:
        vocab: vocabulary size; tokens are numbers below it.
        dtype: the tokens' type, little-endian: uint8, uint16 or uint32.
        tokenizer: "bytes", or the name of the tokenizer file in the folder; "none" if the
            tokenizer is not known.
        documents: number of texts that the tokens come from.
        splits: the shards of "train" and, if there are any, of "validation".
    """

    vocab: int
    dtype: str
    tokenizer: str
    documents: int
    splits: Mapping[str, tuple[Shard, ...]]

    def tokens(self, split: str) -> int:
        """Number of tokens of a split; 0 if the folder does not have the split."""
        return sum(shard.tokens for shard in self.splits.get(split, ()))

    def to_json(self) -> str:
        """The text of the manifest file."""
        return json.dumps({"format": FORMAT, **asdict(self), "hash": self.digest}, indent=1) + "\n"

    @property
    def limit(self) -> int:
        """Tokens are below it."""
        return self.vocab

    @cached_property
    def digest(self) -> str:
        """A hash of the manifest. It is equal for equal tokens in equal shards."""
        return hash_of_manifest({"format": FORMAT, **asdict(self)})


def hash_of_manifest(tree: Mapping[str, Any]) -> str:
    """The hash that a manifest's file has under the key `hash`: BLAKE2b of its other keys.

    It is of their JSON text with sorted keys and without spaces, in UTF-8. A tokenizer "none"
    counts as "bytes", which earlier versions wrote, so that runs on such data can be resumed.
    """
    content = {key: value for key, value in tree.items() if key != "hash"}
    if content.get("tokenizer") == NO_TOKENIZER:
        content["tokenizer"] = BYTES
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read a data folder's manifest.

    Raises:
        DataError: there is no manifest, or it is damaged, or it is that of a table.
    """
    return checked_manifest(directory, parse_manifest, "text|tokens")


def checked_manifest(directory: Path, parse: Callable[[Any], M], kind: str) -> M:
    """Read a data folder's manifest, and check it.

    Args:
        directory: the data folder.
        parse: makes a manifest from the file's JSON tree. It may raise a ValueError.
        kind: what `hpc-train prepare` has to be called with to make such a folder.

    Raises:
        DataError: there is no manifest, or it is damaged, or of another kind or version.
    """
    path = directory / FILE_NAME
    try:
        if not path.is_file():  # reading a pipe that nobody writes to would wait forever
            raise FileNotFoundError
        if path.stat().st_size > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        return parse(json.loads(text, object_pairs_hook=_without_duplicates))
    except FileNotFoundError:
        remedy = f"`hpc-train prepare {kind} PATH... --out {directory}` makes it"
        several = str(directory).split(",")
        if several[1:] and all(Path(one.strip()).is_dir() for one in several):
            parts = ", ".join(f"{{path: {one.strip()}, weight: 1}}" for one in several)
            remedy = f"give a mixture of several folders as a list: '[{parts}]'"
        raise DataError(f"{directory} holds no prepared data (no {FILE_NAME})", remedy) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "make it readable") from None
    except OtherKindError as error:
        raise DataError(
            f"{directory} is a folder of another kind: {error}",
            f"give a folder that `hpc-train prepare {kind}` has made",
        ) from None
    except OtherVersionError as error:
        raise DataError(
            f"{path} was made by another version of hpc_train: {error}",
            "use the version that made it, or prepare the data with this one into a new folder",
        ) from None
    except RecursionError:
        raise DataError(f"{path} is damaged (it is nested too deeply)", PREPARE_AGAIN) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error})", PREPARE_AGAIN) from None


def read_manifests(directories: Sequence[Path]) -> list[Manifest]:
    """Read the manifests of data folders that are trained on together.

    Raises:
        DataError: as `read_manifest` and `describe_tokenizer` raise it, or two folders have
            vocabularies of different sizes, or different tokenizers.
    """
    found = [read_manifest(directory) for directory in directories]
    if not found[1:]:
        return found
    remedy = "prepare all folders of a mixture with the same tokenizer"
    texts = [tokenizer_of(one, at) for one, at in zip(found, directories, strict=True)]
    for manifest, directory, text in zip(found, directories, texts, strict=True):
        if manifest.vocab != found[0].vocab:
            raise DataError(
                f"{directory} has a vocabulary of {plural(manifest.vocab, 'token')}, and "
                f"{directories[0]} has one of {found[0].vocab}",
                remedy,
            )
        # Earlier versions wrote "bytes" for tokens without a tokenizer, too.
        if text != texts[0] and {text, texts[0]} != {NO_TOKENIZER, BYTES}:
            raise DataError(f"{directory} has another tokenizer than {directories[0]}", remedy)
    return found


def tokenizer_of(manifest: Manifest, directory: Path) -> str:
    """The description of the tokenizer of a data folder's tokens: see `tokenizer.loads`.

    Raises:
        DataError: as `describe_tokenizer` raises it.
    """
    return as_recorded(describe_tokenizer(manifest.tokenizer, directory), manifest.vocab)


def parse_manifest(tree: Any) -> Manifest:
    """Make a manifest from its file's JSON tree, and check every value.

    Raises:
        ValueError: a key is missing or unknown, a value is not allowed, or the values do not have
            the manifest's hash.
    """
    check_format(tree, FORMAT)
    keys = [field.name for field in fields(Manifest)]
    check_keys("the manifest", tree, ["format", *keys, "hash"])
    given = {key: tree[key] for key in keys}
    dtype, splits = given["dtype"], given["splits"]
    if not isinstance(dtype, str) or dtype not in TOKEN_BYTES:
        raise ValueError(f"dtype is {dtype!r}, not one of {', '.join(TOKEN_BYTES)}")
    check_number("vocab", given["vocab"], 1, 1 << 8 * TOKEN_BYTES[dtype])
    check_number("documents", given["documents"], 0, LARGEST_SIZE)
    check_text("tokenizer", given["tokenizer"], PLAIN_NAME, "a plain file name")
    shards = parse_splits(splits, Shard, dtype)
    manifest = Manifest(**{**given, "splits": shards})
    check_hash(tree, manifest.digest)
    return manifest


def check_hash(tree: Any, digest: str) -> None:
    """Raise a ValueError unless a manifest has the hash of its content."""
    if tree["hash"] != digest:
        found = short_value(tree["hash"])
        raise ValueError(f"its hash is {found}, but its content has the hash {digest}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which Python would take with the last of several values of a key."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has the key {short_value(twice)} twice")
    return tree


def parse_splits(splits: Any, kind: type[_S], dtype: str) -> dict[str, tuple[_S, ...]]:
    """Make the shards of each split from their JSON trees, and check them together.

    Args:
        splits: the tree of all splits.
        kind: the class of a shard.
        dtype: the type of what the shards' first dataset has.

    Raises:
        ValueError: the tree is not one of splits, or a value is not allowed.
    """
    if not isinstance(splits, dict) or not set(splits) <= {*SPLITS}:
        raise ValueError(f"splits are {short_value(splits)}, not some of {', '.join(SPLITS)}")
    shards = {}
    for split, trees in splits.items():
        if not isinstance(trees, list):
            raise ValueError(f"split {split} is not a list of shards")
        shards[split] = tuple(
            _shard(kind, f"shard {n} of {split}", tree, dtype) for n, tree in enumerate(trees)
        )
    every = [shard for some in shards.values() for shard in some]
    if len({shard.name for shard in every}) < len(every):
        raise ValueError("two shards have the same name")
    if sum(shard.file_bytes for shard in every) > LARGEST_SIZE:
        raise ValueError("the shards have more bytes together than a file system can hold")
    return shards


def _shard(kind: type[_S], what: str, tree: Any, dtype: str) -> _S:
    keys = [*kind.__annotations__]
    check_keys(what, tree, keys)
    for key in ("name", "source"):
        if key in keys and (key, tree[key]) != ("source", ""):
            check_text(f"{what}: {key}", tree[key], PLAIN_NAME, "a plain file name")
    check_text(f"{what}: hash", tree["hash"], HASH, "32 hexadecimal digits")
    for key in keys:
        if key not in ("name", "source", "hash"):
            least = 1 if key in ("tokens", "rows") else 0
            check_number(f"{what}: {key}", tree[key], least, LARGEST_SIZE)
    shard = kind(**tree)
    for name, (offset, nbytes) in shard.extents(dtype).items():
        if offset + nbytes > shard.file_bytes and not (name == "tokens" and shard.source):
            raise ValueError(f"{what}: its {name} end behind the end of the file")
    return shard


class OtherKindError(ValueError):
    """A manifest is sound, as far as its format says, but of another kind of data."""


class OtherVersionError(ValueError):
    """A manifest has the hash of its content, and a format of another version."""


def check_format(tree: Any, wanted: str) -> None:
    """Raise a ValueError unless a manifest has a format.

    Raises:
        OtherKindError: the manifest is of another kind of data.
        OtherVersionError: it is whole, and of another version.
        ValueError: its format is not known.
    """
    found = tree.get("format") if isinstance(tree, dict) else wanted
    if found == wanted:
        return
    of, kind = str(found).partition("/")[0], wanted.partition("/")[0]
    if of != kind and of in DATA_KINDS:
        raise OtherKindError(f"it has {DATA_KINDS[of]}, not {DATA_KINDS[kind]}")
    text = f"its format is {short_value(found)}, not {wanted}"
    if of == kind and tree.get("hash") == hash_of_manifest(tree):
        raise OtherVersionError(text)
    raise ValueError(text)


def check_keys(what: str, tree: Any, keys: Sequence[str]) -> None:
    """Raise a ValueError unless a JSON tree is an object with exactly these keys."""
    if not isinstance(tree, dict):
        raise ValueError(f"{what} is not an object with keys")
    if missing := [key for key in keys if key not in tree]:
        raise ValueError(f"{what} lacks the key {missing[0]}")
    if unknown := sorted(set(tree) - set(keys)):
        raise ValueError(f"{what} has the unknown key {short_value(unknown[0])}")


def check_number(what: str, value: Any, least: int, most: int) -> None:
    """Raise a ValueError unless a value is a whole number in a range."""
    if type(value) is not int or not least <= value <= most:  # True is an int, too
        raise ValueError(
            f"{what} is {short_value(value)}, not a whole number from {least} to {most}"
        )


def check_text(what: str, value: Any, pattern: re.Pattern[str], wanted: str) -> None:
    """Raise a ValueError unless a value is a text that a pattern matches wholly."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {short_value(value)}, not {wanted}")


def short_value(value: Any) -> str:
    """A value for a message, cut to 80 characters, as a damaged file may have longer ones."""
    return text if len(text := ascii(value)) <= 80 else f"{text[:80]}..."
