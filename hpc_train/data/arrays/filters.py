"""Decode chunks as HDF5's filters have encoded them, without the HDF5 library.

Deflate, shuffle and Fletcher-32 are those of the HDF5 file format specification (III.L). Other
filters are taken from the package hdf5plugin if it is installed: its libraries have one function
each for a filter (H5Z_class2_t in H5Zpublic.h), which needs no HDF5 file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
# Filters without loss that hdf5plugin has, by their registered numbers.
OF_PLUGINS = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bshuf",
    32015: "zstd",
    32026: "blosc2",
}
NAMES = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", **OF_PLUGINS}
REVERSE = 0x0100  # H5Z_FLAG_REVERSE
SUM_BYTES = 4  # of a checksum
WORDS_AT_ONCE = 1 << 15  # so that sums of products of 16 bits fit into 64 bits


class Unreadable(ValueError):
    """A sound variable cannot be read here.

    Args:
        why: the reason.
        remedy: what the user can do.
    """

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class Filter:
    """One filter of a variable: its registered number, and the values that it was given."""

    code: int
    values: tuple[int, ...]


def known_filter(tree: Any) -> Filter:
    """Make a filter from [code, values, name].

    Raises:
        ValueError: it is damaged, or nothing here decodes this filter.
    """
    match tree:
        case [int(code), list(values), str(name)] if all(
            type(one) is int and 0 <= one < 1 << 32 for one in values
        ):
            pass
        case _:
            raise ValueError("a filter is not described by numbers")
    if code == SHUFFLE and not (values and 1 <= values[0] <= 1 << 16):
        raise ValueError("its shuffle filter has no size of elements")
    if code in OF_PLUGINS and _plugin(code) is None:
        raise Unreadable(
            f"its filter {OF_PLUGINS[code]} ({code}) needs the package hdf5plugin, which is not "
            "installed here",
            "`pip install hdf5plugin`",
        )
    if code not in NAMES:
        raise Unreadable(
            f"its filter {ascii(name)[1:-1]} ({code}) is not supported",
            "write it with gzip (h5repack -f GZIP=1, nccopy -d 1)",
        )
    return Filter(code, tuple(values))


def unfiltered(
    data: bytes | memoryview, filters: Sequence[Filter], mask: int, nbytes: int
) -> np.ndarray:
    """Undo the filters of a chunk, the last one first.

    Args:
        data: the chunk's bytes in the file.
        filters: its filters, in the order in which they were applied.
        mask: bit n is set if filter n was left out.
        nbytes: bytes of the chunk's values.

    Returns:
        The bytes of its values, uint8 (nbytes,).

    Raises:
        ValueError: the bytes are damaged.
    """
    used = [one for n, one in enumerate(filters) if not mask >> n & 1]
    for n, one in reversed(list(enumerate(used))):
        # What this filter was given: checksums of earlier filters are part of it.
        before = nbytes + SUM_BYTES * sum(other.code == FLETCHER32 for other in used[:n])
        if one.code == DEFLATE:
            data = _inflated(data, before)
        elif one.code == SHUFFLE:
            data = _unshuffled(data, one.values[0])
        elif one.code == FLETCHER32:
            data = _summed(data)
        else:
            data = _by_plugin(one, data, before)
    if len(data) != nbytes:
        raise ValueError(f"it has {len(data)} bytes of values in place of {nbytes}")
    return np.frombuffer(data, np.uint8)


def _inflated(data: bytes | memoryview, nbytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, max(nbytes, 1))
        # The end of the stream may come behind its last byte, with a checksum to compare.
        if len(found) < nbytes or (not stream.eof and stream.decompress(stream.unconsumed_tail, 1)):
            raise ValueError("its compressed values have another length")
    except zlib.error as error:
        raise ValueError(f"it does not decompress ({error})") from None
    if not stream.eof:
        raise ValueError("its compressed values end early")
    return found


def _unshuffled(data: bytes | memoryview, size: int) -> bytes | memoryview:
    count = len(data) // size
    if size == 1 or count < 2:
        return data
    flat = np.frombuffer(data, np.uint8)
    out = np.empty(len(data), np.uint8)
    planes, values = (
        flat[: count * size].reshape(size, count),
        out[: count * size].reshape(count, size),
    )
    for byte in range(size):
        values[:, byte] = planes[byte]
    out[count * size :] = flat[count * size :]
    return out.data


def _summed(data: bytes | memoryview) -> bytes | memoryview:
    if len(data) < SUM_BYTES:
        raise ValueError("its checksum is not there")
    body, told = data[:-SUM_BYTES], int.from_bytes(data[-SUM_BYTES:], "little")
    found = fletcher32(body)
    # HDF5 before 1.6.3 wrote the bytes of each half in the other order on some machines.
    swapped = (found & 0x00FF00FF) << 8 | (found & 0xFF00FF00) >> 8
    if told not in (found, swapped):
        raise ValueError("it does not have its checksum")
    return body


def fletcher32(data: bytes | memoryview) -> int:
    """HDF5's Fletcher-32 checksum of some bytes, which it takes for big-endian words."""
    flat = np.frombuffer(data, np.uint8)
    words = flat[: len(flat) // 2 * 2].view(">u2").astype(np.uint64)
    if len(flat) % 2:
        words = np.append(words, np.uint64(int(flat[-1]) << 8))
    first = second = 0
    weights = np.arange(WORDS_AT_ONCE, 0, -1, dtype=np.uint64)
    for begin in range(0, len(words), WORDS_AT_ONCE):
        some = words[begin : begin + WORDS_AT_ONCE]
        second = _folded(second + len(some) * first + int(some @ weights[-len(some) :]))
        first = _folded(first + int(some.sum()))
    return second << 16 | first


def _folded(total: int) -> int:
    """A sum in one's complement of 16 bits, in which only 0 becomes 0."""
    return (total - 1) % 65535 + 1 if total else 0


class _Class(ctypes.Structure):
    """H5Z_class2_t of H5Zpublic.h."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", ctypes.c_void_p),
    )


_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    *(ctypes.c_uint, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint)),
    *(ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p)),
)
_plugins: dict[int, Any] = {}
_loading = threading.Lock()


def _plugin(code: int) -> Any:
    """The function of a filter of hdf5plugin; None if it is not installed."""
    with _loading:
        if code not in _plugins:
            _plugins[code] = _loaded(code)
        return _plugins[code]


def _loaded(code: int) -> Any:
    try:
        found = importlib.util.find_spec("hdf5plugin")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder, "plugins", f"libh5{OF_PLUGINS[code]}.so")
        try:
            library = ctypes.CDLL(str(path))
            library.H5PLget_plugin_info.restype = ctypes.POINTER(_Class)
            told = library.H5PLget_plugin_info().contents
        except (OSError, AttributeError, ValueError):
            continue
        if told.id == code and told.filter:
            return _FUNCTION(told.filter)
    return None


def _by_plugin(one: Filter, data: bytes | memoryview, nbytes: int) -> bytes:
    function = _plugin(one.code)
    if function is None:
        raise ValueError(f"the filter {NAMES[one.code]} needs the package hdf5plugin")
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    # The function frees the memory that it gets. It allocates the memory that it returns.
    room = ctypes.c_size_t(max(len(data), nbytes))
    memory = ctypes.c_void_p(library.malloc(room))
    if not memory:
        raise MemoryError
    ctypes.memmove(memory, bytes(data), len(data))
    values = (ctypes.c_uint * max(1, len(one.values)))(*one.values)
    try:
        count = function(
            REVERSE, len(one.values), values, len(data), ctypes.byref(room), ctypes.byref(memory)
        )
        if count != nbytes:
            raise ValueError(f"the filter {NAMES[one.code]} does not decode it")
        return ctypes.string_at(memory, count)
    finally:
        library.free(memory)
