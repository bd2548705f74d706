"""The checkpoint files of a run: their names, which of them exist, and a list of them.

Nothing here loads torch.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from hpc_train import files
from hpc_train.checkpoint.fileformat import FileMap
from hpc_train.checkpoint.reading import LASTING, read_header, retried
from hpc_train.errors import CheckpointError, CheckpointMismatch, CheckpointUnreadable, plural

T = TypeVar("T")
logger = logging.getLogger(__name__)

LATEST = "LATEST"  # the file that names the checkpoint that was completed last
SAVE_SECONDS_FILE = ".save-seconds"  # tells the next start how long the longest save took
_NAME = re.compile(r"step-\d{9,}\.safetensors")


def step_of(path: Path) -> int:
    """The step that a checkpoint's file name states."""
    return int(path.stem.removeprefix("step-"))


def name_of(step: int) -> str:
    """A checkpoint's file name; names sort by step."""
    return f"step-{step:09d}.safetensors"


def find_checkpoints(directory: Path, source: str) -> list[Path]:
    """The checkpoint files of a folder, or the one that a source gives.

    Args:
        directory: the folder, which need not exist.
        source: "auto" for the folder's files, newest first. Otherwise a file or a run directory,
            for the one file that `newest` finds.

    Raises:
        CheckpointMismatch: the source does not exist, or is a run directory without checkpoints.
    """
    if source != "auto":
        return [newest(Path(source))]
    there = [path for path in _named_in(directory) if _type_of(path) == stat.S_IFREG]
    return sorted(there, key=step_of, reverse=True)


def _named_in(directory: Path) -> set[Path]:
    """What has a checkpoint's name in a folder, whether it is a file or not."""
    named = {path for path in _entries(directory) if _NAME.fullmatch(path.name)}
    # A network file system may give a list that it has kept from an earlier time.
    latest = latest_in(directory)
    return named if latest is None else named | {latest}


def _entries(directory: Path) -> list[Path]:
    """What is in a folder; nothing if there is no such folder."""
    try:
        return _looked(directory, lambda: [*directory.iterdir()])
    except (FileNotFoundError, NotADirectoryError):
        return []


def _type_of(path: Path) -> int:
    """The type of what a path leads to, as from `stat.S_IFMT`; 0 if it leads nowhere."""
    # From Python 3.14 on, Path.is_file takes any error of the file system for a missing file.
    try:
        return stat.S_IFMT(_looked(path, path.stat).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0
        raise


def _looked(path: Path, look: Callable[[], T]) -> T:
    """What a look at a path finds.

    Raises:
        OSError: an error that does not pass: nothing is there, or the rights are missing.
        CheckpointUnreadable: the file system failed again and again.
    """
    try:
        return retried(path, look)
    except OSError as error:
        if error.errno in LASTING:
            raise
        raise CheckpointUnreadable(
            f"{path} cannot be read ({error.strerror or error})",
            "look after the file system, and start again",
        ) from error


def unfinished_in(directory: Path) -> list[Path]:
    """The files of a folder that dead jobs have not finished."""
    begins = (".step-", f".{LATEST}.")
    return [p for p in _entries(directory) if p.name.startswith(begins) and p.suffix == ".partial"]


def checkpoints_in(run: Path) -> list[Path]:
    """The checkpoint files of a run directory, or of a `Loop`'s directory, newest first."""
    return find_checkpoints(run / "checkpoints", "auto") or find_checkpoints(run, "auto")


def newest(path: Path) -> Path:
    """The checkpoint file of a path: the path itself, or a run directory's last completed one.

    The file LATEST names that one. Files of later steps may be damaged ones that a run passed over.

    Raises:
        CheckpointMismatch: the path does not exist, or is a text, or a run directory without
            checkpoints.
    """
    kind = _type_of(path)
    if kind == stat.S_IFREG:
        _check_no_text(path)
        return path
    if kind != stat.S_IFDIR:
        raise CheckpointMismatch(f"no such checkpoint: {path}", "give a file or a run directory")
    found = checkpoints_in(path)
    if not found:
        raise CheckpointMismatch(f"{path} has no checkpoints", "give a run directory or a file")
    folder = found[0].parent
    _tell_gone(folder, found)
    named = latest_in(folder)
    if named is not None and named in found[1:]:
        logger.warning(
            "%s has later files than %s, which %s names: give %s to have that one",
            *(folder, named.name, LATEST, found[0]),
        )
        return named
    return found[0]


def latest_in(folder: Path) -> Path | None:
    """The checkpoint that the file LATEST of a folder names; None if there is no such file.

    Raises:
        CheckpointUnreadable: the file system failed again and again.
    """
    path = folder / LATEST
    with suppress(OSError, ValueError):
        name = _looked(path, lambda: path.read_text(encoding="utf-8")).strip()
        return folder / name if _NAME.fullmatch(name) else None
    return None


def _tell_gone(folder: Path, found: list[Path]) -> None:
    """Warn if the latest checkpoint of a folder is gone. One that is older is not missed.

    Args:
        folder: the folder, which need not exist.
        found: the checkpoints that are there, newest first.

    Raises:
        CheckpointMismatch: all are gone.
    """
    # A link may lead nowhere.
    gone = [path for path in _named_in(folder) if _type_of(path) != stat.S_IFREG]
    if not gone:
        return
    last = max(gone, key=step_of)
    if not found:
        traces = " and ".join(str(p) for p in (folder / LATEST, last) if os.path.lexists(p))
        raise CheckpointMismatch(
            f"the checkpoints of {folder} are gone, up to {last.name}",
            f"restore them, or remove {traces} to start again",
        )
    lost = step_of(last) - step_of(found[0])
    if lost > 0:
        told = "%s is gone, and with it %s: the newest checkpoint there is %s"
        logger.warning(told, last, plural(lost, "step"), found[0].name)


def _check_no_text(path: Path) -> None:
    """Check that a file does not begin like a text. A checkpoint begins with a small number."""
    first = b""
    with suppress(OSError), path.open("rb") as file:  # who reads it tells what is wrong
        first = file.read(8)
    if first and first.isascii() and b"\0" not in first:
        raise CheckpointMismatch(
            f"{path} is a text, and no checkpoint", "give a checkpoint, or a run directory"
        )


def start_candidates(directory: Path, source: str) -> list[Path]:
    """The files that a run may resume from, in the order to try.

    Args:
        directory: the folder of the run's checkpoints, which need not exist.
        source: "auto" for the folder's checkpoints; "none" to start anew; or a file or a run
            directory to start from, until the folder has checkpoints of its own. So the same source
            resumes the run after a stop, also if the source is the run itself, or is gone by then.

    Raises:
        CheckpointMismatch: the folder has checkpoints, and the source is "none" or one of them that
            is not the newest. Or the folder had checkpoints, and all are gone. Or it has none, and
            the source does not exist, or has no checkpoints.
    """
    own = find_checkpoints(directory, "auto")
    _tell_gone(directory, own)
    if source == "auto":
        return own
    if not own:
        return [] if source == "none" else find_checkpoints(directory, source)
    given = Path(source).resolve()
    older = given.parent == directory.resolve() and given != own[0].resolve()
    if source == "none" or (older and _type_of(given) == stat.S_IFREG):
        raise CheckpointMismatch(
            f"{directory} has checkpoints beyond this start, up to {own[0].name}",
            f"give another directory, or move them and {LATEST} away",
        )
    return own


def earlier_save_seconds(directory: Path) -> float:
    """Seconds that the longest save of an earlier process took; 0 if they are not known."""
    with suppress(OSError, ValueError):
        seconds = float((directory / SAVE_SECONDS_FILE).read_text(encoding="utf-8"))
        return seconds if 0 < seconds < math.inf else 0.0
    return 0.0


def note_save_seconds(directory: Path, seconds: float) -> None:
    """Write down for the next start how long the longest save took."""
    with suppress(OSError):  # the next start can do without
        (directory / SAVE_SECONDS_FILE).write_text(f"{seconds:.3f}\n", encoding="utf-8")


@dataclass(frozen=True)
class Listed:
    """One checkpoint in a list.

    Args:
        path: the file.
        nbytes: the file's size.
        written: when the file was changed last, in local time.
        damage: how its header is damaged, or "".
        finite: whether all its trained parameters are finite.
        loss: the validation loss of its step, where known. `checkpoint.keep_best` ranks by it.
    """

    path: Path
    nbytes: int
    written: datetime
    damage: str
    finite: bool = True
    loss: float | None = None


def listed(run: Path) -> list[Listed]:
    """The checkpoints of a run directory or of a folder, newest first. No tensor is read.

    Raises:
        CheckpointMismatch: there are none.
    """
    found = checkpoints_in(run)
    if not found:
        raise CheckpointMismatch(f"{run} has no checkpoints", "give a run directory")
    # Training removes old ones meanwhile.
    return [one for path in found if (one := _listed(path)) is not None]


def _listed(path: Path) -> Listed | None:
    damage = ""
    saved: dict[str, Any] = {}
    try:
        layout, _ = read_header(path)
        saved = _unverified_state(path, layout)
    except (CheckpointError, CheckpointMismatch) as error:
        damage = error.cause.removeprefix(f"checkpoint {path}: ")
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    written = datetime.fromtimestamp(status.st_mtime)
    finite, score = saved.get("finite", True) is True, saved.get("score")
    loss = score if isinstance(score, float) else None
    return Listed(path, status.st_size, written, damage, finite, loss)


def _unverified_state(path: Path, layout: FileMap) -> dict[str, Any]:
    """The values that are not tensors, as they are in the file; none if they cannot be read."""
    entry = layout.entries[-2]  # the state
    with suppress(OSError, ValueError), files.opened(path) as descriptor:
        size, begin = entry.end - entry.begin, layout.data_start + entry.begin
        tree = json.loads(files.read_at(descriptor, size, begin))
        return tree if isinstance(tree, dict) else {}
    return {}
