"""How long a command takes that only tells something: `hpc-train --help`, beside python itself.

    python -m benchmarks.startup

The limit is an interpreter that imports nothing; the peer is one that imports torch, which is what
programs of this kind commonly do before they print their help.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import harness

CANDIDATES = {
    "hpc-train --help": ([sys.executable, "-m", "hpc_train", "--help"], "VERB"),
    "hpc-train train --help": ([sys.executable, "-m", "hpc_train", "train", "--help"], "--run.dir"),
    "python": ([sys.executable, "-c", "print('nothing')"], "nothing"),
    "import torch": ([sys.executable, "-c", "import torch; print('torch')"], "torch"),
}


def timed(command: list[str], expected: str) -> Callable[[], float]:
    """Measures the seconds that a command takes; fails if it does not print what it should."""

    def measure() -> float:
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - begin
        if expected not in done.stdout:
            raise RuntimeError(f"{command} printed {done.stdout!r}")
        return seconds

    return measure


def main() -> None:
    """Run all commands in turn."""
    options = harness.arguments(
        "seconds until a command that only tells something is done", rounds=15
    )
    found = harness.in_turn({name: timed(*how) for name, how in CANDIDATES.items()}, options.rounds)
    harness.show("start-up", "seconds", found, "python")
    ratios = {name: harness.paired_ratio(found, name, "python") for name in CANDIDATES}
    harness.finish("startup", ratios, harness.medians(found), options.json)


if __name__ == "__main__":
    main()
