"""Where the values of a variable lie in its file, checked against the file's size.

The numbers come from a helper process that has opened a file of others, or from an index file. Both
may be wrong. So nothing is used before it is checked: what passes here never makes a reader read
behind the end of the file, or take more memory than the values of such a file can need.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_train.data.arrays.filters import (
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    Filter,
    Unreadable,
    known_filter,
)

LARGEST_CHUNK = 1 << 30  # bytes of a chunk's values
LARGEST_LENGTH = 1 << 62  # of an axis, and of all values
MISSING_LISTED = 66  # values that stand for missing ones: of the attributes, and a default
MOST_AXES = 32  # HDF5 has no more
# HDF5's deflate makes at most 1032 bytes of one. A file that has more values than this consists of
# chunks that nobody has written.
VALUES_PER_BYTE = 2048
SPARE_BYTES = 64 << 20
STORED_TYPES = {f"{order}{kind}" for order in "<>" for kind in ("i2", "i4", "i8", "u2", "u4", "u8")}
STORED_TYPES |= {"|i1", "|u1", *(f"{order}f{size}" for order in "<>" for size in (2, 4, 8))}
FIXED_TEXT = re.compile(r"\|S[1-9][0-9]{0,4}")
MOST_FIELDS = 10_000  # of a table's rows
LARGEST_ROW = 1 << 24  # bytes
COLUMNS = {"numbers": "<i8", "offsets": "<i8", "sizes": "<u4", "masks": "<u4"}


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The stored chunks of a variable, in the order of their numbers.

    Args:
        shape: lengths of a chunk's axes.
        grid: number of chunks along each axis.
        filters: what was done to each chunk when it was written, in this order.
        numbers: place of each chunk in the flattened grid, int64 (chunks,).
        offsets: position of each chunk in the file, int64 (chunks,), in bytes.
        sizes: bytes of each chunk in the file, uint32 (chunks,).
        masks: bit n is set if filter n was left out, uint32 (chunks,).
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    filters: tuple[Filter, ...]
    numbers: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray


@dataclass(frozen=True, eq=False)
class Stored:
    """One variable of one file.

    Args:
        shape: lengths of its axes. The first one is the time or sample axis.
        dtype: type of the values in the file: numbers, texts of fixed length, or rows of these.
        fill: the value of what nobody has written.
        missing: values that stand for missing ones, of that type.
        scale, add: the values are to be multiplied by `scale`, and `add` is to be added.
        offset: position of the first value of a contiguous variable, in bytes; None: it has none.
        chunks: the chunks of a chunked variable.
        truth: the fields whose numbers 0 and 1 stand for False and True; None for a variable that
            has no fields.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Any
    missing: tuple[Any, ...]
    scale: float
    add: float
    offset: int | None = None
    chunks: ChunkTable | None = None
    truth: frozenset[str | None] = frozenset()


def parse_variable(tree: Any, file_bytes: int) -> Stored:
    """Make a variable from a helper's answer or an index file, and check every number.

    Args:
        tree: a JSON object.
        file_bytes: size of the file.

    Raises:
        ValueError: something in it is not allowed, or lies outside of the file.
    """
    if not isinstance(tree, dict):
        raise ValueError("it is not an object")
    shape = _lengths("shape", tree.get("shape"), 0)
    kind = tree.get("dtype")
    dtype = _row_type(kind, tree.get("row_bytes")) if isinstance(kind, list) else _type(kind)
    if not all(shape[1:]):
        raise Unreadable("an axis has the length 0", "leave it out: it has no values")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > VALUES_PER_BYTE * file_bytes + SPARE_BYTES:
        raise ValueError(
            f"it claims {nbytes} bytes of values, more than a file of {file_bytes} bytes can hold"
        )
    missing = tree.get("missing")
    if not isinstance(missing, list) or len(missing) > MISSING_LISTED:
        raise ValueError("its missing values are no list")
    return Stored(
        shape,
        dtype,
        _fitting(_value("fill", tree.get("fill")), dtype),
        _comparable([_value("missing", one) for one in missing], dtype),
        _finite("scale", tree.get("scale")),
        _finite("add", tree.get("add")),
        None if "chunk" in tree else _offset(tree.get("offset"), nbytes, file_bytes),
        _chunks(tree, shape, dtype, file_bytes) if "chunk" in tree else None,
        _truth(tree.get("truth", []), dtype),  # index files of earlier versions lack it
    )


def _type(kind: Any) -> np.dtype[Any]:
    if not isinstance(kind, str) or not (kind in STORED_TYPES or FIXED_TEXT.fullmatch(kind)):
        raise ValueError(f"its type is {ascii(kind)[:40]}")
    return np.dtype(kind)


def _row_type(fields: list[Any], row_bytes: Any) -> np.dtype[Any]:
    """The type of a row with fields, each of a name, a type, a number of values and an offset."""
    if type(row_bytes) is not int or not 0 < row_bytes <= LARGEST_ROW:
        raise ValueError(f"a row has {ascii(row_bytes)[:40]} bytes")
    if not 0 < len(fields) <= MOST_FIELDS:
        raise ValueError(f"it has {len(fields)} fields")
    formats: list[Any] = []
    for one in fields:
        if not isinstance(one, list) or [*map(type, one)] != [str, str, int, int]:
            raise ValueError("a field is no list of a name, a type, a number and an offset")
        _, kind, count, offset = one
        base = _type(kind)
        if not (0 < count <= row_bytes and 0 <= offset <= row_bytes - count * base.itemsize):
            raise ValueError("a field leaves its row")
        formats.append(base if count == 1 else (base, (count,)))
    names, offsets = [one[0] for one in fields], [one[3] for one in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": row_bytes})


def _truth(given: Any, dtype: np.dtype[Any]) -> frozenset[str | None]:
    types: dict[str | None, Any] = {name: dtype[name].base for name in dtype.names or ()}
    types[None] = dtype
    if not isinstance(given, list) or not all(
        (one is None or type(one) is str) and types.get(one) == np.uint8 for one in given
    ):
        raise ValueError("its truth values are no list of fields of bytes")
    return frozenset(given)


def _lengths(what: str, value: Any, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_AXES:
        raise ValueError(f"its {what} is not a list of 1 to {MOST_AXES} lengths")
    if not all(type(one) is int and least <= one <= LARGEST_LENGTH for one in value):
        raise ValueError(f"its {what} has a length that is not allowed")
    if math.prod(value) > LARGEST_LENGTH:
        raise ValueError(f"its {what} has too many values")
    return tuple(value)


def _value(what: str, value: Any) -> float:
    if value is None and what == "fill":
        return 0
    if type(value) not in (int, float):
        raise ValueError(f"{what} is not a number")
    if isinstance(value, int) and abs(value) >= 1 << 64:
        raise ValueError(f"{what} has too many digits")
    return value  # type: ignore[no-any-return]


def _finite(what: str, value: Any) -> float:
    number = _value(what, value)
    if abs(number) > 1e300 or math.isnan(number):
        raise ValueError(f"{what} is not a finite number")
    return float(number)


def _fitting(value: float, dtype: np.dtype[Any]) -> Any:
    """The fill value as a number of the variable's type, which may be unsigned by an attribute."""
    if dtype.kind in "SV":
        return np.zeros((), dtype)[()]
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(value))
    limits = np.iinfo(dtype)
    if isinstance(value, int) and -limits.max <= value <= limits.max:
        return value if value >= limits.min else value % (1 << 8 * dtype.itemsize)
    return 0


def _comparable(values: list[float], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """The values that numbers of this type can be equal to."""
    if dtype.kind in "SV":
        return ()
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return tuple(dtype.type(one) for one in values if not math.isnan(one))
    limits = np.iinfo(dtype)
    whole = [int(one) for one in values if math.isfinite(one) and one == int(one)]
    return tuple(dtype.type(one) for one in whole if limits.min <= one <= limits.max)


def _offset(value: Any, nbytes: int, file_bytes: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= file_bytes - nbytes:
        raise ValueError(f"{nbytes} bytes of values from {ascii(value)[:40]} on leave the file")
    return value


def _chunks(tree: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any], file_bytes: int
            ) -> ChunkTable:  # fmt: skip
    chunk = _lengths("chunk", tree["chunk"], 1)
    if len(chunk) != len(shape):
        raise ValueError("its chunks have another number of axes")
    nbytes = math.prod(chunk) * dtype.itemsize
    if nbytes > LARGEST_CHUNK:
        raise ValueError(f"a chunk has {nbytes} bytes, more than {LARGEST_CHUNK}")
    grid = tuple(-(-length // each) for length, each in zip(shape, chunk, strict=True))
    given = tree.get("filters")
    if not isinstance(given, list) or len(given) > 32:
        raise ValueError("its filters are no list")
    filters = tuple(known_filter(one) for one in given)
    for code in (DEFLATE, SHUFFLE, FLETCHER32):
        if sum(one.code == code for one in filters) > 1:
            raise ValueError(f"filter {code} is there twice")
    columns = _columns(tree.get("table"))
    _check_table(columns, math.prod(grid), nbytes, file_bytes)
    return ChunkTable(chunk, grid, filters, **columns)


def _check_table(columns: dict[str, np.ndarray], chunks: int, nbytes: int, file_bytes: int) -> None:
    numbers, offsets, sizes = (columns[name] for name in ("numbers", "offsets", "sizes"))
    if not len(numbers):
        return
    if numbers[0] < 0 or numbers[-1] >= chunks or (numbers[1:] <= numbers[:-1]).any():
        raise ValueError("its chunks are not those of its shape")
    if offsets.min() < 0 or offsets.max() > file_bytes or sizes.min() == 0:
        raise ValueError("a chunk lies outside of the file")
    if (offsets + sizes.astype(np.int64)).max() > file_bytes:
        raise ValueError("a chunk ends behind the end of the file")
    # What cannot be compressed becomes a little longer.
    if sizes.max() > nbytes + nbytes // 8 + (1 << 16):
        raise ValueError("a chunk has more bytes than its values")


def _columns(table: Any) -> dict[str, np.ndarray]:
    if not isinstance(table, dict) or not all(isinstance(table.get(n), str) for n in COLUMNS):
        raise ValueError("its table of chunks is not there")
    try:
        columns = {
            name: np.frombuffer(base64.b64decode(table[name], validate=True), kind)
            for name, kind in COLUMNS.items()
        }
    except (binascii.Error, ValueError):
        raise ValueError("its table of chunks is damaged") from None
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("its table of chunks has columns of different lengths")
    return columns
