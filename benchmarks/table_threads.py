"""Steps of a table's model with one and with several threads, by the operations of a step.

    python -m benchmarks.table_threads [--threads 1 2] [--rounds 30] [--json FILE]

`hpc_train.tabular` gives a fit no more threads than its steps have work for. The figure for that is
`WORTH_A_THREAD` of hpc_train/tabular/fitting.py, which this benchmark checks. A step is one of an
estimator with its defaults: forward, backward and AdamW, with dropout. The numbers of threads take
turns. Seconds are those of a clock, and the least ones count as well as the median, because a
thread that has to wait for a core keeps the others waiting. So only an idle machine gives good
medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid

from benchmarks import harness
from hpc_train.config.file import load
from hpc_train.host.allocator import keep_freed_memory
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.planning.model import shape_of
from hpc_train.tabular.fitting import PASSES, WORTH_A_THREAD
from hpc_train.training.optimizers import build_optimizer

CLASSES = 2
CASES = [(10, 32), (30, 32), (10, 64), (10, 128), (64, 128), (10, 256), (64, 256), (64, 1024)]
"""Numeric columns, and rows of a step."""


def step_of(columns: int, rows: int) -> tuple[float, Callable[[], None]]:
    """The operations of a step, as a fit counts them, and a function that takes the step."""
    config = load(options=["--model.kind=tabular_mlp", "--run.steps=1"])
    edges = (tuple(np.linspace(-2.0, 2.0, 33).tolist()),) * columns
    shape = shape_of(config.model, TableSizes(edges=edges, codes=(), outputs=CLASSES))
    model = shape.build()
    optimizer = build_optimizer(model, config.optimizer)
    numeric, codes = torch.randn(rows, columns), torch.zeros(rows, 0, dtype=torch.int64)
    target = torch.randint(CLASSES, (rows,))

    def step() -> None:
        model.seed_samples(range(rows))
        outputs = model(numeric, codes)
        every = target.repeat_interleave(outputs.shape[1])
        torch.nn.functional.cross_entropy(outputs.flatten(0, 1), every).backward()
        optimizer.step()
        optimizer.zero_grad()

    return PASSES * sum(part.flops for part in shape.parts()) * rows, step


def timed(step: Callable[[], None], threads: int) -> float:
    """The seconds of a step with a number of threads."""
    torch.set_num_threads(threads)
    step()  # the threads wake up
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> None:
    """Measure all cases, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    options = parser.parse_args()
    keep_freed_memory()
    names = [f"{threads} threads, ms" for threads in options.threads]
    grid = Grid("columns", "rows of a step", "operations", *names, title="median (least)")
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for columns, rows in CASES:
        operations, step = step_of(columns, rows)
        turns = {
            name: partial(timed, step, threads)
            for name, threads in zip(names, options.threads, strict=True)
        }
        samples = harness.in_turn(turns, options.rounds)
        middle = {name: 1e3 * statistics.median(found) for name, found in samples.items()}
        least = {name: 1e3 * min(found) for name, found in samples.items()}
        cells = [f"{middle[name]:.3g} ({least[name]:.3g})" for name in names]
        grid.add_row(str(columns), str(rows), f"{operations:.2g}", *cells)
        case = f"{columns} columns, {rows} rows"
        figures |= {f"{case}, {name}": round(middle[name], 4) for name in names}
        ratios[f"{case}: {names[-1]} / {names[0]}"] = least[names[-1]] / least[names[0]]
    Console(width=120).print(grid)
    print(f"a fit takes one more thread for each {WORTH_A_THREAD:.2g} operations of a step")
    harness.finish("table_threads", ratios, figures, options.json)


if __name__ == "__main__":
    main()
