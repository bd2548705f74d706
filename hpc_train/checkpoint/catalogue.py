"""The checkpoint files of a run: their names, which there are, and what a list of them shows.

Nothing here loads torch.
"""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpc_train import files
from hpc_train.checkpoint.fileformat import FileMap
from hpc_train.checkpoint.reading import read_header
from hpc_train.errors import CheckpointError, CheckpointMismatch

logger = logging.getLogger(__name__)

LATEST = "LATEST"
SAVE_SECONDS_FILE = ".save-seconds"  # what the longest save took, for the next start


def step_of(path: Path) -> int:
    """The step of a checkpoint's file name."""
    return int(path.stem.removeprefix("step-"))


def name_of(step: int) -> str:
    """A checkpoint's file name; names sort by step."""
    return f"step-{step:09d}.safetensors"


def find_checkpoints(directory: Path, source: str) -> list[Path]:
    """Checkpoint files to try: the given one (see `newest`), or those of the folder, newest first.

    Raises:
        CheckpointMismatch: the given file does not exist, or the run directory has none.
    """
    if source != "auto":
        return [newest(Path(source))]
    if not directory.is_dir():
        return []
    named = re.compile(r"step-\d{9,}\.safetensors")
    found = (path for path in directory.iterdir() if named.fullmatch(path.name) and path.is_file())
    return sorted(found, key=step_of, reverse=True)


def newest(path: Path) -> Path:
    """A checkpoint file itself, or of a run directory the one that was completed last.

    That is the one that LATEST names: later files may be damaged ones, which a run has passed over.

    Raises:
        CheckpointMismatch: there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointMismatch(f"no such checkpoint: {path}", "give a file or a run directory")
    folder = path / "checkpoints"
    found = find_checkpoints(folder, "auto")
    if not found:
        raise CheckpointMismatch(f"{path} has no checkpoints", "give a run directory or a file")
    with suppress(OSError, ValueError):
        named = folder / (folder / LATEST).read_text().strip()
        if named in found[1:]:
            logger.warning(
                "%s has later files than %s, which %s names: give %s to have that one",
                *(folder, named.name, LATEST, found[0]),
            )
            return named
    return found[0]


def start_candidates(directory: Path, source: str) -> list[Path]:
    """Where a run may start from, in the order to try.

    Args:
        directory: the folder of the run's checkpoints, which need not exist.
        source: "auto", the folder's checkpoints; "none"; or a file or run directory, from which the
            run starts while its folder is empty. The folder's own checkpoints come before it.

    Raises:
        CheckpointMismatch: the folder has checkpoints, and `source` is "none" or one of them that
            is not the newest; or the given file does not exist, or the run directory has none.
    """
    own = find_checkpoints(directory, "auto")
    if source == "auto":
        return own
    given = [] if source == "none" else find_checkpoints(directory, source)
    inside = any(path.resolve().parent == directory.resolve() for path in given)
    if own and (source == "none" or (inside and not own[0].samefile(given[0]))):
        raise CheckpointMismatch(
            f"{directory} has checkpoints beyond this start, up to {own[0].name}",
            "give another directory, or move them away",
        )
    return own or given


def earlier_save_seconds(directory: Path) -> float:
    """Seconds that the longest save of an earlier process took; 0 if they are not known."""
    with suppress(OSError, ValueError):
        seconds = float((directory / SAVE_SECONDS_FILE).read_text())
        return seconds if 0 < seconds < math.inf else 0.0
    return 0.0


def note_save_seconds(directory: Path, seconds: float) -> None:
    """Note for the next start what the longest save took."""
    with suppress(OSError):  # the next start would only know less
        (directory / SAVE_SECONDS_FILE).write_text(f"{seconds:.3f}\n")


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a run.

    Args:
        path: the file.
        nbytes: of the file.
        written: when.
        damage: what is wrong with its header, or "".
        finite: whether its trained parameters were all finite.
    """

    path: Path
    nbytes: int
    written: datetime
    damage: str
    finite: bool = True


def listed(run: Path) -> list[Listed]:
    """The checkpoints of a run directory, newest first; no tensor is read.

    Raises:
        CheckpointMismatch: it has none.
    """
    found = find_checkpoints(run / "checkpoints", "auto") or find_checkpoints(run, "auto")
    if not found:
        raise CheckpointMismatch(f"{run} has no checkpoints", "give a run directory")
    return [_listed(path) for path in found]


def _listed(path: Path) -> Listed:
    damage, finite = "", True
    try:
        layout, _ = read_header(path)
        finite = _is_finite(path, layout)
    except (CheckpointError, CheckpointMismatch) as error:
        damage = error.cause.removeprefix(f"checkpoint {path}: ")
    status = path.stat()
    written = datetime.fromtimestamp(status.st_mtime)
    return Listed(path, status.st_size, written, damage, finite)


def _is_finite(path: Path, layout: FileMap) -> bool:
    """What the checkpoint's state says, of which only a look is taken: nothing is verified."""
    entry = layout.entries[-2]
    with suppress(OSError, ValueError, AttributeError), files.opened(path) as descriptor:
        size, begin = entry.end - entry.begin, layout.data_start + entry.begin
        return json.loads(files.read_at(descriptor, size, begin)).get("finite", True) is True
    return True
