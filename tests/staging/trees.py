"""Folders to copy, and what can be seen of one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hypothesis import strategies as st

NAMES = (
    st.binary(min_size=1, max_size=20)
    .filter(lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b".."))
    .map(os.fsdecode)
)
MODES = st.integers(0, 0o777).map(lambda mode: mode | 0o400)
TIMES = st.integers(0, 2**32)
FILES = st.tuples(st.just("file"), MODES, TIMES, st.binary(max_size=100))
SPARSE = st.tuples(st.just("sparse"), MODES, TIMES, st.integers(0, 3000))
LINKS = st.tuples(st.just("link"), NAMES)
SECOND_NAMES = st.tuples(st.just("second name"), st.integers(0, 5))
TREES = st.recursive(
    FILES | SPARSE | LINKS | SECOND_NAMES,
    lambda inside: st.tuples(
        st.just("folder"), MODES, TIMES, st.dictionaries(NAMES, inside, max_size=5)
    ),
    max_leaves=25,
)
FOLDERS = st.dictionaries(NAMES, TREES, max_size=6)


def make(folder: Path, tree: dict) -> None:
    """Make what a value of FOLDERS describes."""
    folder.mkdir()
    files: list[Path] = []
    for name, node in tree.items():
        _make(folder / name, node, files)


def _make(path: Path, node: tuple, files: list[Path]) -> None:
    match node:
        case ("file", mode, time, content):
            files.append(path)
            path.write_bytes(content)
            _finish(path, mode, time)
        case ("sparse", mode, time, size):
            files.append(path)
            path.touch()
            os.truncate(path, size)
            _finish(path, mode, time)
        case ("link", target):
            path.symlink_to(target)
        case ("second name", number):
            if files:
                path.hardlink_to(files[number % len(files)])
        case ("folder", mode, time, inside):
            path.mkdir()
            for name, part in inside.items():
                _make(path / name, part, files)
            _finish(path, mode | 0o700, time)


def _finish(path: Path, mode: int, time: int) -> None:
    path.chmod(mode)
    os.utime(path, (time, time))


def seen(folder: Path) -> dict[str, tuple]:
    """What a user sees of a folder: by path, the kind, permissions, content and time, and which
    files are one file with several names."""
    first: dict[int, str] = {}
    found = {}
    for path in sorted(folder.rglob("*"), key=os.fsencode):
        about, name = path.lstat(), str(path.relative_to(folder))
        if stat.S_ISLNK(about.st_mode):
            found[name] = ("link", str(path.readlink()))
        elif stat.S_ISDIR(about.st_mode):
            found[name] = (about.st_mode, int(about.st_mtime))
        else:
            same = first.setdefault(about.st_ino, name)
            found[name] = (about.st_mode, int(about.st_mtime), path.read_bytes(), same)
    return found
