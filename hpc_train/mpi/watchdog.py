"""Ends a job whose ranks wait for one that does not come, with an error that names this rank.

A thread on every rank looks at what its main thread waits for (`watch.py`). If a wait lasts too
long, the rank asks all others what they are doing. Their threads answer unless the whole process
has been stopped or has died. The answers, and the ranks that give none, show which rank is missing.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hpc_train.errors import EXIT_FAILURE, HpcTrainError, print_error
from hpc_train.host.process import RunningClock
from hpc_train.mpi.agreement import all_arrive
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

ENTRIES_SHOWN = 4  # entries of a list in a message; a job may have ten thousand ranks
ENDING_SECONDS = 3.0  # of the timeout, for the end of the job: PARTING and the launcher's part
PARTING = 1.0  # seconds in which the other ranks hear of the end and write their logs
END_PATIENCE = 5.0  # seconds after which these ranks abort, if the one that told them has not
CLOSE_PATIENCE = 3.0  # seconds that ranks wait for each other to stop watching


class State(NamedTuple):
    """The operation that a rank's main thread waits for, "" if none, and for how many seconds."""

    operation: str
    seconds: float


def blame(asker: int, states: Mapping[int, State], hosts: Sequence[str]) -> HpcTrainError:
    """The error that says why a rank waits in vain.

    Args:
        asker: the rank that has waited too long.
        states: the state of each rank that has answered, and of the asker.
        hosts: host name of each rank.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in states]
    busy = [rank for rank in sorted(states) if not states[rank].operation]
    seconds = f"{states[asker].seconds:.0f} s"
    waits = f"{named([asker], hosts)} has waited {seconds} for {states[asker].operation}"
    if silent:
        return HpcTrainError(
            f"{_who(silent, hosts)} not answer (stopped, dead or stuck): {waits}",
            "look at its host, then start the same command again: it resumes from the last "
            "checkpoint",
        )
    if busy:
        return HpcTrainError(
            f"{_who(busy, hosts)} not come (busy elsewhere or stuck): {waits}",
            "the log of the missing rank shows where it is; if it needs this much time, raise "
            "hang_timeout",
        )
    return HpcTrainError(
        f"all ranks wait for each other: {_waits(states, hosts)}",
        "they took different paths through the program; their logs show where each one is",
    )


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ascending ranks with their hosts, as in "ranks 4-7 (node2), rank 9 (node3)"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1 and hosts[rank - 1] == hosts[rank]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [
        f"ranks {run[0]}-{run[-1]} ({hosts[run[0]]})"
        if len(run) > 1
        else f"rank {run[0]} ({hosts[run[0]]})"
        for run in runs[:ENTRIES_SHOWN]
    ]
    left = sum(len(run) for run in runs[ENTRIES_SHOWN:])
    return ", ".join(texts) + (f" and {left} more" if left else "")


def _who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return f"{named(ranks, hosts)} {'does' if len(ranks) == 1 else 'do'}"


def _waits(states: Mapping[int, State], hosts: Sequence[str]) -> str:
    """Lists the operations that ranks wait for, with these ranks."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(states):
        ranks.setdefault(states[rank].operation, []).append(rank)
    texts = [f"{named(some, hosts)} for {operation}" for operation, some in ranks.items()]
    return "; ".join(texts[:ENTRIES_SHOWN]) + ("; and others" if len(texts) > ENTRIES_SHOWN else "")


@contextmanager
def watch_over(world: Group, timeout: float) -> Iterator[None]:
    """Run a block under a `Watchdog`. Collective, but safe for a rank that leaves by an exception.

    Args:
        world: all ranks of the job; a rank alone is not watched.
        timeout: seconds that a rank waits for others before the job ends; 0 disables the watchdog.
    """
    if world.size == 1 or timeout <= 0:
        yield
        return
    watchdog = Watchdog(world, timeout)
    watchdog.start()
    try:
        yield
    except BaseException:
        watchdog.stop()  # the exception may be this rank's alone: the others need not come
        raise
    watchdog.close()


class Watchdog:
    """Watches this rank's waits, and answers the questions of other ranks.

    A wait counts only while this process runs, so a job that was suspended and goes on is not
    ended. Only one rank should ask, so that 10 000 ranks do not all query each other. Each rank
    waits before it asks, longer the higher its number, and stays silent if another has just asked
    it.

    Collective to make.

    Args:
        world: all ranks of the job, with a communicator, which is duplicated.
        timeout: seconds, above 0, from the beginning of a wait to the end of the job.
    """

    def __init__(self, world: Group, timeout: float) -> None:
        assert world.comm is not None
        self.rank, self.watch = world.rank, world.waiting
        self.timeout = timeout
        self.armed = True
        """Whether this rank's waits count. Others' questions are answered in any case."""
        self.period = min(1.0, timeout / 12)  # seconds between two looks
        with world.waiting("the watchdogs of all ranks"):
            self.group = Group.of(world.comm)
            self.hosts: list[str] = world.comm.allgather(world.host)
        self.comm: Any = self.group.comm
        self._sent: list[Any] = []
        self._clock = RunningClock(2 * self.period)
        self._seen = self.watch.now
        self._since = 0.0  # the clock when `_seen` was first seen
        self._asked: float | None = None  # the clock when this rank asked
        self._silent_until = 0.0  # the clock until which another rank is left to ask
        self._number = 0  # number of this rank's last question
        self._answers: dict[int, State] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def limit(self) -> float:
        """Seconds that a wait may take now: the timeout less the time for the job to end."""
        timeout = min(self.timeout, self.watch.limit)
        return timeout - min(ENDING_SECONDS, timeout / 6)

    @property
    def grace(self) -> float:
        """Seconds that other ranks have to answer; they are the last part of the limit."""
        return min(30.0, min(self.timeout, self.watch.limit) / 2)

    @property
    def patience(self) -> float:
        """Seconds that this rank waits before it asks.

        Ranks 0, 1, 2-3, 4-7 and so on ask one period after each other, none later than the limit.
        """
        return self.limit - self.grace + min(self.rank.bit_length() * self.period, self.grace)

    def start(self) -> None:
        """Start the thread."""
        logger.setLevel(logging.DEBUG)  # for the rank's log file; consoles start at INFO
        atexit.register(self.stop)  # a thread must not be in MPI when MPI is finalized
        self._thread.start()

    def stop(self) -> None:
        """End the thread, on this rank alone."""
        self._over.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def close(self) -> None:
        """End the thread, and free the communicator if all ranks come. Collective."""
        self.stop()
        if all_arrive(self.group, CLOSE_PATIENCE):
            while self.comm.iprobe():
                self.comm.recv()
            self.group.close()

    def _run(self) -> None:
        while not self._over.wait(self.period):
            self._note()
            self._progress()
            self._receive()
            self._look()

    def _note(self) -> None:
        """Note the time, and whether another wait has begun."""
        passed, now = self._clock.look(), self.watch.now
        if now != self._seen:
            self._seen, self._since, self._asked = now, passed, None

    def _state(self) -> State:
        return State(self._seen[0], self._clock.seconds - self._since)

    def _receive(self) -> None:
        while self.comm.iprobe():
            match self.comm.recv():
                case ("ask", asker, number):
                    self._send(asker, ("answer", self.rank, number, self._state()))
                    if self._asked is None or asker < self.rank:  # of two askers the lower goes on
                        self._asked = None
                        self._silent_until = self._clock.seconds + 2 * self.grace
                case ("answer", rank, number, state) if number == self._number:
                    self._answers[rank] = state
                case ("end", error):
                    self._end(error, END_PATIENCE)

    def _look(self) -> None:
        """Ask the other ranks, or end the job, if it is time for that."""
        operation, waited = self._state()
        if (
            not (self.armed and operation)
            or waited < self.patience
            or self._clock.seconds < self._silent_until
        ):
            return
        if self._asked is None:
            self._ask()
        elif self._clock.seconds - self._asked >= self.grace and waited >= self.limit:
            self._conclude()

    def _ask(self) -> None:
        self._asked = self._clock.seconds
        self._number += 1
        self._answers.clear()
        self._tell("ask", self.rank, self._number)

    def _conclude(self) -> None:
        if not self.watch.ending.acquire(blocking=False):
            return
        error = blame(self.rank, {**self._answers, self.rank: self._state()}, self.hosts)
        self._tell("end", error)
        print_error(error)
        self._end(error, PARTING)

    def _end(self, error: HpcTrainError, after: float) -> None:
        """Write this rank's wait and stack to its log, and abort the job after `after` seconds."""
        operation, seconds = self._state()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        logger.debug(
            "%s\nThis rank has waited for %s for %.0f s. Its main thread is in:\n%s",
            error,
            operation or "nobody",
            seconds,
            "".join(traceback.format_stack(frame)),
        )
        until = time.monotonic() + after
        while time.monotonic() < until:
            self._progress()
            time.sleep(0.05)
        self.comm.Abort(EXIT_FAILURE)

    def _tell(self, *message: object) -> None:
        for rank in range(len(self.hosts)):
            if rank != self.rank:
                self._send(rank, message)

    def _send(self, rank: int, message: tuple[object, ...]) -> None:
        self._sent.append(self.comm.isend(message, dest=rank))

    def _progress(self) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
