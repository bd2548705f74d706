"""The index of files of others: where their values lie, looked up once by a helper process.

Ranks never open HDF5, because the HDF5 library ends the process at some damaged files. A helper
opens them (`hdf5_index`) and answers with plain numbers. A process that uses MPI must not start
others, so its helper is forked by the server that `start_workers` has started. What the helper has
found can be kept in an index file beside the data. Then no helper is needed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.data import fork_server
from hpc_train.data.arrays.filters import Unreadable
from hpc_train.data.arrays.hdf5_index import answer_requests
from hpc_train.data.arrays.stored import Stored, parse_variable
from hpc_train.errors import DataError, UserError

INDEX_SUFFIX = ".index.json"
INDEX_FORMAT = "hpc_train.arrays/2"
INDEX_SECONDS = 120  # for one file; a table of a million chunks takes some seconds
ANSWER_BYTES = 1 << 28  # longest answer for one file
END_SECONDS = 5.0  # for a helper's exit code
HELPER = ("-m", answer_requests.__module__)
CHECK_FILE = "copy the file again; `h5dump -H FILE` says whether the HDF5 tools can read it"

Answer = tuple[os.stat_result, dict[str, Any]]  # the file as it was, and its variables


@dataclass(frozen=True, eq=False)
class FileIndex:
    """A file of others, as it was when it was indexed.

    Args:
        path: the file.
        file_bytes, mtime_ns: its size and the time of its last change.
        variables: where the values of each variable lie.
    """

    path: Path
    file_bytes: int
    mtime_ns: int
    variables: dict[str, Stored]


def look_up(paths: Sequence[Path], names: Sequence[str]) -> list[FileIndex]:
    """Find out where variables lie in files, from index files or by a helper process.

    Args:
        paths: the files.
        names: the variables, the same in each file.

    Raises:
        DataError: a file or a variable cannot be read, or the helper has died at a file.
        UserError: MPI runs, a file has no index file, and no helper can be started.
    """
    kept = {path: _kept(path) for path in paths}
    asked = [path for path, trees in kept.items() if trees is None]
    answers = dict(zip(asked, list(ask_helper(asked, names)), strict=True)) if asked else {}
    return [_checked(path, names, kept[path] or answers[path]) for path in paths]


def write_index(path: Path) -> tuple[list[str], dict[str, str]]:
    """Look up all variables of a file, and write the index file beside it.

    Returns:
        The names of the variables that can be read, and why each of the others cannot be.

    Raises:
        DataError: the file cannot be read, or the index cannot be written.
    """
    [(found, variables)] = ask_helper([path], None)
    refused = {}
    for name, tree in variables.items():
        try:
            _parsed(path, name, tree, found.st_size)
        except DataError as error:
            refused[name] = _reason(path, name, error)
    tree = {
        "format": INDEX_FORMAT,
        "file_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "variables": variables,
    }
    try:
        files.write_text(index_path(path), json.dumps(tree))
    except OSError as error:
        raise DataError(
            f"{index_path(path)} cannot be written ({error.strerror})",
            "index a copy in a folder of your own, or call hpc_train.start_workers() in the script",
        ) from None
    return [name for name in variables if name not in refused], refused


def look_up_all(path: Path) -> tuple[FileIndex, dict[str, str]]:
    """Find out where all variables lie in a file, those of texts and of rows with fields, too.

    Returns:
        The variables that can be read, and why each of the others cannot be.

    Raises:
        DataError: the file cannot be read, or the helper has died at it.
        UserError: MPI runs, the file has no index file, and no helper can be started.
    """
    kept = _kept(path)
    [(found, trees)] = [kept] if kept else ask_helper([path], None)
    variables, refused = {}, {}
    for name, tree in trees.items():
        try:
            variables[name] = _parsed(path, name, tree, found.st_size, numbers=False)
        except DataError as error:
            refused[name] = _reason(path, name, error)
    return FileIndex(path, found.st_size, found.st_mtime_ns, variables), refused


def _reason(path: Path, name: str, error: DataError) -> str:
    return error.cause.removeprefix(f"{path}: variable {name}").lstrip(": ")


def index_path(path: Path) -> Path:
    """The index file of a data file: beside it, with `.index.json` behind its name."""
    return path.with_name(path.name + INDEX_SUFFIX)


def _kept(path: Path) -> Answer | None:
    """What the index file says of a file; None if there is none for the file as it is now."""
    found, beside = _stat(path), index_path(path)
    try:
        if beside.stat().st_size > ANSWER_BYTES:
            raise ValueError(f"it has more than {ANSWER_BYTES} bytes")
        tree = json.loads(beside.read_text(encoding="utf-8"))
        if tree.get("format") != INDEX_FORMAT or not isinstance(tree["variables"], dict):
            raise ValueError(f"its format is not {INDEX_FORMAT}")
        same = (tree["file_bytes"], tree["mtime_ns"]) == (found.st_size, found.st_mtime_ns)
    except OSError:
        return None
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the index {beside} cannot be used ({error})", f"remove it, {_index_again(path)}"
        ) from None
    return (found, tree["variables"]) if same else None


def _index_again(path: Path) -> str:
    return f"and run `hpc-train data index {path}`"


def _stat(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "give files that exist") from None
    if not path.is_file():  # HDF5 would wait for ever at a pipe that nobody writes to
        raise DataError(f"{path} is not a file", "give HDF5 or NetCDF-4 files")
    return found


def _checked(path: Path, names: Sequence[str], answer: Answer) -> FileIndex:
    found, trees = answer
    variables = {}
    for name in names:
        if name not in trees:
            raise DataError(
                f"{path}: the file has no variable {name}",
                f"it has {', '.join(sorted(trees)[:20]) or 'none'}",
            )
        variables[name] = _parsed(path, name, trees[name], found.st_size)
    return FileIndex(path, found.st_size, found.st_mtime_ns, variables)


def _parsed(path: Path, name: str, tree: Any, file_bytes: int, *, numbers: bool = True) -> Stored:
    what = f"{path}: variable {name}"
    if isinstance(tree, dict) and "refused" in tree:
        remedy = str(tree.get("remedy", "docs/how-to/arrays.md has limits"))[:200]
        raise DataError(f"{what}: {str(tree['refused'])[:2000]}", remedy)
    try:
        stored = parse_variable(tree, file_bytes)
    except ValueError as error:
        remedy = error.remedy if isinstance(error, Unreadable) else CHECK_FILE
        raise DataError(f"{what} cannot be read: {error}", remedy) from None
    if numbers and stored.dtype.kind in "SV":
        raise DataError(
            f"{what}: its type is {str(stored.dtype)[:80]}. Only whole numbers and floats are read",
            "docs/how-to/arrays.md has limits",
        )
    return stored


def ask_helper(paths: Sequence[Path], names: Sequence[str] | None) -> Iterator[Answer]:
    """Let a helper process look into files, one after the other.

    Args:
        paths: the files.
        names: the variables to look up; None: all.

    Raises:
        DataError: a file cannot be opened, or the helper has died or has not answered in time.
        UserError: MPI runs, and no helper can be started.
    """
    with helper_process(paths[0]) as helper:
        for path in paths:
            yield helper.look_into(path, names)


class Helper:
    """A helper process: where it reads and answers, how it is killed, and how it has ended."""

    def __init__(
        self, asking: int, answering: int, kill: Callable[[], None], ended: Callable[[], int | None]
    ) -> None:
        self.asking, self.answering, self.kill, self.ended = asking, answering, kill, ended
        os.set_blocking(answering, False)

    def look_into(self, path: Path, names: Sequence[str] | None) -> Answer:
        """Ask about one file.

        Raises:
            DataError: it cannot be opened, or the helper has died or has not answered in time.
        """
        found = _stat(path)
        request = {"path": str(path), "names": None if names is None else list(names)}
        try:
            os.write(self.asking, json.dumps(request).encode() + b"\n")
            tree = json.loads(self._line(path))
        except BrokenPipeError:
            raise self._dead(path) from None
        except (ValueError, RecursionError):
            raise DataError(f"{path}: the HDF5 library has lost its memory", CHECK_FILE) from None
        if not isinstance(tree, dict) or not isinstance(tree.get("variables"), dict):
            why = tree.get("error") if isinstance(tree, dict) else "no answer"
            if "file signature not found" in str(why):
                raise DataError(f"{path} is no HDF5 file", "give HDF5 or NetCDF-4 files")
            raise DataError(f"{path} cannot be read as HDF5: {str(why)[:400]}", CHECK_FILE)
        return found, tree["variables"]

    def _line(self, path: Path) -> bytes:
        poll, parts, size = select.poll(), [], 0
        poll.register(self.answering, select.POLLIN)
        until = time.monotonic() + INDEX_SECONDS
        while (left := until - time.monotonic()) > 0:
            if not poll.poll(1000 * left):
                continue
            part = os.read(self.answering, 1 << 20)
            if not part:
                raise self._dead(path)
            parts.append(part)
            size += len(part)
            if size > ANSWER_BYTES:
                raise DataError(
                    f"{path}: its index has more than {ANSWER_BYTES} bytes",
                    "write the file with larger chunks, or divide it",
                )
            if part.endswith(b"\n"):
                return b"".join(parts)
        raise DataError(
            f"{path}: the HDF5 library has not answered within {INDEX_SECONDS} s", CHECK_FILE
        )

    def _dead(self, path: Path) -> DataError:
        code = self.ended()
        how = "without an exit code" if code is None else f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        return DataError(f"{path}: the process that opened it by the HDF5 library ended {how}",
                         f"the file is probably damaged; {CHECK_FILE}")  # fmt: skip


@contextmanager
def helper_process(path: Path) -> Iterator[Helper]:
    """Start a helper process, which is killed at the end of the block."""
    if not fork_server.mpi_runs():
        with _started() as helper:
            yield helper
        return
    if why := fork_server.why_no_processes():
        state = "has no index"
        if index_path(path).exists():
            state = "has another size or time of change than in its index"
        why = why.removeprefix("hpc_train.start_workers() was not called before MPI started, and ")
        raise UserError(
            f"{path} {state}, and a rank that uses MPI cannot index it",
            f"run `hpc-train data index {path}` once, or call hpc_train.start_workers() at the "
            f"beginning of the script ({why})",
        )
    with _forked() as helper:
        yield helper


@contextmanager
def _started() -> Iterator[Helper]:
    """A child of this process, which does not use MPI."""
    environ = fork_server.of_workers(os.environb)
    root = os.fsencode(Path(__file__).resolve().parents[3])
    environ[b"PYTHONPATH"] = b":".join(filter(None, [root, environ.get(b"PYTHONPATH")]))
    words = [sys.executable, *HELPER, str(INDEX_SECONDS)]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ended() -> int | None:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(END_SECONDS)
            return None

        try:
            yield Helper(child.stdin.fileno(), child.stdout.fileno(), child.kill, ended)
        finally:
            child.kill()


@contextmanager
def _forked() -> Iterator[Helper]:
    """A process that the fork server of `start_workers` has forked."""
    theirs, asking = multiprocessing.Pipe(duplex=False)
    answering, answers = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("forkserver").Process(
        target=serve_forked, args=(theirs, answers, INDEX_SECONDS), daemon=True
    )
    with asking, answering:
        with theirs, answers:
            child.start()

        def ended() -> int | None:
            child.join(END_SECONDS)
            return child.exitcode

        try:
            yield Helper(asking.fileno(), answering.fileno(), child.kill, ended)
        finally:
            child.kill()
            child.join(END_SECONDS)


def serve_forked(requests: Connection, answers: Connection, seconds: int) -> None:
    """Be a helper process that the fork server has forked."""
    with open(os.dup(requests.fileno()), "rb") as lines:  # noqa: PTH123  # it is a descriptor
        given: Iterable[Any] = (json.loads(line) for line in lines)
        answer_requests(given, answers.fileno(), seconds)
