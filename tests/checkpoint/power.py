"""What a machine that loses its power may leave of the calls that a program made.

Only what was synchronised is sure to be on the disk. Of what came later each piece may be there or
not, whatever the order: each write of a file, torn at a multiple of 512 bytes or not, and each
change of a folder's entries (Pillai et al., "All file systems are not created equal", OSDI 2014).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.checkpoint.faults import Call

SECTOR = 512


@dataclass
class Inode:
    """A file: its bytes on the disk, and the writes that may be lost: offset and data."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        """All is on the disk."""
        for offset, data in self.pending:
            _put(self.durable, offset, data)
        self.pending = []

    def left(self, random: Random, share: float) -> bytes:
        """Its bytes after the power has come back, if so large a share of the writes survived."""
        content = bytearray(self.durable)
        for offset, data in self.pending:
            if random.random() < share:
                torn = share < 1 and random.random() < 0.3
                end = random.randrange(0, len(data) + 1, SECTOR) if torn else len(data)
                _put(content, offset, data[:end])
        return bytes(content)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


class Disk:
    """One folder as the disk has it, brought up to date by the calls that go through it.

    Args:
        folder: all files that are in it now are on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = {p.name: Inode(bytearray(p.read_bytes())) for p in folder.iterdir()}
        self.seen = dict(self.entries)  # as programs see it
        self.changes: list[tuple[str, Inode | None]] = []  # of entries, that may be lost
        self._open: dict[int, Inode | None] = {}  # None: the folder
        self.states: list[Disk] = []

    def __call__(self, name: str, function: Call, *arguments: Any) -> Any:
        result = function(*arguments)
        note = {
            "create": self._create,
            "open": self._opened,
            "reserve": self._reserve,
            "write": self._write,
            "sync": self._sync,
            "rename": self._rename,
            "unlink": self._unlink,
        }
        if name in note:
            note[name](result, *arguments)
        self.states.append(self._copy())
        return result

    def _copy(self) -> Disk:
        states, self.states = self.states, []
        made = copy.deepcopy(self)
        self.states = states
        return made

    def _create(self, descriptor: int, path: Path, *_: Any) -> None:
        made = self._open[descriptor] = Inode()
        self._change(path.name, made)

    def _opened(self, descriptor: int, path: Path, *_: Any) -> None:
        self._open[descriptor] = None if path == self.folder else self.seen[path.name]

    def _reserve(self, _: None, descriptor: int, begin: int, size: int) -> None:
        self._pend(descriptor, begin, bytes(size))

    def _write(self, count: int, descriptor: int, data: Any, offset: int) -> None:
        self._pend(descriptor, offset, bytes(data[:count]))

    def _pend(self, descriptor: int, offset: int, data: bytes) -> None:
        inode = self._open[descriptor]
        assert inode is not None
        inode.pending.append((offset, data))

    def _sync(self, _: None, descriptor: int) -> None:
        inode = self._open[descriptor]
        if inode is not None:
            inode.sync()
            return
        for name, changed in self.changes:
            _enter(self.entries, name, changed)
        self.changes = []

    def _rename(self, _: None, source: Path, target: Path) -> None:
        moved = self.seen[source.name]
        self._change(source.name, None)
        self._change(target.name, moved)

    def _unlink(self, _: None, path: Path) -> None:
        self._change(path.name, None)

    def _change(self, name: str, inode: Inode | None) -> None:
        _enter(self.seen, name, inode)
        self.changes.append((name, inode))

    def leave(self, folder: Path, random: Random, share: float) -> None:
        """Fill an empty folder with what so large a share of the unsure changes leaves."""
        entries = dict(self.entries)
        for name, inode in self.changes:
            if random.random() < share:
                _enter(entries, name, inode)
        for name, inode in entries.items():
            (folder / name).write_bytes(inode.left(random, share))


def _enter(entries: dict[str, Inode], name: str, inode: Inode | None) -> None:
    if inode is None:
        entries.pop(name, None)
    else:
        entries[name] = inode
