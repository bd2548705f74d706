"""Kills training jobs at random moments until they are through, and compares what they leave.

    python -m tests.system.checkpoint.soak --kills 200 --seed 0

Each job is four ranks that train a small GPT and save every few steps. A rank, all ranks or the
launcher is killed while the job starts, after some steps, or when a save has begun after some.
The same command is run again until the job is finished; its losses and its last checkpoint have to
be, bit for bit, those of a job that nobody disturbed. Layouts take turns from job to job.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from tests.conftest import small_program, small_text
from tests.programs import ENVIRON, Program, processes_of, ranks_of, wait_for_end

RANKS = 4
LAYOUTS = ((), ("--parallel.tp", "2"), ("--memory.zero", "1"))
OPTIONS = ("--checkpoint.every", "3", "--checkpoint.keep", "2", "--gradients.engine", "mpi")
SECONDS = 60.0  # after which what should be over hangs
SHARE = 0.1  # of its steps, which a job goes on for at most before it is killed
TARGETS = ("a rank", "all ranks", "the launcher")
MOMENTS = ("starting", "training", "saving")


class Undisturbed(NamedTuple):
    """What a job comes to, and how many seconds it takes to start."""

    losses: list[float]
    checkpoint: bytes
    starting: float


@dataclass
class Job:
    """A job that trains into the folder `run` of its program's root.

    Args:
        program: configuration and folder.
        steps: how many it trains.
        options: the command line's.
    """

    program: Program
    steps: int
    options: tuple[str, ...]

    @property
    def run(self) -> Path:
        """Its run directory."""
        return self.program.root / "run"

    def start(self) -> subprocess.Popen:
        """Start it, or start it again: the same command."""
        options = ("--run.steps", str(self.steps), *OPTIONS, *self.options)
        words = self.program.command("run", *options, launcher="mpirun", ranks=RANKS)
        with (self.program.root / "output").open("ab") as output:
            return subprocess.Popen(words, env=ENVIRON, stdout=output, stderr=output)

    def end(self, process: subprocess.Popen, seconds: float = SECONDS) -> int:
        """Wait for the exit code and until no process is left; if that fails, end them."""
        try:
            code = process.wait(seconds)
            wait_for_end(self.run, SECONDS)
        finally:
            for left in processes_of(self.run):
                with suppress(psutil.Error):
                    left.kill()
        return code

    def records(self) -> bytes:
        """The metrics so far; of a line that a kill cut off, what is there."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    def newest(self) -> int:
        """The step of the newest checkpoint, or 0."""
        return max(map(step_of, find_checkpoints(self.run / "checkpoints", "auto")), default=0)

    def unfinished(self) -> bool:
        """Whether a checkpoint has been begun and not completed."""
        return any((self.run / "checkpoints").glob(".step-*.partial"))

    def result(self) -> tuple[list[float], bytes]:
        """Its losses, and its last checkpoint."""
        last = self.program.checkpoint("run", self.steps)
        return self.program.losses("run"), last.read_bytes()

    def output(self) -> str:
        """The end of what it has written to its console."""
        return (self.program.root / "output").read_text(errors="replace")[-4000:]


def undisturbed(job: Job) -> Undisturbed:
    """Run a job in one piece."""
    begin = time.monotonic()
    process = job.start()
    wait(process, lambda: bool(job.records()))
    starting = time.monotonic() - begin
    code = job.end(process, 10 * SECONDS)
    assert code == 0, job.output()
    return Undisturbed(*job.result(), starting)


def wait(process: subprocess.Popen, until: Callable[[], bool], pause: float = 0.01) -> None:
    """Wait for something, as long as the process is there; never for long."""
    limit = time.monotonic() + SECONDS
    while not until() and process.poll() is None and time.monotonic() < limit:
        time.sleep(pause)


@dataclass
class Soak:
    """Counts what has happened.

    Args:
        kills: how many there are to be.
        random: what chooses them.
    """

    kills: int
    random: Random
    killed: Counter[str] = field(default_factory=Counter)
    saving: int = 0
    restarts: int = 0
    lost: int = 0
    jobs: int = 0
    equal: int = 0

    def disturb(self, job: Job, like: Undisturbed) -> None:
        """Run a job and kill it, again and again, until it is finished."""
        while not self.is_finished(job, like.starting):
            self.restarts += 1
        self.jobs += 1
        self.equal += job.result() == (like.losses, like.checkpoint)

    def is_finished(self, job: Job, starting: float) -> bool:
        """Run a job and kill it, if it is not finished before."""
        newest, records = job.newest(), job.records()
        process = job.start()
        who = self.kill(job, process, starting) if self.killed.total() < self.kills else ""
        if job.end(process, SECONDS if who else 10 * SECONDS) == 0:
            return True
        assert who, job.output()
        self.killed[who] += 1
        assert job.newest() >= newest, "a complete checkpoint is gone"
        if job.records() != records:
            self.saving += job.unfinished()
            self.lost += max(0, job.records().count(b"\n") - job.newest())
        return False

    def kill(self, job: Job, process: subprocess.Popen, starting: float) -> str:
        """Wait for a moment, and kill; whom, or nobody if the job is over by then."""
        newest, records = job.newest(), job.records()
        begin, seconds = time.monotonic(), self.random.uniform(0, starting)
        steps = self.random.uniform(0, SHARE * job.steps)

        def trained(more: float) -> bool:
            now = job.records()
            return now != records and now.count(b"\n") - newest > more

        moment, who = self.random.choice(MOMENTS), self.random.choice(TARGETS)
        if moment == "starting":
            wait(process, lambda: time.monotonic() > begin + seconds or trained(0))
        else:
            wait(process, lambda: trained(steps))
        ranks = ranks_of(process)
        if moment == "saving":
            wait(process, job.unfinished, pause=0)
        elif moment == "training":
            time.sleep(self.random.uniform(0, 0.1))
        if process.poll() is not None:
            return ""
        if who == "the launcher" or not ranks:
            process.kill()
            return "the launcher"
        for rank in ranks if who == "all ranks" else [self.random.choice(ranks)]:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        return who

    def __str__(self) -> str:
        whom = ", ".join(f"{self.killed[who]} of {who}" for who in TARGETS)
        return (
            f"{self.killed.total()} kills ({whom}; {self.saving} during a save), "
            f"{self.restarts} restarts, {self.jobs} jobs, {self.equal} equal to one without kills, "
            f"{self.lost} steps lost"
        )


def soak(folder: Path, kills: int, seed: int, steps: int, options: tuple[str, ...] = ()) -> Soak:
    """Run jobs, one after the other, until there have been so many kills."""
    data = small_text(folder / "data")
    done = Soak(kills, Random(seed))
    known: dict[tuple[str, ...], Undisturbed] = {}

    def made(name: str, layout: tuple[str, ...]) -> Job:
        (folder / name).mkdir()
        return Job(small_program(folder / name, data), steps, (*layout, *options))

    while done.killed.total() < kills:
        layout = LAYOUTS[(seed + done.jobs) % len(LAYOUTS)]
        if layout not in known:
            known[layout] = undisturbed(made(f"like-{len(known)}", layout))
        job = made(f"job-{done.jobs}", layout)
        done.disturb(job, known[layout])
        shutil.rmtree(job.run)
        print(" ".join(layout) or "dp 4", done, sep=": ", flush=True)
    return done


def main() -> None:
    """Soak and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--background", action="store_true", help="save in the background")
    options = parser.parse_args()
    more = ("--checkpoint.background", "true") if options.background else ()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        done = soak(Path(name), options.kills, options.seed, options.steps, more)
    print(f"{done}, {time.monotonic() - begin:.0f} s")
    raise SystemExit(0 if done.equal == done.jobs else 1)


if __name__ == "__main__":
    main()
