"""Exact scores of many predictions on 1, 2 and 4 ranks, beside scikit-learn in one process.

    python -m benchmarks.table_scores [--rows 1e7] [--ranks 1 2 4] [--rounds 1] [--json FILE]

Predictions of two classes are made, with weights, and are added in batches of 4096 rows. The
seconds are those of the slowest rank, without making the predictions. The memory is the most that a
rank had, with all libraries. scikit-learn gets all predictions at once; it computes the AUC, the
log loss and the accuracy, and no calibration error. All must agree to 1e-9, and ours to the last
bit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

from benchmarks import harness
from benchmarks.table_scale import Memory, show, start

SAME = ("auc", "log_loss", "accuracy")


def scored(
    ranks: int, rows: int, way: str, memory: list[int], seen: list[dict[str, float]]
) -> float:
    """Score rows on some ranks. Returns the seconds."""
    _, found = start("scores", str(rows), way, ranks=ranks)
    memory += [one["memory"] for one in found]
    seen += [{name: one[name] for name in SAME} for one in found]
    return max(float(one["seconds"]) for one in found)


def main() -> None:
    """Score on each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    options = parser.parse_args()
    peer = "scikit-learn, 1 process"
    names = {peer: (1, "scikit-learn")}
    names |= {f"ours, {ranks} ranks": (ranks, "ours") for ranks in options.ranks}
    memory: Memory = {name: [] for name in names}
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    candidates: dict[str, Callable[[], float]] = {
        name: partial(
            scored, ranks, options.rows, way, memory[name], theirs if name == peer else ours
        )
        for name, (ranks, way) in names.items()
    }
    samples = harness.in_turn(candidates, options.rounds, warmup=0)
    if any(one != ours[0] for one in ours):
        raise RuntimeError(f"ranks have different scores: {ours}")
    for name in SAME:
        if not math.isclose(ours[0][name], theirs[0][name], rel_tol=1e-9):
            raise RuntimeError(f"{name} is {ours[0][name]}, and scikit-learn's {theirs[0][name]}")
    figures = show(f"scores of {options.rows} rows", options.rows, samples, memory)
    ratios = {
        f"{name} / {peer}": figures[f"{name}, rows/s"] / figures[f"{peer}, rows/s"]
        for name in names
        if name != peer
    }
    harness.finish("table_scores", ratios, figures, options.json)


if __name__ == "__main__":
    main()
