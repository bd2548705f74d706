"""The files of a run's checkpoints: their names, and which of them there are."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import CheckpointMismatch

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
