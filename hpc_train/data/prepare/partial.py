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

`dealing.py` says how ranks take portions. A rank that was killed late writes into the folder of its
own attempt, and cannot disturb the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hpc_train import files
from hpc_train.data.manifest import FILE_NAME
from hpc_train.errors import DataError, StorageError, remedy_for

logger = logging.getLogger(__name__)

LOCK, PLAN, PORTIONS = "lock", "plan.json", "portions.jsonl"
R = TypeVar("R")
MOST_SHARD_MB = 1e9  # so that the number of bytes is an integer


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
        remedy = remedy_for(error, "free some space")
        raise StorageError(
            f"cannot write {target}: {error.strerror or f'a write was cut short ({error})'}",
            f"{remedy}; with the same path the same command continues",
        ) from error


def check_target(target: Path) -> None:
    """Make sure that a data folder is still to be made.

    If it is complete, what a preparation that was killed at its very end has left is removed.

    Raises:
        DataError: there is something at its place, also a link: a new folder cannot replace it.
    """
    if target.name in ("", ".."):
        raise DataError(f"--out {target} is no name of a new folder", "give a name")
    if target.is_symlink():
        raise DataError(
            f"{target} is a link", f"give {os.path.realpath(target)}, to which it leads"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        complete = (target / FILE_NAME).is_file()
        if complete or target.is_file():
            _remove_left(target)
        raise DataError(
            f"{target} exists already{', and is complete' * complete}",
            "give another --out, or delete it first",
        )


def _remove_left(target: Path) -> None:
    """Remove the partial folder of what is there already, unless a process holds it."""
    if _partial_of(target).is_dir():
        with suppress(DataError, OSError), locked_partial(target) as root:
            logger.info("%s is left of an earlier start, and is removed", root)
            shutil.rmtree(root)


def _partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def check_outside(out: str | Path, paths: Sequence[str | Path], use: str) -> None:
    """Make sure that a data folder is still to be made, and in none of the folders in `paths`.

    Raises:
        DataError: it exists, or is in one of them; `use` says what is done with their files.
    """
    check_target(Path(out))
    for path in paths:
        if Path(path).resolve() in Path(out).resolve().parents:
            raise DataError(
                f"--out {out} is in the folder {path}, whose files are {use}",
                "give an --out outside of it",
            )


def check_sizes(shard_mb: float, validation: float = 0) -> None:
    """Check the size of a shard, and the share that is held out.

    Raises:
        DataError: one of them is not allowed.
    """
    if not 0 <= validation < 1:
        raise DataError(f"--validation is {validation}", "give a share of at least 0 and below 1")
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
    root = _partial_of(target)
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
    shutil.rmtree(_partial_of(target), ignore_errors=True)


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
    tree = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    for old in folder.glob("attempt-*"):
        shutil.rmtree(old)
    attempt = folder / f"attempt-{secrets.token_hex(8)}"
    attempt.mkdir()
    portions = tuple(ShardPortion(*row) for row in tree["portions"])
    made = Preparation(target, folder, attempt, recipe, tree["shard_size"], portions, frozenset())
    finished = set()
    for name in {portion.name for portion in portions} & entry_names(folder):
        path = made.entry(name)
        if sound(made, json.loads(path.read_text(encoding="utf-8"))):
            finished.add(name)
        else:
            files.remove(path)
    if finished:
        logger.info("continues: %d of %d portions are finished", len(finished), len(portions))
    return replace(made, finished=frozenset(finished))


def key_of_tree(tree: Any) -> str:
    """The hash of JSON values that a result depends on."""
    return hashlib.blake2b(json.dumps(tree).encode(), digest_size=16).hexdigest()


def entry_names(folder: Path) -> set[str]:
    """The names of the portions that are finished, among names of other files."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".json"}
