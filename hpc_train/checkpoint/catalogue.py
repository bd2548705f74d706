"""The checkpoint files of a run: their names, which of them exist, and a list of them.

Nothing here loads torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.checkpoint.fileformat import FileMap
from hpc_train.checkpoint.reading import read_header
from hpc_train.errors import CheckpointError, CheckpointMismatch, plural

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
    if not directory.is_dir():
        return []
    return sorted(filter(Path.is_file, _named_in(directory)), key=step_of, reverse=True)


def _named_in(directory: Path) -> list[Path]:
    """What has a checkpoint's name in a folder, whether it is a file or not."""
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


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
    if path.is_file():
        _check_no_text(path)
        return path
    if not path.is_dir():
        raise CheckpointMismatch(f"no such checkpoint: {path}", "give a file or a run directory")
    found = checkpoints_in(path)
    if not found:
        raise CheckpointMismatch(f"{path} has no checkpoints", "give a run directory or a file")
    folder = found[0].parent
    _tell_gone(folder, found)
    named = _latest(folder)
    if named is not None and named in found[1:]:
        logger.warning(
            "%s has later files than %s, which %s names: give %s to have that one",
            *(folder, named.name, LATEST, found[0]),
        )
        return named
    return found[0]


def _latest(folder: Path) -> Path | None:
    """What the file LATEST of a folder names; None if it cannot be read."""
    with suppress(OSError, ValueError):
        return folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    return None


def _tell_gone(folder: Path, found: list[Path]) -> None:
    """Warn if the latest checkpoint of a folder is gone. One that is older is not missed.

    Args:
        folder: the folder, which need not exist.
        found: the checkpoints that are there, newest first.

    Raises:
        CheckpointMismatch: all are gone.
    """
    named = _named_in(folder) if folder.is_dir() else []  # a link may lead nowhere
    if latest := _latest(folder):
        named.append(latest)
    gone = [path for path in named if _NAME.fullmatch(path.name) and not path.is_file()]
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
            resumes the run after a stop.

    Raises:
        CheckpointMismatch: the folder has checkpoints, and the source is "none" or one of them that
            is not the newest. Or the folder had checkpoints, and all are gone. Or the source does
            not exist, or has no checkpoints.
    """
    own = find_checkpoints(directory, "auto")
    _tell_gone(directory, own)
    if source == "auto":
        return own
    given = [] if source == "none" else find_checkpoints(directory, source)
    inside = any(path.resolve().parent == directory.resolve() for path in given)
    if own and (source == "none" or (inside and not own[0].samefile(given[0]))):
        raise CheckpointMismatch(
            f"{directory} has checkpoints beyond this start, up to {own[0].name}",
            f"give another directory, or move them and {LATEST} away",
        )
    return own or given


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
