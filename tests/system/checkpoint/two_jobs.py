"""Two jobs in one run directory, killed and put to sleep at random; what is left is compared.

    python -m tests.system.checkpoint.two_jobs --cases 50 --seed 0

In each case a job trains, and at a random moment the same command is started once more. Nothing
happens, or one of the two is killed, or the first is stopped (SIGSTOP) until the other has taken
the directory, and goes on. Then the command is run to its end. Whoever gives way has to say to
whom, no checkpoint may be damaged or lost, and losses and last checkpoint have to be, bit for bit,
those of a job that had its directory to itself.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import psutil

from hpc_train.checkpoint import inspection
from hpc_train.checkpoint.catalogue import find_checkpoints
from tests.conftest import small_program, small_text
from tests.programs import COLD, ENVIRON, only_line, processes_of, ranks_of
from tests.system.checkpoint.soak import Job, wait
from tests.waiting import wait_until

EVENTS = ("nothing", "first killed", "second killed", "first asleep")
USED = r"is in use by process \d+ on \S+, which was last heard of \d+ s ago: wait until it ends; "
TAKEN = r"was taken over by process \d+ on \S+, so this job writes no more to it"
SECONDS = 120.0  # after which a job hangs
SILENCE = 3.0  # seconds, after which a sleeping job is taken for gone


class Started:
    """One of the two jobs."""

    def __init__(self, job: Job, name: str, ranks: int, timeout: float) -> None:
        options = ["--run.steps", str(job.steps), "--checkpoint.every", "3", *job.options]
        options += ["--checkpoint.keep", "2", "--run.hang_timeout", str(timeout)]
        how = {"launcher": "mpirun", "ranks": ranks} if ranks > 1 else {}
        words = job.program.command("run", *options, **how)
        # The server that forks ranks may have been started by the one that is put to sleep.
        environ = ENVIRON | (COLD if timeout == SILENCE else {})
        self.output = job.program.root / name
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(words, env=environ, stdout=output, stderr=output)
        self.ranks = ranks

    def kill(self, random: Random) -> None:
        """End one rank, or all of them, or what has started them."""
        found = ranks_of(self.process) if self.ranks > 1 else []
        one = [random.choice(found)] if found else []
        for process in random.choice([one, found, []]) or [psutil.Process(self.process.pid)]:
            with suppress(psutil.Error):
                process.kill()

    def end(self) -> tuple[int, str]:
        """The exit code, and what was printed."""
        code = self.process.wait(SECONDS)
        return code, self.output.read_text(errors="replace")[-2000:]


def case(job: Job, random: Random, ranks: int, event: str) -> str:
    """One interleaving; returns how the second job ended."""
    asleep = event == "first asleep"
    timeout = SILENCE if asleep else 1800.0
    first = Started(job, "first", ranks, timeout)
    least = random.randrange(job.steps // 2)
    wait(first.process, lambda: job.records().count(b"\n") > least)
    if random.random() < 0.5:
        wait(first.process, job.unfinished, pause=0)
    newest = job.newest()
    sleeping = processes_of(job.run) if asleep else []
    for process in sleeping:
        process.suspend()
    second = Started(job, "second", ranks, timeout)
    time.sleep(random.uniform(0, 6))
    if event == "first killed":
        first.kill(random)
    elif event == "second killed":
        second.kill(random)
    code, text = second.end()
    for process in sleeping:
        process.resume()
    assert job.newest() >= newest, "a complete checkpoint is gone"
    first_code, first_text = first.end()
    how = _check_second(event, code, text)
    if asleep and how == "trained":
        assert first_code == 2, (first_code, first_text)
        assert re.search(TAKEN, only_line(first_text)), first_text
    elif event != "first killed":
        assert first_code == 0, (first_code, first_text)
    _wait_for_processes(job)
    for path in find_checkpoints(job.run / "checkpoints", "auto"):
        assert not [*inspection.damaged(path)], path
    last = Started(job, "last", ranks, 1800.0)
    code, text = last.end()
    assert code == 0, text
    return how


def _check_second(event: str, code: int, text: str) -> str:
    if code == 2:
        assert re.search(USED, only_line(text)), text
        return "refused"
    if event == "second killed" and code != 0:
        return "killed"
    assert code == 0, (code, text)
    return "trained"


def _wait_for_processes(job: Job) -> None:
    wait_until(lambda: not processes_of(job.run), SECONDS)


def many(
    folder: Path, cases: int, seed: int, steps: int, say: Callable[[str], None] = lambda text: None
) -> Counter[str]:
    """Try interleavings; returns how often each event has ended how."""
    data = small_text(folder / "data")
    known: dict[int, tuple[list[float], bytes]] = {}
    done: Counter[str] = Counter()
    for number in range(cases):
        random = Random(seed + number)
        event = EVENTS[(seed + number) % len(EVENTS)]
        # A rank that is asleep is seen by the watchdogs of others, which would end the job.
        ranks = 1 if event == "first asleep" else random.choice([1, 2])
        if ranks not in known:
            known[ranks] = _alone(folder / f"like-{ranks}", data, steps, ranks)
        root = folder / f"case-{number}"
        root.mkdir()
        options = ("--checkpoint.background", "true") if random.random() < 0.5 else ()
        job = Job(small_program(root, data), steps, options)
        how = case(job, random, ranks, event)
        assert job.result() == known[ranks], f"case {number} is not what one job alone comes to"
        done[f"{event}: second {how}"] += 1
        say(f"case {number}, {ranks} ranks, {event}: second {how}")
        shutil.rmtree(root)
    return done


def _alone(root: Path, data: Path, steps: int, ranks: int) -> tuple[list[float], bytes]:
    root.mkdir()
    job = Job(small_program(root, data), steps, ())
    code, text = Started(job, "alone", ranks, 1800.0).end()
    assert code == 0, text
    return job.result()


def main() -> None:
    """Try and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        done = many(
            Path(name),
            options.cases,
            options.seed,
            options.steps,
            partial(print, flush=True),
        )
    for what, count in sorted(done.items()):
        print(f"{count:>4}  {what}")
    print(f"{done.total()} interleavings, none lost a checkpoint, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
