"""Preparing a table on 1, 2 and 4 ranks, and training on it, beside what reads alone.

    python -m benchmarks.table_scale [--rows 1e6] [--format parquet|csv] [--steps 2000]
        [--validation 0.1] [--rounds 1] [--ranks 1 2 4] [--folder DIR] [--json FILE]

The table is made (table_rows.py): 20 columns, in files of 5 million rows. The first part runs
`hpc-train prepare table` on each number of ranks. Its seconds are those of the whole command, from
its start to its end. The folders of all numbers of ranks must have the same bytes. Beside it the
candidate "pyarrow", which --parts pyarrow measures alone, reads the same files in one process and
does nothing with the rows. Its seconds begin when it has been loaded. It has one thread, or one for
each core. The page cache has the files if there is enough memory, for all candidates alike.

The second part trains tabular_mlp on one rank with one thread, in micro-batches of 512 rows. It
takes the rows per second from metrics.jsonl, without its first two records. The validation at the
end has 500 batches, as it is not measured. The loader's limit is what a process gets that reads the
batches of the same steps in the same way and has no model.

The part "score" trains a small model for 20 steps on each number of ranks, and then scores all
held-out rows, whose share is --validation. Its rows are these, and its seconds those of the whole
command.

The memory is the most that a rank had, with the pages of mapped files. With --folder the table is
kept and is not made again by the next call. With --rows 1e8 it has 3.6 GB as Parquet, and 15 GB as
CSV. What is prepared from it comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from benchmarks import harness
from benchmarks.table_rows import FORMATS, TARGET, write_rows
from hpc_train.data.tables.table_manifest import read_table_manifest
from hpc_train.warm.key import WARM

CORES = len(os.sched_getaffinity(0))
LOG_EVERY = 50
CONFIG = """
run: {{dir: {folder}, steps: {steps}, log_every: {log_every}}}
model: {{kind: tabular_mlp}}
data: {{path: {data}, batch: {batch}, micro_batch: {micro_batch}, validation_batches: 500}}
"""
SCORED = """
run: {{dir: {folder}, steps: 20, log_every: 20}}
model: {{kind: tabular_mlp, hidden: 16, members: 2, embedding_width: 4}}
data: {{path: {data}, batch: 4096}}
checkpoint: {{keep: 1}}
"""
Memory = dict[str, list[int]]  # most bytes of each rank, by candidate


def start(what: str, *words: str, ranks: int = 1) -> tuple[float, list[dict[str, Any]]]:
    """Run `table_rank`. Returns the seconds, and what each rank has written down.

    Raises:
        RuntimeError: it failed. The message has what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.table_rank", f"{folder}/rank", what, *words]
        if ranks > 1:
            command = [*harness.mpirun(ranks), *command]
        environ = harness.environ()
        environ[WARM] = "off"  # a forked rank would leave a process that waits to be measured
        begin = time.perf_counter()
        done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
        taken = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")
        return taken, [json.loads(path.read_text()) for path in Path(folder).glob("rank.*")]


def prepared(
    paths: list[Path], out: Path, ranks: int, share: float, digests: set[str], memory: list[int]
) -> float:
    """Prepare a table. Returns the seconds of the command, and leaves the folder `out`.

    Raises:
        RuntimeError: a column was left out, so that the seconds would be those of less work.
    """
    shutil.rmtree(out, ignore_errors=True)
    words = ["prepare", "table", *map(str, paths), "--target", TARGET]
    words += ["--task", "classification", "--validation", str(share), "--out", str(out)]
    taken, found = start("program", *words, ranks=ranks)
    memory += [rank["memory"] for rank in found]
    digests.add(harness.digest(out))
    kinds = json.loads((out / "manifest.json").read_text())["schema"]["columns"]
    if ignored := [name for name, kind in kinds.items() if kind == "ignored"]:
        raise RuntimeError(f"the columns {', '.join(ignored)} were left out")
    return taken


def alone(paths: list[Path], threads: int, rows: int, memory: list[int]) -> float:
    """Read a table with pyarrow. Returns the seconds."""
    _, (found,) = start("pyarrow", str(threads), *map(str, paths))
    if found["rows"] != rows:
        raise RuntimeError(f"pyarrow has read {found['rows']} rows of {rows}")
    memory.append(found["memory"])
    return float(found["seconds"])


def show(title: str, rows: int, samples: harness.Samples, memory: Memory) -> dict[str, float]:
    """Print rows per second and memory. Returns them by their names."""
    names = ("candidate", "s", "rows/s", "min", "max", "most MB of a rank")
    made, figures = Grid(*names, title=title), {}
    for name, seconds in samples.items():
        rates = [rows / one for one in seconds]
        most = max(memory[name]) / 1e6
        numbers = (statistics.median(rates), min(rates), max(rates))
        made.add_row(
            name,
            f"{statistics.median(seconds):.4g}",
            *(f"{number:.4g}" for number in numbers),
            f"{most:.0f}",
        )
        figures[f"{name}, rows/s"] = round(numbers[0], 1)
        figures[f"{name}, most MB"] = round(most, 1)
    Console(width=120).print(made)
    return figures


def preparing(paths: list[Path], folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure all ways to read the table, and print them. It leaves the prepared folder."""
    memory: Memory = {}
    digests: set[str] = set()
    candidates: dict[str, Callable[[], float]] = {}
    for threads in sorted({1, CORES}):
        name = f"pyarrow, {threads} threads"
        kept = memory.setdefault(name, [])
        candidates[name] = partial(alone, paths, threads, options.rows, kept)
    if "prepare" in options.parts:
        for ranks in options.ranks:
            name = f"prepare, {ranks} ranks"
            kept = memory.setdefault(name, [])
            out = folder / "prepared"
            candidates[name] = partial(
                prepared, paths, out, ranks, options.validation, digests, kept
            )
    samples = harness.in_turn(candidates, options.rounds, warmup=0)
    if len(digests) > 1:
        raise RuntimeError("the folders of different numbers of ranks have different bytes")
    title = f"{options.format}, {options.rows} rows"
    figures = show(title, options.rows, samples, memory)
    if digests:
        print(f"all prepared folders have the same bytes: {digests.pop()[:16]}")
    return figures


def training(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train on the prepared table, and read the same batches without a model."""
    memory: Memory = {"training": [], "loader's limit": []}
    data, batch = folder / "prepared", str(options.batch)
    config, run = folder / "run.yaml", folder / "run"
    values = {"folder": run, "data": data, "steps": options.steps}
    values |= {"batch": options.batch, "micro_batch": min(512, options.batch)}
    config.write_text(CONFIG.format(**values, log_every=LOG_EVERY))

    def train() -> float:
        shutil.rmtree(run, ignore_errors=True)
        memory["training"] += [rank["memory"] for rank in start("program", "train", str(config))[1]]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        records = [one for line in lines if "step_seconds" in (one := json.loads(line))]
        losses = [records[0]["loss"], records[-1]["loss"]]
        if not 0 < losses[1] < losses[0]:
            raise RuntimeError(f"the losses of the first and the last steps are {losses}")
        seconds = statistics.fmean(one["step_seconds"] for one in records[2:])
        return seconds * float(options.steps)

    def limit() -> float:
        _, (found,) = start("loader", str(data), batch, str(options.steps))
        memory["loader's limit"].append(found["memory"])
        return float(found["seconds"])

    turns = {"training": train, "loader's limit": limit}
    samples = harness.in_turn(turns, options.rounds, warmup=0)
    title = f"tabular_mlp, {options.steps} steps of {batch} rows, {options.format}"
    return show(title, options.steps * options.batch, samples, memory)


def scoring(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Score all held-out rows on each number of ranks."""
    data, config, run = folder / "prepared", folder / "score.yaml", folder / "scored"
    config.write_text(SCORED.format(folder=run, data=data))
    rows = read_table_manifest(data).rows("validation")
    memory: Memory = {}

    def score(ranks: int, kept: list[int]) -> float:
        shutil.rmtree(run, ignore_errors=True)
        taken, found = start("program", "train", str(config), ranks=ranks)
        kept += [rank["memory"] for rank in found]
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        if not 0.5 < last["validation_auc"] <= 1:
            raise RuntimeError(f"the AUC is {last['validation_auc']}")
        return taken

    turns: dict[str, Callable[[], float]] = {}
    for ranks in options.ranks:
        name = f"score, {ranks} ranks"
        turns[name] = partial(score, ranks, memory.setdefault(name, []))
    samples = harness.in_turn(turns, options.rounds, warmup=0)
    return show(f"all {rows} held-out rows, {options.format}", rows, samples, memory)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--format", choices=FORMATS, default="parquet")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=2000, help="of the training; at least 150")
    parser.add_argument("--batch", type=int, default=1024, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--validation", type=float, default=0.1, help="share of rows held out")
    parts = ("pyarrow", "prepare", "train", "score")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART")
    parser.add_argument("--folder", type=Path, help="where the table is made, and kept")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    options = parser.parse_args()
    if options.steps < 3 * LOG_EVERY:
        parser.error(f"give at least {3 * LOG_EVERY} steps")
    if "prepare" not in options.parts and {*options.parts} != {"pyarrow"}:
        parser.error("training and scoring need the part prepare")
    return options


def main() -> None:
    """Make the table, and measure all parts."""
    options = parsed()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as directory:
        folder = Path(directory)
        begin = time.perf_counter()
        table = (options.folder or folder) / f"{options.format}-{options.rows}"
        paths = write_rows(table, options.rows, options.format)
        nbytes = sum(path.stat().st_size for path in paths)
        taken = time.perf_counter() - begin
        print(f"{options.rows} rows are {nbytes / 1e6:.0f} MB; making them took {taken:.0f} s")
        figures = preparing(paths, folder, options)
        if "train" in options.parts:
            figures |= training(folder, options)
        if "score" in options.parts:
            figures |= scoring(folder, options)
    ratios = {}
    for name, other in (
        *((f"prepare, {ranks} ranks", "pyarrow, 1 threads") for ranks in options.ranks),
        ("training", "loader's limit"),
    ):
        mine, theirs = (figures.get(f"{one}, rows/s") for one in (name, other))
        if mine and theirs:
            ratios[f"{options.format}: {name} / {other}"] = mine / theirs
    middles = {f"{options.format}: {name}": value for name, value in figures.items()}
    harness.finish("table_scale", ratios, middles | {"bytes of the files": nbytes}, options.json)


if __name__ == "__main__":
    main()
