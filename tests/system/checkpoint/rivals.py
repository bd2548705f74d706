"""Two loops in one directory, killed and put to sleep at random; what is left is compared.

    python -m tests.system.checkpoint.rivals --cases 500 --seed 0

In each case two processes, forks of this one, train into the same directory. At random moments one
of them is killed, or stopped (SIGSTOP) and later let go on. Whoever gives way has to say to whom;
no checkpoint may be damaged or lost; and when one more process has come to the end, the last
checkpoint has to be, bit for bit, that of a loop which had its directory to itself.

`tests.system.checkpoint.two_jobs` does the same with whole jobs of several ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
from torch.utils.data import TensorDataset

from hpc_train.checkpoint import claim as claims
from hpc_train.checkpoint import fileformat, inspection
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.errors import ClaimError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.checkpoint.states import SMALL
from tests.waiting import wait_until

STEPS = 60
PAUSE = 0.003  # seconds of a step, in which nothing is computed
SILENCE = 0.5  # seconds, after which one that is asleep is taken for gone
ACTIONS = 4  # at most, in a case
SECONDS = 60.0  # after which what should be over hangs
WORDS = {
    "in use": r"is in use by process \d+ on \S+, which was last heard of \d+ s ago: wait until it",
    "taken over": r"was taken over by process \d+ on \S+, so this job writes no more to it",
}


def train(directory: Path, *, background: bool) -> None:
    """Train to the end, from whatever is there."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 16).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = LoopOptions(every=2, keep=2, background=background, hang_timeout=SILENCE)
    loop = Loop(Runtime(Group(), Group()), directory, model, optimizer, options)
    data = TensorDataset(torch.randn(4 * STEPS, 40, dtype=torch.float64))
    for _, batches in loop.epochs(data, batch=4, epochs=1):
        for (inputs,) in batches:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            loop.step()
            time.sleep(PAUSE)


class Rival:
    """A fork of this process that trains.

    Args:
        directory: into which it does.
        said: the file for what it says when it gives way.
        background: how it saves.
        patience: seconds for which it waits for another one.
    """

    def __init__(
        self, directory: Path, said: Path, *, background: bool = False, patience: float = 0.0
    ) -> None:
        self.said, self.code = said, None
        self.process = os.fork()
        if not self.process:
            os._exit(self._train(directory, background, patience))

    def _train(self, directory: Path, background: bool, patience: float) -> int:
        claims.OWNER_PATIENCE = patience
        with self.said.open("w") as output:
            os.dup2(output.fileno(), 2)
            try:
                train(directory, background=background)
            except ClaimError as error:
                print(error, file=sys.stderr, flush=True)
                return 2
            except BaseException:  # noqa: BLE001  # the other side shows it
                traceback.print_exc()
                sys.stderr.flush()
                return 1
        return 0

    def send(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.code is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if process else None
        return self.code

    def end(self) -> str:
        """Wait for it; returns how it ended."""
        wait_until(lambda: self.poll() is not None, SECONDS, pause=0.002)
        if self.code == -signal.SIGKILL:
            return "killed"
        text = self.said.read_text()
        assert self.code in (0, 2), text
        if self.code == 0:
            return "trained"
        return next(how for how, words in WORDS.items() if re.search(words, text))


def newest(directory: Path) -> int:
    """The step of the newest checkpoint."""
    return max(map(step_of, find_checkpoints(directory, "auto")), default=0)


def case(folder: Path, random: Random) -> list[str]:
    """One interleaving; returns what happened, and how each one ended."""
    directory, events, reached = folder / "run", list[str](), 0
    rivals: list[Rival] = []

    def start() -> None:
        how = {
            "background": random.random() < 0.5,
            "patience": random.choice([0.0, 0.5, 1.5, 4.0]) * SILENCE,
        }
        rivals.append(Rival(directory, folder / f"said-{len(rivals)}", **how))

    for _ in range(2):
        start()
        time.sleep(random.choice([0.0, random.uniform(0, 0.4)]))
    for _ in range(random.randrange(ACTIONS + 1)):
        rival = random.choice(rivals)
        action = random.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT])
        rival.send(action)
        events.append(action.name)
        time.sleep(random.choice([random.uniform(0, 0.05), random.uniform(0, 2 * SILENCE)]))
        assert newest(directory) >= reached, "a complete checkpoint is gone"
        reached = newest(directory)
        if random.random() < 0.3:  # a third one, while the others are in whatever state
            start()
    for rival in rivals:
        rival.send(signal.SIGCONT)
    events += [rival.end() for rival in rivals]
    assert newest(directory) >= reached, "a complete checkpoint is gone"
    for path in find_checkpoints(directory, "auto"):
        assert not [*inspection.damaged(path)], path
    time.sleep(SILENCE)
    assert Rival(directory, folder / "said").end() == "trained"
    return events


def last_checkpoint(directory: Path) -> bytes:
    """Of a loop that is through."""
    assert newest(directory) == STEPS
    return find_checkpoints(directory, "auto")[0].read_bytes()


def main() -> None:
    """Try and count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vars(fileformat).update(SMALL)
    begin, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        train(Path(name) / "alone", background=False)  # which loads what forks would have to
        expected = last_checkpoint(Path(name) / "alone")
        for number in range(options.cases):
            folder = Path(name) / str(number)
            folder.mkdir()
            counts.update(case(folder, Random(options.seed + number)))
            assert last_checkpoint(folder / "run") == expected, f"seed {options.seed + number}"
            shutil.rmtree(folder)
    what = ", ".join(f"{count} {event}" for event, count in sorted(counts.items()))
    print(f"{options.cases} interleavings ({what}), none lost, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
