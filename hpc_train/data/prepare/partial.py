"""The folder of a preparation that is not finished: its plan, what is made, and who makes what.

It lies beside the folder that it becomes, and is called .NAME.partial. A preparation of several
stages has for each of them a folder below KEY, with what is listed here:

    lock                     held by the process, or rank 0, that prepares
    KEY/plan.json            the portions. KEY is a hash of all that the result depends on
    KEY/portions.jsonl       what is in each portion, one portion on a line
    KEY/shards/              what is made. That of the last stage becomes the data folder
    KEY/train-00000.json     a portion is finished: its files, written when they are durable
    KEY/attempt-*/           of one start: a file for each portion that a rank has taken, with the
                             number of bytes it has read, and a folder for what each rank writes

Ranks take portions by making files, which one rank alone can, so they need no messages. A rank that
was killed late writes into the folder of its own attempt, and cannot disturb the next one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hpc_train import files
from hpc_train.data.manifest import FILE_NAME
from hpc_train.errors import DataError, StorageError

logger = logging.getLogger(__name__)

LOCK, PLAN, PORTIONS, FAILED = "lock", "plan.json", "portions.jsonl", "failed"
R = TypeVar("R")
MOST_SHARD_MB = 1e9  # so that the number of bytes is an integer
TELL_SECONDS = 5.0  # seconds between two lines of progress


class ShardPortion(NamedTuple):
    """A portion of the work, from which one rank makes a file, or several.

    Args:
        name: the name of its first file without the ending, such as train-00003.
        nbytes: number of bytes that are read for it.
        offset: place of its line in the file of all portions, in bytes.
        length: length of the line in bytes.
    """

    name: str
    nbytes: int
    offset: int
    length: int


@dataclass(frozen=True)
class Preparation(Generic[R]):
    """What every rank has to know of a preparation.

    Args:
        target: the data folder to make.
        folder: what is made of it so far, `.NAME.partial/KEY` or the folder of a stage.
        attempt: the folder of this start.
        recipe: how it is made.
        shard_size: approximate number of tokens or rows in a shard.
        portions: all portions, in the order of the data.
        finished: the names of portions that were finished before this start.
    """

    target: Path
    folder: Path
    attempt: Path
    recipe: R
    shard_size: int
    portions: tuple[ShardPortion, ...]
    finished: frozenset[str]

    @property
    def shards(self) -> Path:
        """The folder that becomes the data folder."""
        return self.folder / "shards"

    def content(self, portion: ShardPortion) -> Any:
        """What is in a portion, as `store_plan` was given it."""
        with files.opened(self.folder / PORTIONS) as descriptor:
            return json.loads(files.read_at(descriptor, portion.length, portion.offset))

    def check_shared(self) -> None:
        """Make sure that this rank sees what rank 0 has written.

        Raises:
            DataError: it does not.
        """
        if not self.attempt.is_dir():
            raise DataError(
                f"{self.target.parent} is not the same folder on all nodes",
                "give an --out on a file system that all nodes share",
            )

    def entry(self, name: str) -> Path:
        """The file which says that a portion is finished."""
        return self.folder / f"{name}.json"


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Turn errors of writing into one that names the data folder.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror or error}",
            "free some space, or get permission to write there; the same command then continues",
        ) from error


def check_target(target: Path) -> None:
    """Make sure that a data folder is still to be made.

    Raises:
        DataError: there is something at its place, also a link: a new folder cannot replace it.
    """
    if target.is_symlink():
        raise DataError(
            f"{target} is a link", f"give {os.path.realpath(target)}, to which it leads"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} exists already", "give another --out, or delete it first")


def check_shard_mb(shard_mb: float) -> None:
    """Check the size of a shard.

    Raises:
        DataError: it is not allowed.
    """
    if not 0 < shard_mb <= MOST_SHARD_MB:
        raise DataError(
            f"--shard_mb is {shard_mb}", f"give a size above 0, and at most {MOST_SHARD_MB:g}"
        )


@contextmanager
def locked_partial(target: Path) -> Iterator[Path]:
    """Hold the partial folder of a data folder, and make it if it is not there.

    Yields:
        The partial folder.

    Raises:
        DataError: another process holds it.
        OSError: it cannot be written.
    """
    root = target.with_name(f".{target.name}.partial")
    descriptor = _lock(root, target)
    try:
        os.truncate(descriptor, 0)
        text = f"process {os.getpid()} on {socket.gethostname()}"
        files.write_at(descriptor, text.encode(), 0)
        yield root
    finally:
        os.close(descriptor)


@contextmanager
def held_partial(target: Path, key: str) -> Iterator[Path]:
    """Hold the partial folder of a data folder for a preparation. Only rank 0 calls.

    What preparations with other keys have left there is removed. The partial folder is removed if
    the block fails and no portion is finished, or if the input is wrong: once that is mended, the
    key is another one.

    Yields:
        The folder `.NAME.partial/KEY`, which may not exist.

    Raises:
        DataError: the data folder exists already, is being prepared, or cannot be written.
    """
    with writing_to(target), locked_partial(target) as root:
        folder = root / key
        try:
            check_target(target)
            _remove_others(root, key)
            yield folder
        except Exception as error:
            wrong = isinstance(error, DataError) and not isinstance(error, StorageError)
            if wrong or not any(folder.rglob("*-*.json")):  # no portion is finished
                shutil.rmtree(root, ignore_errors=True)
            raise


def _remove_others(root: Path, key: str) -> None:
    for other in root.iterdir():
        if other.name not in (key, LOCK):
            logger.info(
                "the options or the input have changed since an earlier start, whose %d finished "
                "portions are removed: it starts afresh",
                len([*other.rglob("*-*.json")]),
            )
            shutil.rmtree(other)


def publish(shards: Path, target: Path, manifest: str) -> None:
    """Write the manifest, then give the folder its final name, and remove the partial folder.

    Args:
        shards: the folder that becomes the data folder.
        target: its name.
        manifest: the text of the manifest.
    """
    written = shards.with_name(FILE_NAME)
    files.write_text(written, manifest)
    files.rename(written, shards / FILE_NAME)
    with suppress(FileNotFoundError):
        target.rmdir()  # an empty folder of that name is fine
    files.rename(shards, target)
    shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)


def _lock(root: Path, target: Path) -> int:
    while True:
        root.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # its last owner has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = files.read_at(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise DataError(
                f"{target} is being prepared by {owner or 'another process'}",
                "wait until it ends, or give another --out",
            ) from None
        except OSError as error:
            logger.warning("%s: no lock (%s); start only one preparation", root, error.strerror)
            return descriptor
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == (root / LOCK).stat().st_ino:
                return descriptor
        os.close(descriptor)


def store_plan(folder: Path, named: Mapping[str, tuple[int, Any]], shard_size: int) -> None:
    """Write the plan of a preparation into its folder, durably.

    Args:
        folder: `.NAME.partial/KEY` or the folder of a stage.
        named: of each portion, by its name and in the order of the data, the number of bytes that
            are read for it, and what is in it, as JSON values.
        shard_size: approximate number of tokens or rows in a shard.
    """
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    portions, offset, lines = [], 0, []
    for name, (nbytes, content) in named.items():
        line = json.dumps(content) + "\n"
        portions.append([name, nbytes, offset, len(line)])
        lines.append(line)
        offset += len(line)
    files.write_text(folder / PORTIONS, "".join(lines))
    tree = {"shard_size": shard_size, "portions": portions}
    files.write_text(folder / PLAN, json.dumps(tree))


def load_plan(
    target: Path, folder: Path, recipe: R, sound: Callable[[Preparation[R], Any], bool]
) -> Preparation[R]:
    """Begin an attempt to carry out the plan in a folder. The lock of the folder has to be held.

    Args:
        target: the data folder to make.
        folder: `.NAME.partial/KEY` or the folder of a stage, with a plan.
        recipe: how it is made.
        sound: whether what an entry describes is there. Other portions are made again.
    """
    tree = json.loads((folder / PLAN).read_text())
    for old in folder.glob("attempt-*"):
        shutil.rmtree(old)
    attempt = folder / f"attempt-{secrets.token_hex(8)}"
    attempt.mkdir()
    portions = tuple(ShardPortion(*row) for row in tree["portions"])
    made = Preparation(target, folder, attempt, recipe, tree["shard_size"], portions, frozenset())
    finished = set()
    for name in {portion.name for portion in portions} & _entries(folder):
        path = made.entry(name)
        if sound(made, json.loads(path.read_text())):
            finished.add(name)
        else:
            files.remove(path)
    if finished:
        logger.info("continues: %d of %d portions are finished", len(finished), len(portions))
    return replace(made, finished=frozenset(finished))


def _entries(folder: Path) -> set[str]:
    """The names of finished portions, among others."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".json"}


class AbandonedError(Exception):
    """Another rank has failed, and says why."""


class Dealing:
    """Deals the portions to the ranks. Each rank has one.

    Rank 0's logs the progress of all ranks.

    Args:
        preparation: the preparation.
        rank: this process's number, from 0 to size - 1.
        size: number of ranks.
    """

    def __init__(self, preparation: Preparation[Any], rank: int = 0, size: int = 1) -> None:
        self.preparation, self.rank, self.size = preparation, rank, size
        self.scratch = preparation.attempt / f"rank-{rank}"
        self._taken = set(preparation.finished)
        self._claim: int | None = None
        self._done = 0
        self._told = self._begin = time.monotonic()

    def take(self) -> ShardPortion | None:
        """Take a portion that no rank has taken; None if there is no more.

        Raises:
            AbandonedError: another rank has failed.
        """
        self.close()
        attempt = self.preparation.attempt
        while True:
            names = {path.name for path in attempt.iterdir()}
            if FAILED in names:
                raise AbandonedError
            self._taken.update(names)
            free = [one for one in self.preparation.portions if one.name not in self._taken]
            if not free:
                return None
            portion = free[self.rank * len(free) // self.size]
            self._taken.add(portion.name)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with suppress(FileExistsError):
                self._claim = os.open(attempt / portion.name, flags, 0o666)
                self._done = 0
                return portion

    def tell(self, nbytes: int) -> None:
        """Count bytes that this rank has read. Every few seconds, tell of it.

        Raises:
            AbandonedError: another rank has failed.
        """
        self._done += nbytes
        if time.monotonic() - self._told < TELL_SECONDS:
            return
        if (self.preparation.attempt / FAILED).exists():
            raise AbandonedError
        if self._claim is not None:
            files.write_at(self._claim, b"%020d" % self._done, 0)
        self.look()

    def look(self) -> None:
        """Log the progress of all ranks on rank 0, if it is time."""
        now = time.monotonic()
        if now - self._told < TELL_SECONDS:
            return
        self._told = now
        if self.rank:
            return
        made = self.preparation
        ready = _entries(made.folder)
        taken = {path.name for path in made.attempt.iterdir()}
        total = sum(portion.nbytes for portion in made.portions)
        before = sum(one.nbytes for one in made.portions if one.name in made.finished)
        done = 0
        for portion in made.portions:
            if portion.name in ready:
                done += portion.nbytes
            elif portion.name in taken:
                read = (made.attempt / portion.name).read_bytes()
                done += min(portion.nbytes, int(read or 0))
        speed = (done - before) / (now - self._begin)
        logger.info(
            "%.0f %% of the input done, %.1f MiB/s, %.0f s left",
            100 * done / max(1, total),
            speed / 2**20,
            (total - done) / max(1.0, speed),
        )

    def fail(self) -> None:
        """Tell the other ranks that this one has failed."""
        with suppress(OSError):  # a rank that cannot tell lets them finish their portions
            (self.preparation.attempt / FAILED).touch()

    def close(self) -> None:
        """Close the file of the portion that was taken last."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None


def make_portions(dealing: Dealing, make: Callable[[ShardPortion], None]) -> None:
    """Make portions until there is none left. Every rank calls; they need not wait for each other.

    It returns early if another rank has failed.

    Raises:
        DataError: a file cannot be read, has changed or has an error, or the disk is full.
    """
    try:
        with writing_to(dealing.preparation.target):
            dealing.preparation.check_shared()
            while portion := dealing.take():
                dealing.scratch.mkdir(exist_ok=True)
                make(portion)
    except AbandonedError:
        return
    except BaseException:
        dealing.fail()
        raise
    finally:
        dealing.close()
