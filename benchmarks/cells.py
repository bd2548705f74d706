"""Many independent measurements, done in processes, that can be stopped and continued.

A cell is a tuple of names and numbers that says all about one measurement. Its result is one line
of a file. A cell that has a line there is not measured again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

Cell = tuple[str | int, ...]
Found = dict[Cell, dict[str, Any]]
# Each process computes with one thread, so that `--jobs` processes do not take each other's cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
REPORT_SECONDS = 60.0  # seconds between two lines about the progress


def end_with_parent() -> None:
    """End this process when the one that has started it ends, however that happens."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def read_cells(path: Path | None) -> Found:
    """The results that a file has. A last line that was cut off by a kill is left out."""
    found: Found = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            tree = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[tuple(tree.pop("cell"))] = tree
    return found


def run_cells(
    work: Callable[[Cell], dict[str, Any]],
    cells: Sequence[Cell],
    path: Path | None,
    jobs: int = 1,
) -> tuple[Found, int]:
    """Measure the cells that a file does not have, and add their results to it.

    Args:
        work: measures a cell. It is a function of a module, and runs in a process with one thread.
        cells: what to measure.
        path: the file of results, one JSON object per line; None: nothing is kept.
        jobs: number of processes.

    Returns:
        The results of `cells`, and the number of those that were measured now.

    Raises:
        RuntimeError: a cell failed. The results of the others that have ended are in the file.
    """
    known = read_cells(path)
    if path is not None and path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as out:
            out.write("\n")  # ends the line that was cut off
    todo = [cell for cell in cells if cell not in known]
    os.environ.update(ONE_THREAD)
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        running: dict[Future[dict[str, Any]], Cell] = {
            pool.submit(work, cell): cell for cell in todo
        }
        reported, done = time.monotonic(), 0
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                if error := future.exception():
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise RuntimeError(f"{cell} failed: {error}") from error
                known[cell] = future.result()
                done += 1
                if path is not None:
                    with path.open("a") as out:
                        out.write(json.dumps({"cell": cell} | known[cell]) + "\n")
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                print(f"{done} of {len(todo)} measurements are done", file=sys.stderr)
    return {cell: known[cell] for cell in cells}, len(todo)
