"""Step times that `hpc-train plan` predicts, beside measured ones, on emulated hosts.

    python -m benchmarks.plan [--layouts 10] [--steps 10]

There are 4 hosts with 2 ranks each, and links of 800 Mbit/s. `hpc-train plan --measure` describes
them. It predicts all layouts of 8 ranks for a GPT of 4.8 M parameters and 32 x 128 tokens per step.
`hpc-train train` trains two sets of ten layouts for a few steps. One set has the layout that is
predicted to be the fastest of each dp x tp x pp, as a user would choose among these. The other set
is taken from all schedules, micro-batches and options. Its predicted times are spread evenly, in
logarithms, from the fastest to the slowest. The measured time is the median step after the first
two. All layouts have to start with the same loss.

It needs root, iproute2 and Open MPI 4. Without them it says so and exits with 2. The hosts share
this machine's cores. The description takes that into account: all ranks compute while it is
measured.
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
from hpc_train.data.prepare.work import prepare_text
from hpc_train.planning import machine as machines
from hpc_train.planning.choose import Row, choose

HOSTS, SLOTS, MBIT = 4, 2, 800
ALL = 10**9
SKIPPED = 2  # number of first steps that do not count: they open connections and touch memory
SAME = 1e-4  # relative tolerance of the first step's loss; layouts add in different orders
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
        row: the layout and its prediction.
        steps: the measured times of its steps, in seconds.
        loss: the loss of the first step.
    """

    row: Row
    steps: list[float]
    loss: float

    @property
    def name(self) -> str:
        """The layout in words."""
        row = self.row
        words = [f"{row.dp} x {row.tp} x {row.pp}", row.schedule * (row.pp > 1)]
        words += ["sequence" * row.sequence_parallel, f"zero {row.zero}" if row.zero else ""]
        words += [f"recompute {row.recompute}" if row.recompute != "none" else ""]
        return " ".join(word for word in [*words, f"samples {row.micro_batch}"] if word)

    @property
    def measured(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        """The predicted step time divided by the measured one."""
        return self.row.step_seconds / self.measured


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Take `count` of the rows, which are sorted by time, evenly spread in its logarithm."""
    left, chosen = list(rows), []
    first, last = (math.log(rows[i].step_seconds) for i in (0, -1))
    for number in range(min(count, len(rows))):
        wanted = first + (last - first) * number / max(1, count - 1)
        nearest = min(left, key=lambda row: abs(math.log(row.step_seconds) - wanted))
        left.remove(nearest)
        chosen.append(nearest)
    return chosen


def on_ranks(cluster: Any, *words: str) -> None:
    """Run hpc-train on all ranks of the hosts."""
    command = [sys.executable, "-m", "hpc_train", *words]
    done = cluster.run(command, HOSTS * SLOTS, "slot", 900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")


def train(cluster: Any, config: Path, row: Row, steps: int) -> Trial:
    """Train some steps under a layout."""
    with tempfile.TemporaryDirectory() as run:
        options = [*row.options.split(), "--run.steps", str(steps), "--run.dir", run]
        on_ranks(cluster, "train", str(config), *options)
        lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return Trial(row, [record["step_seconds"] for record in records[SKIPPED:]], records[0]["loss"])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation of pairs of numbers, if no two numbers are equal."""
    count = len(pairs)
    ranks = [
        {value: rank for rank, value in enumerate(sorted(values))}
        for values in zip(*pairs, strict=True)
    ]
    square = sum((ranks[0][one] - ranks[1][other]) ** 2 for one, other in pairs)
    return 1 - 6 * square / (count * (count**2 - 1))


def report(title: str, trials: Sequence[Trial]) -> tuple[dict[str, float], dict[str, float]]:
    """Print a set of layouts and how well it was predicted. Returns ratios and medians."""
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
    """Write the training's configuration, and data whose content does not matter."""
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
