"""What restarts, probes of hosts and --no-kill cost a job that nothing happens to.

    python -m benchmarks.supervision [--rounds 3] [--steps 150]

A small GPT trains on 4 emulated hosts with 2 ranks each, in jobs that `hpc-train submit` gives to a
real SLURM. In turn srun starts the ranks, without --no-kill, and `hpc-train launch` does, with
--no-kill and probes of the hosts: with three restarts, as it is by default, or with none. Two
figures count: the seconds from the start of the job's script to its end, and the median step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness

NAME = "supervision"
HOSTS, RANKS = 4, 2
SECONDS = 120.0  # in which a job has to end
WAYS = {
    "srun": ("--launcher", "srun"),
    "launch": ("--launcher", "launch"),
    "launch, no restarts": ("--launcher", "launch", "--max_restarts", "0"),
}


class Jobs:
    """Runs the jobs.

    Args:
        up: the SLURM.
        folder: for their run directories.
        steps: number of steps of each.
    """

    def __init__(self, up: Any, folder: Path, steps: int) -> None:
        from tests.conftest import small_program, small_text

        self.up, self.folder, self.steps = up, folder, steps
        self.config = small_program(folder, small_text(folder / "text")).config
        self.step_seconds: harness.Samples = {name: [] for name in WAYS}
        self._count = 0

    def seconds(self, name: str) -> float:
        """Run a job; returns the seconds from its script's first line to its last."""
        from tests.cluster.slurm import wait_until
        from tests.programs import hpc_train

        self._count += 1
        run = self.folder / f"run-{self._count}"
        words = ["--scheduler", "slurm", "--nodes", str(HOSTS), "--ranks_per_node", str(RANKS)]
        words += [*WAYS[name], "--run.dir", str(run), "--run.steps", str(self.steps)]
        words += ["--gradients.engine", "mpi"]
        done = self.up.run(hpc_train("submit", str(self.config), *words), cwd=self.folder)
        if done.returncode:
            raise RuntimeError(done.stderr)
        wait_until(lambda: any(path.stat().st_size for path in run.glob("*.out")), SECONDS)
        begin = time.perf_counter()
        journal = run / "jobs.jsonl"
        wait_until(lambda: '"ended"' in journal.read_text(), SECONDS)
        taken = time.perf_counter() - begin
        record = json.loads(journal.read_text().splitlines()[-1])
        if record["code"] != 0:
            raise RuntimeError(f"{name}: {record}")
        self.up.wait(int(done.stdout), SECONDS)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step_seconds"] for line in lines[len(lines) // 3 :]]
        self.step_seconds[name].append(statistics.median(steps))
        return taken


def main() -> None:
    """Run the jobs in turn, and print both tables."""
    options = harness.arguments("the cost of supervision", rounds=3, steps=150)
    from tests.cluster import slurm
    from tests.cluster.hosts import hosts

    if slurm.why_not():
        print(slurm.why_not(), file=sys.stderr)
        sys.exit(2)
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(HOSTS, RANKS) as cluster,
        slurm.slurm(cluster) as up,
    ):
        jobs = Jobs(up, Path(folder), options.steps)
        ways = {name: partial(jobs.seconds, name) for name in WAYS}
        whole = harness.in_turn(ways, options.rounds)
        steps = {name: values[1:] for name, values in jobs.step_seconds.items()}
    title = f"{HOSTS} hosts x {RANKS} ranks, {options.steps} steps"
    harness.show(f"{title}: the job", "s", whole, "srun")
    harness.show(f"{title}: a step", "s", steps, "srun")
    ratios, middles = {}, {}
    for what, samples in (("job", whole), ("step", steps)):
        for name, value in harness.medians(samples).items():
            middles[f"{what}: {name}"] = value
            ratios[f"{what}: {name} / srun"] = harness.paired_ratio(samples, name, "srun")
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
