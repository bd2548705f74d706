"""What `hpc-train plan` predicts, beside what training takes, on emulated hosts.

    python -m benchmarks.plan [--layouts 10] [--steps 10]

4 hosts with 2 ranks each, links shaped to 800 Mbit/s. `hpc-train plan --measure` describes them,
and all layouts of 8 ranks are predicted for a GPT of 4.8 M parameters and 32 x 128 tokens per step.
Two sets of ten are trained by `hpc-train train` for so many steps: of each dp x tp x pp the one
that is predicted to be the fastest, which is what a user chooses from; and of all schedules,
micro-batches and options those whose predicted times are spread evenly, in logarithms, from the
fastest to the slowest. Measured is the median step after the first two. All have to start with the
same loss.

It needs root, iproute2 and Open MPI 4; without them it says so and exits with 2. The hosts share
this machine's cores, which the description tells: it is measured with all ranks at work.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from hpc_train.config.file import load
from hpc_train.data.prepare import prepare_text
from hpc_train.planning import machine as machines
from hpc_train.planning.choose import Row, choose

HOSTS, SLOTS, MBIT = 4, 2, 800
ALL = 10**9
SKIPPED = 2  # first steps, which make connections and touch memory
SAME = 1e-4  # of the first step's loss: layouts differ in the order of additions
CONFIG = """
run: {{log_every: 1, hang_timeout: 300}}
model: {{layers: 6, hidden: 256, heads: 8, sequence: 128, vocab: 256}}
data: {{path: {data}, batch: 32}}
checkpoint: {{every: 0}}
"""


@dataclass(frozen=True)
class Trial:
    """A layout that was trained.

    Args:
        row: what was predicted.
        steps: measured, in seconds.
        loss: of the first step.
    """

    row: Row
    steps: list[float]
    loss: float

    @property
    def name(self) -> str:
        """The layout in words."""
        row = self.row
        words = [f"{row.dp} x {row.tp} x {row.pp}", row.schedule * (row.pp > 1)]
        words += ["sequence" * row.sequence_parallel, "zero" * row.zero]
        return " ".join(word for word in [*words, f"samples {row.micro_batch}"] if word)

    @property
    def measured(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.row.step_seconds / self.measured


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """So many of the rows, which are sorted by time, in even steps of the logarithm of it."""
    left, chosen = list(rows), []
    first, last = (math.log(rows[i].step_seconds) for i in (0, -1))
    for number in range(min(count, len(rows))):
        wanted = first + (last - first) * number / max(1, count - 1)
        nearest = min(left, key=lambda row: abs(math.log(row.step_seconds) - wanted))
        left.remove(nearest)
        chosen.append(nearest)
    return chosen


def on_ranks(cluster: Any, *words: str) -> None:
    """Run hpc-train on all ranks."""
    command = [sys.executable, "-m", "hpc_train", *words]
    done = cluster.run(command, HOSTS * SLOTS, "slot", 900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")


def train(cluster: Any, config: Path, row: Row, steps: int) -> Trial:
    """Train under a layout."""
    with tempfile.TemporaryDirectory() as run:
        options = [*row.options().split(), "--run.steps", str(steps), "--run.dir", run]
        on_ranks(cluster, "train", str(config), *options)
        lines = Path(run, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return Trial(row, [record["step_seconds"] for record in records[SKIPPED:]], records[0]["loss"])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of numbers among which there are no equal ones."""
    count = len(pairs)
    ranks = [
        {value: rank for rank, value in enumerate(sorted(values))}
        for values in zip(*pairs, strict=True)
    ]
    square = sum((ranks[0][one] - ranks[1][other]) ** 2 for one, other in pairs)
    return 1 - 6 * square / (count * (count**2 - 1))


def report(title: str, trials: Sequence[Trial]) -> tuple[dict[str, float], dict[str, float]]:
    """Show a set of layouts, and how well it was predicted; returns ratios and medians."""
    table = Table("dp x tp x pp", "predicted s", "measured s", "min", "max", "predicted / measured")
    for trial in sorted(trials, key=lambda trial: trial.measured):
        times = trial.row.step_seconds, trial.measured, min(trial.steps), max(trial.steps)
        table.add_row(trial.name, *(f"{value:.3f}" for value in times), f"{trial.ratio:.2f}")
    print(f"{title}:")
    Console(width=100).print(table)
    correlation = rank_correlation([(one.row.step_seconds, one.measured) for one in trials])
    worst = max(trials, key=lambda trial: abs(trial.ratio - 1))
    print(f"rank correlation: {correlation:.3f}")
    print(f"worst error: {worst.ratio - 1:+.0%}, {worst.name}")
    ratios = {f"{title}: rank correlation": correlation}
    ratios[f"{title}: worst error"] = abs(worst.ratio - 1)
    ratios |= {f"{trial.name}: predicted / measured": trial.ratio for trial in trials}
    return ratios, {trial.name: trial.measured for trial in trials}


def describe(cluster: Any, config: Path, folder: Path) -> machines.Machine:
    """Measure the hosts."""
    path = folder / "machine.yaml"
    on_ranks(cluster, "plan", str(config), "--measure", "--machine", str(path))
    print(path.read_text())
    return machines.load_machine(path)


def write_config(folder: Path) -> Path:
    """The training's configuration, with data that do not matter."""
    library = Path(sysconfig.get_path("stdlib"))
    prepare_text([library / "json", library / "email"], folder / "data", validation=0.0)
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(data=folder / "data"))
    return config


def main() -> None:
    """Measure, predict, train, compare."""
    options = harness.arguments("predicted and measured step times", layouts=10, steps=10)
    with (
        tempfile.TemporaryDirectory() as name,
        harness.emulated_hosts(HOSTS, SLOTS, MBIT) as cluster,
    ):
        config = write_config(Path(name))
        job = load(config), describe(cluster, config, Path(name)), HOSTS, SLOTS
        every = choose(*job, top=ALL, every=True).layouts
        chosen = {
            "the fastest of each size": choose(*job, top=options.layouts).layouts,
            "spread over all": spread(every, options.layouts),
        }
        wanted = dict.fromkeys(row for rows in chosen.values() for row in rows)
        trials = {row: train(cluster, config, row, options.steps) for row in wanted}
    losses = [trial.loss for trial in trials.values()]
    if max(losses) - min(losses) > SAME * max(losses):
        raise RuntimeError(f"the layouts do not start with one loss: {losses}")
    ratios, middles = {}, {}
    for title, rows in chosen.items():
        more = report(title, [trials[row] for row in rows])
        ratios |= more[0]
        middles |= more[1]
    harness.finish("plan", ratios, middles, options.json)


if __name__ == "__main__":
    main()
