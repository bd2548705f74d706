"""One process of benchmarks/table_scale.py. It writes down how much memory it had at most.

    python -m benchmarks.table_rank FILE program WORD...
    python -m benchmarks.table_rank FILE pyarrow THREADS PATH...
    python -m benchmarks.table_rank FILE loader FOLDER BATCH STEPS
    python -m benchmarks.table_rank FILE scores ROWS WAY

"program" is `hpc-train WORD...`; "pyarrow" reads tables and does nothing with them; "loader" reads
the batches that a training would get, and has no model; "scores" makes predictions and scores them,
see table_scores.py. FILE gets `.PID` and has JSON. It imports
nothing before it knows what to do, as that would count as memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

MADE = 1 << 16  # predictions that are made at once
BATCH = 1 << 12  # and scored at once


def most_memory() -> int:
    """Most bytes that this process had in memory, with the pages of files that it has mapped.

    It is not getrusage's figure, which a process inherits from the one that has started it.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the system does not tell how much memory a process has")


def read_alone(threads: int, paths: list[str]) -> dict[str, float]:
    """Read Parquet or CSV files from their start to their end with pyarrow."""
    import pyarrow as pa

    pa.set_cpu_count(threads)
    rows = 0
    begin = time.perf_counter()
    if paths[0].endswith(".csv"):
        from pyarrow import csv

        for path in paths:
            options = csv.ReadOptions(use_threads=threads > 1)
            with csv.open_csv(path, read_options=options) as reader:
                rows += sum(batch.num_rows for batch in reader)
    else:
        from pyarrow import parquet

        for path in paths:
            with parquet.ParquetFile(path) as file:
                batches = file.iter_batches(use_threads=threads > 1)
                rows += sum(batch.num_rows for batch in batches)
    return {"rows": rows, "seconds": time.perf_counter() - begin}


def read_batches(folder: str, batch: int, steps: int) -> dict[str, float]:
    """Read the batches of a training's steps in its order, as one rank would."""
    import torch

    from hpc_train.data.loader import Loader, cut
    from hpc_train.data.order import SampleOrder
    from hpc_train.data.tables.dataset import TableDataset
    from hpc_train.data.tables.table_manifest import read_table_manifest

    torch.set_num_threads(1)
    dataset = TableDataset(Path(folder), read_table_manifest(Path(folder)), "train")
    order = SampleOrder.of(dataset, batch)
    loader = Loader(dataset, order, cut(batch, 1, 0), first_step=1, last_step=steps)
    begin = time.perf_counter()
    rows = sum(len(micro.data[0]) for step in loader for micro in step.micro_batches)
    taken = time.perf_counter() - begin
    loader.close()
    dataset.close()
    return {"rows": rows, "seconds": taken}


def scored(rows: int, way: str) -> dict[str, float]:
    """Score made predictions of two classes; each rank has its share of them, in batches."""
    import numpy as np

    if way == "scikit-learn":
        from sklearn import metrics

    from hpc_train.data.tables.features import TargetValues
    from hpc_train.mpi.runtime import start_runtime
    from hpc_train.training.table_scores import TableScores

    group = start_runtime().world
    target = TargetValues(task="classification", names=("y",), classes=("a", "b"))
    collector = TableScores(target, (), group)
    kept, taken = [], 0.0
    for number in range(group.rank, -(-rows // MADE), group.size):
        draws = np.random.default_rng([20, number])
        count = min(MADE, rows - number * MADE)
        chance = draws.beta(0.5, 1.0, count)
        made = {
            "predictions": np.stack([1 - chance, chance], 1),
            "target": (draws.random(count) < chance).astype(np.int64),
            "weight": draws.gamma(2.0, 0.5, count),
        }
        begin = time.perf_counter()
        if way == "scikit-learn":
            kept.append(made)
        else:
            for first in range(0, count, BATCH):
                some = slice(first, first + BATCH)
                collector.add_rows({name: values[some] for name, values in made.items()})
        taken += time.perf_counter() - begin
    group.barrier()
    begin = time.perf_counter()
    if way == "scikit-learn":
        every = {name: np.concatenate([one[name] for one in kept]) for name in kept[0]}
        chance, how = every["predictions"], {"sample_weight": every["weight"]}
        found = {
            "auc": metrics.roc_auc_score(every["target"], chance[:, 1], **how),
            "log_loss": metrics.log_loss(every["target"], chance, **how),
            "accuracy": metrics.accuracy_score(every["target"], chance.argmax(1), **how),
        }
    else:
        found = collector.scores()
    taken += time.perf_counter() - begin
    collector.close()
    return {**found, "seconds": taken}


def main() -> int:
    """Do one thing, and write down the memory. Returns the exit code of the program."""
    out, what, *words = sys.argv[1:]
    code, found = 0, {}
    if what == "program":
        from hpc_train.cli import main as program

        code = program(words)
    elif what == "pyarrow":
        found = read_alone(int(words[0]), words[1:])
    elif what == "scores":
        found = scored(int(words[0]), words[1])
    else:
        found = read_batches(words[0], int(words[1]), int(words[2]))
    Path(f"{out}.{os.getpid()}").write_text(
        json.dumps(found | {"memory": most_memory()}), encoding="utf-8"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
