"""metrics.jsonl: one JSON object per logged step, written by rank 0."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from hpc_train import files


class MetricsFile:
    """Appends records to a file, each complete when `write` returns.

    Args:
        path: the file; its folder exists.
        after_step: where a resumed run goes on. Records of later steps, which a run wrote after
            its last checkpoint, are dropped: those steps are computed again.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        if path.exists():
            kept = [
                line
                for line in path.read_text(errors="replace").splitlines()
                if _is_up_to(line, after_step)
            ]
            files.write_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a")

    def write(self, record: Mapping[str, float | int]) -> None:
        """Append one record; numbers that JSON cannot hold (NaN, infinity) become null."""
        finite = {key: value if math.isfinite(value) else None for key, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_up_to(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # the end of a line that a killed run did not finish
