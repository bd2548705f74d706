"""Does all of hpc_train work on this machine's GPU, and how fast? A table says so in ten minutes.

    python -m benchmarks.gpu [--device auto|cpu] [--only NAME ...] [--minutes 9.5] [--jobs N]
                             [--json FILE]

One GPU is enough, also for the checks of several ranks, which then share it. Nothing is downloaded.
The site's own packages are used. `make test-gpu` is the same.

Every check runs the program as a user does, in processes of its own, so that one that fails does
not stop the others. Those of the results train a small GPT with dropout in float64, and compare
the loss of each step with that of one rank on a processor. Several of them run side by side, as a
small GPT does not fill a GPU. Those of the speed run one at a time, and train GPTs of 124
million and 1.3 billion parameters. Their peers are loops in plain PyTorch (gpu_loops.py).

Each line of the table says what was found, or why a check was skipped. The exit code is 1 if one
has failed. With --device cpu everything runs on processors with small models: that tests the checks
themselves, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from benchmarks import gpu_results, gpu_speed, harness
from benchmarks.gpu_lab import Check, Found, Lab, Skipped

CHECKS: Mapping[str, Check] = {**gpu_results.CHECKS, **gpu_speed.CHECKS}
MOST_JOBS = 8
THREADS = 2  # of each process, while checks run side by side
LEAST = 20.0  # seconds that must be left for another check to begin


@dataclass(frozen=True)
class Result:
    """What became of a check.

    Args:
        name: the check.
        state: whether it has passed.
        text: what was found, or why it failed or was skipped.
        seconds: the time that it took.
        figures: numbers by name.
    """

    name: str
    state: Literal["passed", "failed", "skipped"]
    text: str
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


def carry_out(name: str, lab: Lab) -> Result:
    """Carry out a check. Whatever happens in it becomes a result."""
    if lab.left() < LEAST:
        return Result(name, "skipped", "the time is over: give --minutes, or --only")
    begin = time.perf_counter()
    found: Found
    try:
        found = CHECKS[name](lab)
    except Skipped as why:
        return Result(name, "skipped", str(why), time.perf_counter() - begin)
    except Exception as error:  # noqa: BLE001  the other checks go on
        text = str(error) if isinstance(error, AssertionError) else repr(error)
        return Result(name, "failed", text or "it failed", time.perf_counter() - begin)
    return Result(name, "passed", found.text, time.perf_counter() - begin, found.figures)


def carried_out(names: Sequence[str], lab: Lab, jobs: int) -> Iterator[Result]:
    """Carry out checks: first those that can run side by side, then one after the other."""
    together = [name for name in names if name in gpu_results.TOGETHER]
    lab.threads = THREADS if jobs > 1 else 0
    with ThreadPoolExecutor(jobs) as pool:
        waited = [pool.submit(carry_out, name, lab) for name in together]
        yield from (one.result() for one in as_completed(waited))
    lab.threads = 0
    yield from (carry_out(name, lab) for name in names if name not in together)


def show(results: list[Result], device: str) -> None:
    """Print the table."""
    table = Table("check", "", "what was found", "seconds", title=f"hpc_train on {device}")
    for one in results:
        table.add_row(one.name, one.state, one.text, f"{one.seconds:.1f}")
    Console(width=140).print(table)


def main() -> None:
    """Carry out the checks, print the table and a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Does hpc_train work on this GPU, and how fast?",
        epilog="The checks: " + ", ".join(f'"{name}"' for name in CHECKS),
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu tries the checks"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=list(CHECKS),
        default=[],
        help="some checks only",
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="the most time that it takes")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2)),
        help="number of checks of results that run side by side",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as JSON, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpc_train-gpu-") as directory:
        lab = Lab(Path(directory), options.device, end=time.monotonic() + 60 * options.minutes)
        about = {"benchmark": "gpu", "device": lab.device, "software": lab.software}
        about |= {"machine": harness.machine()}
        results: list[Result] = []
        for result in carried_out(options.only or [*CHECKS], lab, max(1, options.jobs)):
            results.append(result)
            print(f"{result.name} {result.state}: {result.text}", flush=True)
            line = json.dumps(about | {"results": [asdict(one) for one in results]})
            if options.json:  # after each check, as the next one may end the machine
                Path(options.json).write_text(f"{line}\n", encoding="utf-8")
        show(results, lab.device)
    print(line)
    sys.exit(any(one.state == "failed" for one in results))


if __name__ == "__main__":
    main()
