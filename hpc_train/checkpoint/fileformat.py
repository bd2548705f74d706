"""The layout of a checkpoint file: pure arithmetic, no files and no ranks.

A checkpoint is a safetensors file (https://github.com/huggingface/safetensors, "Format"):

    0            u64 N, little endian: length of the header. Zero until all else is on the disk,
                 and safetensors refuses a file with zero: N is the commit record.
    8            JSON header, padded with spaces up to data_start, which is a multiple of 1 MiB,
                 or of 16 MiB where the file is striped, so that an extent lies in one stripe
    data_start   the tensors, row-major, little endian, ordered by (element size descending, name)
                 `__hpc_train__.state`, U8: JSON with all values that are not tensors
                 `__hpc_train__.hash`, U8: 16 bytes for each extent of all that stands before it

Extents are pieces of 16 MiB, counted from data_start. Each has an xxh3-128 hash. The header's
`__metadata__` has hashes of the hash table and of the header itself, so every byte is covered.
The file contains nothing about ranks: the same state gives the same bytes on any layout.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.sharding import SliceSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT_VERSION = "1"
FILE_ALIGNMENT = 1 << 20
EXTENT_BYTES = 16 << 20
STRIPED_BYTES = 10**9  # content larger than this is spread over servers, a stripe for each extent
HASH_BYTES = 16
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses larger ones
STATE = "__hpc_train__.state"
HASHES = "__hpc_train__.hash"
NO_HASH = "0" * 2 * HASH_BYTES

_TYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "U16": (2, "uint16"),
    "U32": (4, "uint32"),
    "U64": (8, "uint64"),
    "C64": (8, "complex64"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),  # from torch 2.7 on
}
"""The types that a file can hold, by the format's names: bytes of an element, torch's name."""

DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in _TYPES.items()}


@functools.cache
def format_dtypes() -> dict[torch.dtype, str]:
    """The format's name of each type that this torch has. Loads torch."""
    import torch  # not at the top, because headers are read without it

    known = ((name, theirs) for name, (_, theirs) in _TYPES.items())
    return {getattr(torch, theirs): name for name, theirs in known if hasattr(torch, theirs)}


@functools.cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """The inverse of `format_dtypes`: torch's types by the format's names. Loads torch."""
    return {name: dtype for dtype, name in format_dtypes().items()}


TensorForm: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"
"""Type and shape of a whole tensor."""


@dataclass(frozen=True)
class LocalTensor:
    """A rank's part of a tensor.

    Args:
        tensor: the part, contiguous.
        spec: which part of the whole tensor it is.
        owned: whether this rank writes it. One of the ranks of a replica that hold a part does.
    """

    tensor: Tensor
    spec: SliceSpec
    owned: bool = True

    @classmethod
    def whole(cls, tensor: Tensor) -> LocalTensor:
        """All of a tensor as one part."""
        return cls(tensor, SliceSpec.whole(tuple(tensor.shape)))

    @property
    def form(self) -> TensorForm:
        """Type and shape of the whole tensor, however small the part is."""
        return self.tensor.dtype, self.spec.shape


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the file: bytes `begin` to `end`, counted from data_start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FileMap:
    """The whole file's layout.

    Args:
        entries: the tensors, the state and the hashes, in the order of the file.
        data_start: the byte of the file at which the first tensor begins.
        description: the entries as JSON.
    """

    entries: tuple[Entry, ...]
    data_start: int
    description: bytes = field(repr=False)

    @property
    def content_bytes(self) -> int:
        """Bytes of the tensors and the state, which the extents cover."""
        return self.entries[-1].begin

    @property
    def extents(self) -> int:
        """Number of extents."""
        return -(-self.content_bytes // EXTENT_BYTES)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + self.entries[-1].end

    def size(self, number: int) -> int:
        """Bytes of an extent."""
        begin, end = self.extent(number)
        return end - begin

    def extent(self, number: int) -> tuple[int, int]:
        """The first byte of an extent and the byte behind its last, counted from data_start."""
        begin = number * EXTENT_BYTES
        return begin, min(begin + EXTENT_BYTES, self.content_bytes)


def hash_of(data: Any) -> bytes:
    """xxh3-128 of a bytes-like object."""
    return xxhash.xxh3_128_digest(data)


def hash_in(table: bytes, number: int) -> bytes:
    """An extent's hash in the hash table."""
    return table[number * HASH_BYTES : (number + 1) * HASH_BYTES]


@dataclass(frozen=True)
class Contents:
    """Where the tensors lie. It does not depend on the state, which lies behind them.

    Args:
        entries: the tensors, in the order of the file.
        description: the entries as JSON.
    """

    entries: tuple[Entry, ...]
    description: bytes = field(repr=False)

    @classmethod
    def of(cls, forms: Mapping[str, TensorForm]) -> Contents:
        """Give each tensor its place.

        Args:
            forms: type and shape of each whole tensor, by name.

        Raises:
            CheckpointError: a tensor's dtype has no name in the format.
        """
        names = format_dtypes()
        for name, (dtype, _) in forms.items():
            if dtype not in names:
                raise CheckpointError(f"{name} has dtype {dtype}, which checkpoints cannot hold")
        ordered = sorted(forms.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        entries, position = [], 0
        for name, (dtype, shape) in ordered:
            end = position + math.prod(shape) * dtype.itemsize
            entries.append(Entry(name, names[dtype], shape, position, end))
            position = end
        return cls(tuple(entries), _description(entries))

    def layout(self, state_bytes: int) -> FileMap:
        """The whole file's layout, with a state of `state_bytes` bytes.

        Raises:
            CheckpointError: the header would be larger than safetensors reads.
        """
        begin = self.entries[-1].end if self.entries else 0
        content = begin + state_bytes
        hashes = -(-content // EXTENT_BYTES) * HASH_BYTES
        last = (
            Entry(STATE, "U8", (state_bytes,), begin, content),
            Entry(HASHES, "U8", (hashes,), content, content + hashes),
        )
        described = _description(last)
        if self.entries:
            described = self.description[:-1] + b"," + described[1:]
        text = len(_with_metadata(described, NO_HASH, NO_HASH))
        if text > MAX_HEADER_BYTES:
            many = len(self.entries)
            raise CheckpointError(f"{many} tensors need a header of {text} bytes, too large")
        return FileMap((*self.entries, *last), _data_start(text, content), described)


def _data_start(text: int, content: int) -> int:
    """The byte at which the tensors begin.

    Args:
        text: bytes of the header without its padding.
        content: bytes of tensors and state.
    """
    striped = -(-(8 + text) // EXTENT_BYTES) * EXTENT_BYTES
    if content > STRIPED_BYTES and striped <= MAX_HEADER_BYTES:
        return striped
    return -(-(8 + text) // FILE_ALIGNMENT) * FILE_ALIGNMENT


def header(layout: FileMap, hash_table: bytes) -> bytes:
    """The header's bytes, from byte 8 of the file up to data_start."""
    return _header(layout, hash_of(hash_table).hex())


def _header(layout: FileMap, table_hash: str) -> bytes:
    header_hash = hash_of(_with_metadata(layout.description, table_hash, NO_HASH)).hex()
    whole = _with_metadata(layout.description, table_hash, header_hash)
    return whole.ljust(layout.data_start - 8)


def _description(entries: Iterable[Entry]) -> bytes:
    tree = {
        e.name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": [e.begin, e.end]}
        for e in entries
    }
    return json.dumps(tree, separators=(",", ":")).encode()


def _with_metadata(description: bytes, table_hash: str, header_hash: str) -> bytes:
    metadata = {
        "format": "pt",
        "hpc_train.version": FORMAT_VERSION,
        "hpc_train.extent_bytes": str(EXTENT_BYTES),
        "hpc_train.table_hash": table_hash,
        "hpc_train.header_hash": header_hash,
    }
    first = json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode()
    return first[:-1] + b"," + description[1:]


GIVE_CHECKPOINT = (
    "give the checkpoint that `hpc-train checkpoint export` made it of, or a run directory; only "
    "checkpoint.weights takes tensors alone"
)


def parse_header(header_bytes: bytes, file_bytes: int) -> tuple[FileMap, str]:
    """Read a header back.

    Args:
        header_bytes: all from byte 8 up to data_start.
        file_bytes: the file's size.

    Returns:
        The layout, and the hash that the hash table must have, hexadecimal.

    Raises:
        CheckpointMismatch: another program wrote the file, or its format has another version.
        CheckpointError: this is not a header, or it is damaged, or the file has another size.
    """
    try:
        tree = json.loads(header_bytes)
        if b"hpc_train" not in header_bytes:
            raise CheckpointMismatch(
                "it has tensors alone, and is no checkpoint of hpc_train", GIVE_CHECKPOINT
            )
        metadata = tree.pop("__metadata__")
        if (version := metadata["hpc_train.version"]) != FORMAT_VERSION and _is_whole(header_bytes):
            raise CheckpointMismatch(
                f"its format version is {version}, this program reads {FORMAT_VERSION}",
                "use the hpc_train that wrote it, or a newer one",
            )
        table_hash = metadata["hpc_train.table_hash"]
        entries = tuple(
            Entry(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"])
            for name, e in tree.items()
        )
        _check_sizes(entries)
        layout = FileMap(entries, 8 + len(header_bytes), _description(entries))
        whole = layout.file_bytes == file_bytes and _header(layout, table_hash) == header_bytes
        last = [(entry.name, entry.dtype, len(entry.shape)) for entry in entries[-2:]]
        ours = last == [(STATE, "U8", 1), (HASHES, "U8", 1)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its header is not one of hpc_train ({error!r})") from None
    if not (whole and ours):
        raise CheckpointError("its header is damaged or its size is wrong")
    return layout, table_hash


def _is_whole(header_bytes: bytes) -> bool:
    """Whether a header of any version has the hash that it states."""
    said = re.search(rb'"hpc_train\.header_hash":"([0-9a-f]{32})"', header_bytes)
    if said is None:
        return False
    begin, end = said.span(1)
    without = header_bytes[:begin] + NO_HASH.encode() + header_bytes[end:]
    return hash_of(without.rstrip()).hex().encode() == said[1]


def _check_sizes(entries: Iterable[Entry]) -> None:
    """Check that tensors follow each other without gaps: a damaged file may state any offsets."""
    position = 0
    for entry in entries:
        numbers = [*entry.shape, entry.begin, entry.end]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{entry.name}: {numbers}")
        if math.prod(max(number, 1) for number in entry.shape) >= 1 << 63:
            # torch counts elements in 63 bits.
            raise ValueError(f"{entry.name} has the shape {entry.shape}")
        size = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if (entry.begin, entry.end) != (position, position + size):
            raise ValueError(f"{entry.name} is not {size} bytes from {position} on")
        position = entry.end


def names_between(layout: FileMap, begin: int, end: int) -> Iterator[Entry]:
    """The tensors that have bytes between `begin` and `end`, counted from data_start."""
    start = bisect.bisect_right(layout.entries, begin, key=lambda entry: entry.end)
    for entry in layout.entries[start:]:
        if entry.begin >= end:
            return
        if entry.begin < entry.end:
            yield entry
