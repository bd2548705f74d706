"""Input files of a preparation, the parts that they are cut into, and how their bytes are read."""

from __future__ import annotations

import gzip
import io
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from hpc_train.data.tokenizer import BYTES
from hpc_train.errors import DataError, SetupError, StorageError, plural

logger = logging.getLogger(__name__)

NAMES_LOGGED = 5  # of files that are skipped
COMPRESSED = (".gz", ".zst")
RAW_BYTES = 1 << 16  # compressed bytes that are read at once
BUFFER_BYTES = 1 << 20
LARGEST_WINDOW = 1 << 31  # bytes that a zstd frame may look back; `zstd --long=31` makes such files

Tell = Callable[[int], None]


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the preparation began.

    Args:
        path: as the user has given it, or below a folder that the user has given.
        format: text, jsonl, raw, megatron, arrow or hdf5.
        size: the size of the file in bytes.
        mtime_ns: the time of its last change in nanoseconds.
        nbytes: length of its stream, in which parts are cut. It is the size, or for a compressed
            file an estimate of its text, or for a Megatron file the bytes of its documents.
        stored: NumPy's name for the type of the tokens in a token file.
        offset: offset of its first token, in bytes.
    """

    path: str
    format: str
    size: int
    mtime_ns: int
    nbytes: int
    stored: str = ""
    offset: int = 0

    @property
    def compressed(self) -> bool:
        """Whether it has to be read from its beginning."""
        return Path(self.path).suffix.lower() in COMPRESSED and self.format in ("text", "jsonl")

    def check(self, about: os.stat_result) -> None:
        """Make sure that nobody has written to the file.

        Raises:
            DataError: the size or the time of the last change is another one.
        """
        if (about.st_size, about.st_mtime_ns) != (self.size, self.mtime_ns):
            raise DataError(
                f"{self.path} has changed since the preparation began",
                "prepare files that nobody writes to; the same command then starts afresh",
            )


@dataclass(frozen=True)
class InputPart:
    """A part of a file: `begin` up to, but not including, `end`, in bytes of its stream.

    Args:
        file: the file.
        begin: where the part begins.
        end: where the part ends.
        first: whether a document begins with it.
        last: whether its last document ends with it.
    """

    file: InputFile
    begin: int
    end: int
    first: bool = True
    last: bool = True

    @property
    def nbytes(self) -> int:
        """The length of the part in bytes of the stream."""
        return self.end - self.begin


@dataclass(frozen=True)
class TokenRecipe:
    """How tokens are made.

    Args:
        tokenizer: a description that `tokenizer.loads` takes; "" if token files come without one.
        vocab: vocabulary size.
        key: the key of a JSON line's text, or the name of an Arrow file's column, or of an HDF5
            file's dataset, that has the tokens.
        in_place: NumPy's name for the type of the tokens if shards refer to the files that have
            them; "" if shards get the tokens.
    """

    tokenizer: str = BYTES
    vocab: int = 256
    key: str = "text"
    in_place: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens in shards."""
        if self.in_place:
            return np.dtype(f"u{np.dtype(self.in_place).itemsize}")
        return np.dtype(np.min_scalar_type(self.vocab - 1))


class _Damaged(Exception):
    """A compressed file is damaged."""


@contextmanager
def reading_from(path: str) -> Iterator[None]:
    """Turn errors of reading a file into one that names it.

    Raises:
        DataError: its compressed content is damaged.
        StorageError: the file cannot be read.
    """
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError, _Damaged) as error:
        raise DataError(f"{path} is damaged ({error})", "copy it again, or leave it out") from None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror or error})",
            "make it readable, or leave it out",
        ) from None


@contextmanager
def opened_input(file: InputFile) -> Iterator[BinaryIO]:
    """Open a file whose bytes may be read in any order.

    Raises:
        DataError: it cannot be read, or it changes while it is open.
    """
    with reading_from(file.path), Path(file.path).open("rb", BUFFER_BYTES) as opened:
        file.check(os.fstat(opened.fileno()))
        yield opened
        file.check(os.fstat(opened.fileno()))


@contextmanager
def opened_text(file: InputFile) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open a text file, compressed or not.

    Yields:
        Its text, and a function that says how many bytes of the text are read.

    Raises:
        DataError: it cannot be read, it changes while it is open, or it is damaged.
        SetupError: the `zstandard` library is needed and missing.
    """
    with opened_input(file) as raw:
        if not file.compressed:
            yield cast("io.BufferedReader", raw), raw.tell
            return
        stream = decompressed(raw, file.path)
        yield stream, stream.tell


def decompressed(raw: Any, path: str, buffer: int = BUFFER_BYTES) -> io.BufferedReader:
    """The content of a compressed file, by the ending of its name.

    Args:
        raw: the file. Only its `read` is called.
        path: its path.
        buffer: how many bytes are decompressed at once.

    Raises:
        SetupError: the `zstandard` library is needed and missing.
    """
    zipped = path.lower().endswith(".gz")
    stream: Any = gzip.GzipFile(fileobj=raw) if zipped else _Zstandard(raw)
    return io.BufferedReader(stream, buffer)


class _Zstandard(io.RawIOBase):
    """Reads zstd frames. The library's own reader takes a file that ends early for a whole one."""

    def __init__(self, raw: Any) -> None:
        try:
            import zstandard
        except ImportError:
            raise SetupError(
                "the zstandard library is missing", "`pip install 'hpc_train[zstd]'`"
            ) from None
        self._raw, self._error = raw, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._frame: Any = None
        self._read, self._made = b"", memoryview(b"")
        self._told = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._told

    def readinto(self, memory: Any) -> int:
        while not self._made:
            self._read = self._read or self._raw.read(RAW_BYTES)
            if not self._read:
                if self._frame is not None:
                    raise _Damaged("it ends early")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._made = memoryview(self._frame.decompress(self._read))
            except self._error as error:
                raise _Damaged(error) from None
            self._read = b""
            if self._frame.eof:
                self._read, self._frame = self._frame.unused_data, None
        count = min(len(memory), len(self._made))
        memory[:count] = self._made[:count]
        self._made = self._made[count:]
        self._told += count
        return count


def files_at(given: Path, wanted: str) -> Iterator[Path]:
    """A file itself, or all files in a folder and its subfolders, links to others included.

    In folders, what has a name with a dot at its beginning is left out. A folder is read once,
    however many links lead to it, and if possible by its own path.

    Args:
        given: the path of a file or of a folder.
        wanted: what files are wanted of, for a message.

    Raises:
        DataError: there is neither a file nor a folder.
        StorageError: a folder cannot be read.
    """
    if given.is_file():
        yield given
    elif given.is_dir():
        yield from _files_in(given)
    else:
        cause = "is neither a file nor a folder" if given.exists() else "does not exist"
        raise DataError(f"{given} {cause}", f"give files or folders of {wanted}")


def _files_in(given: Path) -> Iterator[Path]:
    seen: set[str] = set()
    others: list[str] = []
    tops = [given]
    for top in tops:  # it grows by links to folders
        for place, folders, names in os.walk(top, onerror=_refuse):
            real = os.path.realpath(place)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            tops += [path for name in folders if (path := Path(place, name)).is_symlink()]
            for path in (Path(place, name) for name in names if not name.startswith(".")):
                with reading_from(str(path)):
                    regular = path.is_file()
                if regular:
                    yield path
                else:
                    others.append(str(path))
    if others:
        logger.info(
            "skipped %s that cannot be read as files, such as dangling links and pipes: %s",
            plural(len(others), "name"),
            ", ".join(others[:NAMES_LOGGED]),
        )


def _refuse(error: OSError) -> None:
    with reading_from(str(error.filename)):
        raise error


def each_once(paths: Iterable[Path], *, tell: bool = True) -> list[Path]:
    """The paths of different files, in their order. A file keeps a path that is no link, if any.

    Args:
        paths: paths of files.
        tell: whether to log how many paths were left out.
    """
    every = [*dict.fromkeys(paths)]
    links = {path for path in every if path.is_symlink()}
    real_folder = cache(os.path.realpath)  # it asks for each folder above
    kept: dict[str, Path] = {}
    for path in sorted(every, key=links.__contains__):
        real = (
            os.path.realpath(path) if path in links else f"{real_folder(path.parent)}/{path.name}"
        )
        kept.setdefault(real, path)
    chosen = {*kept.values()}
    left_out = [path for path in every if path not in chosen]
    if left_out and tell:
        count = plural(len(left_out), "path to a file", "paths to files")
        shown = ", ".join(map(str, left_out[:NAMES_LOGGED]))
        logger.info("left out %s that other paths lead to, too: %s", count, shown)
    return [path for path in every if path in chosen]
