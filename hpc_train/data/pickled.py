"""Copies data sets by pickle, in this process or into others, with copies of their tensors."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import mmap
import os
import pickle
from bisect import bisect
from collections.abc import Callable, Iterable
from functools import cached_property
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch

LARGE_CONTENT = 1 << 12  # bytes of a tensor or an array that does not go through the pickle
_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))


class _Copying(ForkingPickler):
    """torch's pickler puts all tensors into memory that processes share: each would write to it.

    So this one copies them, and each memory once, however many tensors lie in it. What a data set
    itself has put into shared memory remains shared with a process that is being started. Large
    contents are not in the pickle: `take` gets them. A file that arrays are mapped from is mapped
    again, once for all of them, as it may be larger than the memory.
    """

    def __init__(self, stream: io.BytesIO, take: Callable[[memoryview], None]) -> None:
        def stays(buffer: pickle.PickleBuffer) -> bool:
            content = buffer.raw()
            if content.nbytes >= LARGE_CONTENT:
                take(content)
            return content.nbytes < LARGE_CONTENT

        super().__init__(stream, 5, True, stays)
        self._same: dict[int, bool] = {}  # whether a mapping is still that of its path's file

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, np.ndarray) and (root := self._reachable(part)) is not None:
            if part is root:
                return np.memmap, _map_again(root)
            place = part.ctypes.data - root.ctypes.data
            return _view_of, (root, place, (part.dtype, part.shape, part.strides), type(part))
        if isinstance(part, torch.Tensor) and part.is_cuda and get_spawning_popen() is None:
            return _on_device, (part.detach().cpu(), part.device)  # torch only shares it
        if isinstance(part, torch.Tensor) and (part.is_conj() or part.is_neg()):
            return _itself, (part.resolve_conj().resolve_neg(),)  # torch's pickler forgets both
        if not isinstance(part, torch.UntypedStorage) or part.device.type != "cpu":
            return NotImplemented
        if part.is_shared() and get_spawning_popen() is not None:
            return NotImplemented
        return _storage, (pickle.PickleBuffer(_memory_of(part)),)

    def _reachable(self, array: np.ndarray) -> np.memmap[Any, Any] | None:
        """What `_root_of` finds, if its path still leads to the file that it is mapped from."""
        if (root := _root_of(array)) is None:
            return None
        if id(root) not in self._same:
            try:
                np.memmap(*_map_again(root))  # the file may be too short now
                inode = self._inodes[bisect(self._inodes, (root.ctypes.data, math.inf)) - 1][1]
                self._same[id(root)] = Path(root.filename or "").stat().st_ino == inode
            except (OSError, ValueError):
                self._same[id(root)] = False
        return root if self._same[id(root)] else None

    @cached_property
    def _inodes(self) -> list[tuple[int, int]]:
        """Where each mapping of this process begins, and its file's inode; ordered."""
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        lines = [line.split(maxsplit=5) for line in text.split("\n") if line]
        return [(int(one[0].partition("-")[0], 16), int(one[4])) for one in lines]


def _root_of(array: np.ndarray) -> np.memmap[Any, Any] | None:
    """The array that is mapped from a file and has another array's memory; None if there is none.

    Arrays of mode "c" may have other values than the file, so they have none.
    """
    if type(array) not in (np.ndarray, np.memmap) or not array.size or array.dtype.hasobject:
        return None
    root: Any = array
    while root is not None and not isinstance(getattr(root, "base", None), mmap.mmap):
        root = getattr(root, "base", None)
    if type(root) is not np.memmap or root.mode == "c" or root.filename is None:
        return None
    return root


def _map_again(root: np.memmap[Any, Any]) -> tuple[Any, ...]:
    """What makes an array of a whole mapping. What is written to it changes no file."""
    mode = "r" if root.mode == "r" else "c"
    order = "C" if root.flags.c_contiguous else "F"
    return str(root.filename), root.dtype, mode, root.offset, root.shape, order


def _view_of(root: np.ndarray, place: int, form: Any, of: type) -> np.ndarray:
    dtype, shape, strides = form
    first = root.ravel("K").view(np.uint8)[place : place + dtype.itemsize].view(dtype)
    made = np.lib.stride_tricks.as_strided(first, shape, strides, subok=True)
    return made if of is np.memmap else np.asarray(made)


def deep_copies_of(part: Any, datasets: Iterable[Any], count: int) -> list[Any]:
    """Deep copies of an object for other threads. They share arrays that are mapped with mode "r".

    Args:
        part: the object.
        datasets: the data sets in it. Their attributes, and lists, tuples, dicts and further data
            sets in them, are searched for such arrays.
        count: how many copies.
    """
    shared: dict[int, Any] = {}
    seen = set[int]()
    left = [value for one in datasets for value in getattr(one, "__dict__", {}).values()]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found: Iterable[Any] = ()
        if isinstance(value, np.ndarray):
            if (root := _root_of(value)) is not None and root.mode == "r":
                shared[id(value)] = value
        elif isinstance(value, (list, tuple)):
            found = value
        elif isinstance(value, dict):
            found = value.values()
        elif isinstance(value, torch.utils.data.Dataset):
            found = vars(value).values()
        left += [one for one in found if type(one) not in _PLAIN]  # lists of paths are long
    return [copy.deepcopy(part, dict(shared)) for _ in range(count)]


def _storage(content: Any) -> torch.UntypedStorage:
    made = getattr(content, "storage", None)  # of `_memory_of`
    return made or torch.tensor(np.frombuffer(content, np.uint8)).untyped_storage()


def _memory_of(storage: torch.UntypedStorage) -> Any:
    """The memory of a storage. Tensors forbid `resize_` once they were made NumPy arrays."""
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage  # keeps it
    return memory


def _new(size: int) -> tuple[Any, memoryview]:
    """New memory, which a tensor may have for its own."""
    memory = _memory_of(torch.UntypedStorage(size))
    return memory, pickle.PickleBuffer(memory).raw()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _on_device(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    return content.to(device)


def copy_of(part: Any) -> Any:
    """A copy of an object, made by pickle."""
    stream, contents = io.BytesIO(), list[memoryview]()
    _Copying(stream, contents.append).dump(part)
    return pickle.loads(stream.getvalue(), buffers=map(_copy, contents))


def _copy(content: memoryview) -> Any:
    memory, view = _new(content.nbytes)
    view[:] = content
    return memory


class Sent:
    """An object that is sent to several processes. Each process makes a copy of it.

    It is pickled for each of them, as parts such as locks are sent to one process only. But large
    contents of its tensors and arrays are written once, into one file in memory. Each process reads
    them from there into the memory where they stay.

    Args:
        part: the object.
    """

    def __init__(self, part: Any) -> None:
        self.part, self.pickle = part, b""
        self._file: Any = os.memfd_create("data set")
        self._places: list[tuple[int, int]] = []  # in the file: offset and size of each content
        self._written: dict[tuple[int, int], int] = {}  # offsets by address and size
        self._kept: list[memoryview] = []  # so that no other content gets an address that is in use
        self._end = 0

    def __getstate__(self) -> dict[str, Any]:
        stream, places = io.BytesIO(), list[tuple[int, int]]()
        _Copying(stream, lambda content: places.append(self._place(content))).dump(self.part)
        return {"pickle": stream.getvalue(), "_places": places, "_file": DupFd(self._file)}

    def _place(self, content: memoryview) -> tuple[int, int]:
        which = np.frombuffer(content, np.uint8).ctypes.data, content.nbytes
        if which not in self._written:
            self._kept.append(content)
            self._written[which] = self._end
            while content:
                written = os.write(self._file, content)
                self._end += written
                content = content[written:]
        return self._written[which], which[1]

    def close(self) -> None:
        """Give the file back. Processes that have been started still have it."""
        os.close(self._file)
        self._kept.clear()

    def load(self) -> Any:
        """Make the copy, in a process that was sent this; only once."""
        file = self._file.detach()
        try:
            return pickle.loads(self.pickle, buffers=(_read(file, *at) for at in self._places))
        finally:
            os.close(file)


def _read(file: int, offset: int, size: int) -> Any:
    memory, view = _new(size)
    while view:
        done = os.preadv(file, [view], offset)
        offset, view = offset + done, view[done:]
    return memory
