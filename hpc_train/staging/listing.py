"""What is to be copied: a table of the files, folders and links below some folders.

All nodes get the table before the first byte. It says how much room the copy takes and where each
byte of the stream belongs, and it is what a copy is checked against.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hpc_train.errors import UserError

READERS = 8  # threads: over a network most of the time of a call is waiting
SCRIPT_BYTES = 1 << 20  # no script is longer
FIRST_LINE_BYTES = (
    127  # of a script's first line, which Linux before 5.1 reads; pip keeps to it, too
)
# Python writes a new .pyc file under such a name first, and it may be gone the next moment.
UNFINISHED = re.compile(r"\.pyc\.\d+$")


class Item(NamedTuple):
    """A file, folder or link.

    Args:
        path: relative to the folder of the copy.
        mode: kind and permissions, as `st_mode`.
        mtime_ns: time of the last change, in nanoseconds.
        size: bytes of a file; 0 for others.
        link: what a symbolic link names; for a file with several names, its first one, as a path
            like `path`; else "".
    """

    path: str
    mode: int
    mtime_ns: int
    size: int
    link: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the stream that belong to it."""
        return 0 if self.link else self.size


@dataclass(frozen=True)
class Listing:
    """Everything that is to be copied, in an order in which it can be made.

    Args:
        folders: the folder to copy from, by the path that its copy gets.
        items: what is in them; a folder comes before its items.
        rewritten: the new content of the files whose content changes, by path.
        left_out: sockets, pipes and devices, which are not copied.
        leading_out: links to something that is not copied.
    """

    folders: Mapping[str, Path]
    items: Sequence[Item]
    rewritten: Mapping[str, bytes] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    leading_out: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(item.nbytes for item in self.items)

    def source(self, path: str) -> str:
        """The path to copy an item from."""
        name = next(name for name in self.folders if f"{path}/".startswith(f"{name}/"))
        return f"{self.folders[name]}{path[len(name) :]}"


def to_text(found: Listing) -> str:
    """The table as ASCII text: folders and items. File names that are no UTF-8 survive it."""
    folders = {name: str(path) for name, path in found.folders.items()}
    return json.dumps({"folders": folders, "items": found.items})


def from_text(text: str) -> Listing:
    """The table that `to_text` has written."""
    table = json.loads(text)
    folders = {name: Path(path) for name, path in table["folders"].items()}
    return Listing(folders, [Item(*values) for values in table["items"]])


def list_folders(folders: Mapping[str, Path], target: Path, moved: str = "") -> Listing:
    """List everything below some folders.

    Args:
        folders: as in `Listing`; none of the folders is inside another.
        target: the folder of the copy. Links from a folder into itself will point into the copy.
        moved: the path of an environment, whose programs will run in the copy: its name in their
            first lines is replaced.

    Raises:
        UserError: a folder cannot be read.
    """
    walk = _Walk()
    with ThreadPoolExecutor(READERS) as pool:
        for name, source in folders.items():
            walk.add(name, source, pool)
        rewritten = _rewritten(folders, walk.items, target, moved, pool) if moved else {}
    items = [
        item._replace(size=len(rewritten[first])) if first in rewritten else item
        for item in walk.items
        for first in [item.link or item.path]
    ]
    return Listing(folders, items, rewritten, walk.left_out, walk.leading_out)


class _Found(NamedTuple):
    path: str
    about: os.stat_result
    link: str


class _Walk:
    def __init__(self) -> None:
        self.items: list[Item] = []
        self.left_out: list[str] = []
        self.leading_out: list[str] = []
        self._names: dict[tuple[int, int], str] = {}  # of files that have several

    def add(self, name: str, source: Path, pool: Executor) -> None:
        """Add a folder and all that is below it."""
        try:
            level = [_Found(str(source), source.stat(), "")]
            while level:
                for found in level:
                    self._add_one(name, str(source), found)
                folders = [found.path for found in level if stat.S_ISDIR(found.about.st_mode)]
                level = list(chain.from_iterable(pool.map(_scan, folders)))
        except OSError as error:
            raise unreadable(error) from None

    def _add_one(self, name: str, source: str, found: _Found) -> None:
        about, link = found.about, found.link
        path = name + found.path[len(source) :]
        is_file = stat.S_ISREG(about.st_mode)
        if stat.S_ISLNK(about.st_mode):
            link = self._aimed(source, found)
        elif is_file and about.st_nlink > 1:
            first = self._names.setdefault((about.st_dev, about.st_ino), path)
            link = first if first != path else ""
        elif not is_file and not stat.S_ISDIR(about.st_mode):
            self.left_out.append(found.path)
            return
        size = about.st_size if is_file else 0
        self.items.append(Item(path, about.st_mode, about.st_mtime_ns, size, link))

    def _aimed(self, source: str, found: _Found) -> str:
        """What a link has to name in the copy, so that it leads to the same thing."""
        below = os.path.dirname(found.path[len(source) + 1 :])
        near = os.path.normpath(os.path.join(below, found.link))
        if not f"{near}/".startswith(("/", "../")):
            return found.link  # it never leaves the folder
        real = os.path.realpath(source)
        aim = os.path.normpath(os.path.join(real, below, found.link))
        for path in (aim, os.path.realpath(aim)):
            for own in (os.path.abspath(source), real):
                if f"{path}/".startswith(f"{own}/"):
                    return os.path.relpath(path, os.path.join(own, below))
        self.leading_out.append(found.path)
        return aim


def _scan(folder: str) -> Iterator[_Found]:
    with os.scandir(folder) as items:
        found = [
            _Found(
                item.path,
                item.stat(follow_symlinks=False),
                os.readlink(item.path) if item.is_symlink() else "",
            )
            for item in items
            if not UNFINISHED.search(item.name)
        ]
    return iter(sorted(found))


def _rewritten(
    folders: Mapping[str, Path],
    items: Sequence[Item],
    target: Path,
    moved: str,
    pool: Executor,
) -> dict[str, bytes]:
    """The scripts in the environment's `bin`, with the name of the copy in place of its own.

    Their first lines name the Python that runs them. Without this, they would run the original.
    """
    source, copy = folders[moved], os.fsencode(target / moved)
    names = {os.fsencode(source), os.fsencode(source.resolve())}
    own = re.compile(
        rb"(?<![\w./-])(?:%s)(?![\w.-])" % b"|".join(re.escape(name) for name in names)
    )
    inside = re.compile(re.escape(f"{moved}/bin/") + "[^/]+")

    def script(item: Item) -> tuple[str, bytes]:
        with Path(f"{source}{item.path[len(moved) :]}").open("rb") as file:
            begin = file.read(2)
            if begin != b"#!" and not item.path.startswith(f"{moved}/bin/activate"):
                return item.path, b""
            text = begin + file.read()
        made = own.sub(lambda _: copy, _startable(text, own, copy))
        return item.path, made if made != text else b""

    candidates = [
        item for item in items if inside.fullmatch(item.path) and 0 < item.nbytes < SCRIPT_BYTES
    ]
    try:
        return {path: text for path, text in pool.map(script, candidates) if text}
    except OSError as error:
        raise unreadable(error) from None


def _startable(text: bytes, own: re.Pattern[bytes], copy: bytes) -> bytes:
    """A script of Python, begun in pip's way if the kernel could not run it with the copy's name.

    The kernel splits the first line at blanks, and cuts off what is longer than a limit. So a shell
    starts Python then. To Python the shell's line is a text that nothing uses.
    """
    line = re.match(rb"#![ \t]*((%s)/\S*/?python[\d.]*)([^\n]*)\n" % own.pattern, text)
    shell = re.match(rb"#!/bin/sh\n'''exec' ((%s)/[^\s'\"]+)([^\n]*)\n" % own.pattern, text)
    for found, rest in ((line, b" \"$0\" \"$@\"\n' '''"), (shell, b"")):
        if found is None:
            continue
        program = own.sub(lambda _: copy, found[1])
        quoted = os.fsencode(shlex.quote(os.fsdecode(program)))
        too_long = found is line and len(found[0]) - len(found[1]) + len(program) > FIRST_LINE_BYTES
        if quoted != program or too_long:
            start = b"#!/bin/sh\n'''exec' " + quoted + found[3] + rest + b"\n"
            return start + text[found.end() :]
    return text


def unreadable(error: OSError) -> UserError:
    """The error of a file or folder that cannot be copied."""
    return UserError(
        f"{error.filename}: {error.strerror}",
        "make it readable, or remove it, and stage again",
    )
