"""Kills ranks, slurmds and hosts under a job on emulated hosts, and tells how long it then takes.

    python -m tests.cluster.recovery --kills 20 --seed 0

The job is a small GPT on 4 of 5 hosts with 2 ranks each, submitted to a real SLURM. At random
moments a random rank, a slurmd or a whole host of the job is killed, its link first. What counts is
the time until the next step that is new. Slurmds come back after each kill, hosts 30 seconds after
their end. If it was the one that the job's script ran on, SLURM starts the job again on the four
others before. (SLURM 22.05 repeats a minute later the signals that it could not send to a lost
host. They would end the job there if it had started again on that host.) In the end the losses have
to be those of a run that nobody disturbed, up to the order of additions, which fewer replicas
change.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from hpc_train.warm.key import LOAD
from tests.cluster.hosts import hosts
from tests.cluster.slurm import Slurm, slurm
from tests.conftest import small_program, small_text
from tests.programs import ENVIRON, Program, hpc_train
from tests.waiting import wait_until

SECONDS = 180.0  # in which a job has to be training again
AWAY = 30.0  # seconds that a host is away
VICTIMS = ("a rank", "a slurmd", "a host", "the script's host")


def ranks(up: Slurm) -> list[int]:
    """The processes of the job's ranks."""
    found = []
    for pid in up.cluster.processes():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            words = process.cmdline()
            if "python" in process.name() and "train" in words and "launch" not in words:
                found.append(pid)
    return found


def last_step(program: Program) -> int:
    """The step of the last whole record; 0: there is none."""
    with suppress(OSError, ValueError, IndexError):
        return json.loads((program.root / "run/metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def kill(up: Slurm, job: int, kind: int, random: Random) -> tuple[str, Callable[[], object]]:
    """Kill a rank, a slurmd or a host; returns which of VICTIMS it was, and what brings it back."""
    if kind == 0:
        wait_until(lambda: ranks(up), SECONDS)  # the last kill may only now have been noticed
        os.kill(random.choice(ranks(up)), signal.SIGKILL)
        return VICTIMS[0], lambda: None
    known = up.job(job)
    host = random.choice(
        up.run(["scontrol", "show", "hostnames", known["NodeList"]]).stdout.split()
    )
    if kind == 1:
        up.kill_slurmd(host)
        return VICTIMS[1], lambda: up.start_slurmd(host)
    up.power_off(host)
    back = threading.Timer(AWAY, up.boot, [host])
    back.start()
    return VICTIMS[2 + (host == known["BatchHost"])], back.join


def state(up: Slurm, job: int, program: Program) -> str:
    """What there is to tell of a job that does not go on."""
    outputs = [path.read_text()[-4000:] for path in (program.root / "run").glob("*.out")]
    journal = (program.root / "run/launch.jsonl").read_text().splitlines()[-6:]
    asked = (["scontrol", "show", "job", str(job)], ["sinfo", "-N", "--long"])
    told = [up.run(words).stdout for words in asked]
    logs = [path.read_text()[-4000:] for path in sorted(up.folder.glob("*.log"))]
    return "\n".join(["it does not go on", *told, *journal, *logs, *outputs])


def importing(count: int) -> float:
    """Seconds in which so many processes at once import torch."""
    begin = time.monotonic()
    words = [sys.executable, "-c", "import torch"]
    started = [subprocess.Popen(words, env=ENVIRON) for _ in range(count)]
    for process in started:
        process.wait()
    return time.monotonic() - begin


def soak(
    up: Slurm, job: int, program: Program, kills: int, random: Random
) -> dict[str, list[float]]:
    """Kill so often; returns the seconds until the next new step, by victim."""
    seconds: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    for number in range(kills):
        try:
            wait_until(lambda: len(ranks(up)) >= 4, SECONDS)
        except TimeoutError:
            raise SystemExit(state(up, job, program)) from None
        before = last_step(program)
        wait_until(lambda step=before: last_step(program) > step + 3, SECONDS)
        time.sleep(3 * random.random())
        begin = time.monotonic()
        victim, bring_back = kill(up, job, number % 3, random)
        reached = last_step(program)
        try:
            wait_until(lambda step=reached: last_step(program) > step + 1, SECONDS)
        except TimeoutError:
            raise SystemExit(state(up, job, program)) from None
        seconds[victim].append(time.monotonic() - begin)
        print(f"{number + 1}: {victim} at step {reached}, {seconds[victim][-1]:.1f} s", flush=True)
        bring_back()
    return seconds


def main() -> None:
    """Run the job, kill, compare, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    random = Random(options.seed)
    with (
        tempfile.TemporaryDirectory() as name,
        hosts(5, 2) as cluster,
        slurm(cluster) as up,
    ):
        folder = Path(name)
        program = small_program(folder, small_text(folder / "text"))
        run = ["--run.steps", str(options.steps), "--gradients.engine", "mpi"]
        run += ["--checkpoint.every", "10", "--checkpoint.keep", "3"]
        run += ["--optimizer.schedule", "constant"]  # a rate that does not know of the last step
        run += ["--optimizer.lr", "1e-4"]  # with 1e-2 a difference of 1e-16 is 1e-2 100 steps later
        size = ["--scheduler", "slurm", "--nodes", "4", "--ranks_per_node", "2"]
        size += ["--max_restarts", str(options.kills), "--time", "04:00:00"]
        words = hpc_train("submit", str(program.config), *size, *run)
        silence = {"HPC_TRAIN_SILENCE": "6"}  # after which a job without its script is queued again
        silence |= {LOAD: "program"}  # the package too, as for a user
        words += ["--run.dir", str(folder / "run")]
        done = up.run(words, cwd=folder, environ=silence)
        if done.returncode:
            raise SystemExit(done.stderr)
        job = int(done.stdout)
        seconds = soak(up, job, program, options.kills, random)
        up.run(hpc_train("cancel", str(folder / "run")))
        up.wait(job, SECONDS)
        run[1] = str(last_step(program))
        whole = cluster.run(program.command("whole", *run), 8, timeout=1800)
        if whole.returncode:
            raise SystemExit(whole.stderr)
        pairs = list(zip(program.losses("run"), program.losses("whole"), strict=True))
    everything = [second for values in seconds.values() for second in values]
    for victim, values in {**seconds, "all": everything}.items():
        if not values:
            continue
        median, worst = statistics.median(values), max(values)
        print(f"{victim}: {len(values)}, median {median:.1f} s, worst {worst:.1f} s")
    apart = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    print(f"{len(pairs)} steps, losses apart by {apart:.1e} at the most from an undisturbed run's")
    if apart > 1e-6:
        raise SystemExit("the losses are others")
    print(f"importing torch in 8 processes at once: {importing(8):.1f} s")


if __name__ == "__main__":
    main()
