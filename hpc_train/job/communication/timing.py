"""Times the collectives on the ranks of a job, and checks their results."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from hpc_train.errors import ConfigError, HpcTrainError, SetupError, size_text
from hpc_train.host.memory import free_bytes
from hpc_train.job.communication.budget import WARM_UP, Budget, repeats
from hpc_train.job.communication.figures import (
    ACROSS,
    ALL,
    BARE,
    BARRIER,
    HOROVOD,
    IMPLEMENTATIONS,
    INSIDE,
    OPERATIONS,
    PING_PONG,
    CollectiveFigure,
    OperationName,
    elements,
    figure_of,
)
from hpc_train.job.communication.trials import (
    OFFERED,
    ON_PROCESSORS,
    Trial,
    Where,
    brought,
    expected,
    make_trial,
)
from hpc_train.mpi import runtime as runtimes
from hpc_train.mpi.agreement import meet, settle
from hpc_train.mpi.environment import ranks_yield
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels

COPIES = 8  # tensors of the largest size that a rank may hold at once, with those of the library


class Case(NamedTuple):
    """What is measured at one size."""

    scope: str
    operation: OperationName
    implementation: str
    nbytes: int


@dataclass(frozen=True)
class WantedFigures:
    """What to measure.

    Args:
        sizes: bytes, ascending; multiples of 4.
        seconds: time for all measurements.
        implementations: keys of IMPLEMENTATIONS; empty for all that are here.
        repeats: the most repeats of a case.
    """

    sizes: tuple[int, ...]
    seconds: float
    implementations: tuple[str, ...]
    repeats: int


@dataclass(frozen=True)
class CollectiveFigures:
    """What was measured.

    Args:
        figures: one for each case that was measured; on rank 0 only.
        notes: what was left out and why, one sentence each; on rank 0 only.
    """

    figures: list[CollectiveFigure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Scopes:
    """The groups of ranks that are measured. Collective to make.

    Args:
        levels: all ranks by nodes.
    """

    def __init__(self, levels: Levels) -> None:
        node, alone = levels.node, Group(waiting=levels.whole.waiting)
        largest = levels.whole.largest(node.size)
        self.sizes: dict[str, int] = {}
        """The number of ranks of each scope that there is; inside nodes, of the largest node."""
        self.levels: dict[str, Levels | None] = {}
        """This rank's group of each scope; None if the rank only waits."""
        if largest > 1:
            self.sizes[INSIDE] = largest
            inside = Levels(node, node, alone, node.size, 1)
            self.levels[INSIDE] = inside if node.size > 1 else None
        if levels.nodes > 1:
            self.sizes[ACROSS] = levels.nodes
            self.levels[ACROSS] = Levels.flat(levels.cross) if node.rank == 0 else None
        if len(self.sizes) == 2:
            self.sizes[ALL] = levels.whole.size
            self.levels[ALL] = levels
        self.pairs = {scope: _pair(levels.whole, mine) for scope, mine in self.levels.items()}
        """The first and the last rank of this rank's group; None on other ranks."""

    def of(self, scope: str, operation: OperationName) -> Levels | None:
        """The ranks that carry out an operation; None if this rank only waits."""
        return self.pairs[scope] if operation == PING_PONG else self.levels[scope]

    def size(self, scope: str, operation: OperationName) -> int:
        """The number of these ranks."""
        return 2 if operation == PING_PONG else self.sizes[scope]

    def close(self) -> None:
        """Free the communicators of the pairs. Collective."""
        for pair in self.pairs.values():
            if pair is not None:
                pair.whole.close()


def _pair(world: Group, levels: Levels | None) -> Levels | None:
    """The first and the last rank of a group, as a group of its own. Collective over all ranks."""
    if levels is None or levels.whole.comm is None:
        return None
    group = levels.whole
    ends = group.rank in (0, group.size - 1)
    pair = group.split(color=0 if ends else 1, key=group.rank)
    if ends:
        return Levels.flat(pair)
    pair.close()
    return None


def time_collectives(
    levels: Levels, device: torch.device, wanted: WantedFigures
) -> CollectiveFigures:
    """Measure everything that is wanted and that is here. Collective.

    Args:
        levels: all ranks of the job by nodes, two ranks or more.
        device: where this rank's tensors are; of one kind on all ranks.
        wanted: what to measure.

    Raises:
        HpcTrainError: a result is wrong; raised on all ranks, naming the rank and its host.
        ConfigError: an implementation was named that has nothing to do on these ranks.
        SetupError: Horovod was named, and does not start; raised on all ranks.
    """
    return _Measurement(levels, device, wanted).run()


class _Measurement:
    def __init__(self, levels: Levels, device: torch.device, wanted: WantedFigures) -> None:
        self.world, self.device, self.wanted = levels.whole, device, wanted
        self.levels, self.scopes = levels, Scopes(levels)
        self.polite = bool(self.world.largest(int(ranks_yield(os.environ))))
        self.hvd: Any = None
        self.measured = CollectiveFigures()
        # The figures of rank 0 by case without its size, and sizes by implementation and reason.
        self.last: dict[tuple[str, ...], list[CollectiveFigure]] = {}
        self.left_out: dict[tuple[str, str], set[int]] = {}

    def run(self) -> CollectiveFigures:
        """Measure all cases, small ones first, so that a short time leaves out large ones."""
        names, sizes = self._names(), self._sizes()
        # Horovod comes last, because its thread disturbs the others as soon as it runs.
        first = list(self._cases([name for name in names if name != HOROVOD], sizes))
        last = list(self._cases([name for name in names if name == HOROVOD], sizes))
        budget = Budget(self.wanted.seconds, [case.nbytes for case in [*first, *last]])
        for case in first:
            self._measure(case, budget)
        if last:
            self.hvd = runtimes.start_horovod(self.world, self._process_sets())
        for case in last:
            self._measure(case, budget)
        self.scopes.close()
        there = {figure.implementation for figure in self.measured.figures}
        for (name, reason), left_out in self.left_out.items():
            shown = ", ".join(size_text(size) for size in sorted(left_out))
            where = f"in all operations at {shown}" if name in there else "at all"
            self.measured.notes.append(f"{name} is not measured {where}: {reason}")
        return self.measured

    def _names(self) -> list[str]:
        """The implementations to measure, the same on all ranks. Collective."""
        wanted = self.wanted.implementations
        names = [name for name in IMPLEMENTATIONS if not wanted or name in wanted]
        # One that is named is there, or starting it says why not.
        built = self.world.smallest(int(runtimes.horovod_built()))
        if HOROVOD in names and not wanted and not built:
            names.remove(HOROVOD)
            self.measured.notes.append("Horovod is not built here, so it is not measured")
        if self.device.type != "cpu":
            names = [name for name in names if name not in ON_PROCESSORS]
            if BARE in names and self._through_host():
                names.remove(BARE)
                self.measured.notes.append(
                    "bare MPI is left out, because this MPI library cannot read GPU memory; "
                    "hpc_train's tensors go through host memory"
                )
        for name in wanted:
            if name not in names or not any(self._cases([name], [1 << 20])):
                raise ConfigError(
                    f"the implementation {name} has nothing to do on these ranks",
                    "docs/how-to/collectives.md says which ones need several ranks of a node, "
                    "several nodes, or tensors in host memory",
                )
        return names

    def _through_host(self) -> bool:
        from hpc_train.collectives.mpi import through_host  # here, because it starts MPI

        return bool(self.world.largest(int(through_host(self.device))))

    def _sizes(self) -> list[int]:
        """The sizes that memory has room for, the same on all ranks. Collective."""
        most = self.world.smallest(free_bytes() // (COPIES * self.levels.node.size))
        if large := [size_text(size) for size in self.wanted.sizes if size > most]:
            self.measured.notes.append(
                f"{', '.join(large)} left out: a node has too little free memory for all its ranks"
            )
        return [size for size in self.wanted.sizes if size <= most]

    def _cases(self, names: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
        """All cases, by size. A barrier has the size 0."""
        for size, scope, operation, name in itertools.product(
            (0, *sizes), self.scopes.sizes, OPERATIONS, names
        ):
            offered = scope in OFFERED[name].get(operation, ())
            count = elements(operation, size, self.scopes.size(scope, operation))
            if offered and (operation == BARRIER) == (size == 0) == (count == 0):
                yield Case(scope, operation, name, size)

    def _process_sets(self) -> list[list[int]]:
        """The ranks of each group, which Horovod has to know. Collective."""
        first = self.levels.node.from_first(lambda: self.world.rank)
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(self.world.gathered(first, "the nodes of all ranks")):
            nodes.setdefault(node, []).append(rank)
        groups = [*nodes.values(), sorted(nodes)]
        return [group for group in groups if 1 < len(group) < self.world.size]

    def _measure(self, case: Case, budget: Budget) -> None:
        """Measure one case. Collective over all ranks, also those that only wait."""
        before = self.last.get(case[:3], [])  # empty on other ranks than the first
        share = self.world.from_first(lambda: budget.share(case.nbytes, predicted(before, case)))
        if not share:
            self._leave_out(case, "there was no time (--seconds gives more)")
            return
        ranks = self.scopes.of(case.scope, case.operation)
        trial, problem = self._made(case, ranks)
        if problem:
            self._leave_out(case, problem)
        else:
            times = self._timed(trial, ranks, case, share)
            if case.operation != BARRIER:
                self._check(trial, ranks, case)
            if self.world.rank == 0:
                self._keep(case, times)
        if trial is not None:
            trial.close()

    def _leave_out(self, case: Case, reason: str) -> None:
        self.left_out.setdefault((case.implementation, reason), set()).add(case.nbytes)

    def _made(self, case: Case, ranks: Levels | None) -> tuple[Trial | None, str]:
        """The trial of a case, and why there can be none on some node. Collective."""
        trial, problem, failure = None, "", None
        try:
            if ranks is not None:
                where = Where(ranks, self.device, self.polite, self.hvd)
                trial = make_trial(case.implementation, case.operation, where, _count(case, ranks))
                trial.given.zero_()  # so that repeated sums do not overflow
        except SetupError as error:
            problem = error.cause
        except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
            failure = error
        if settle(self.world, failure, int(bool(problem))):
            problem = next(filter(None, self.world.gathered(problem)))
        return trial, problem

    def _timed(
        self, trial: Trial | None, ranks: Levels | None, case: Case, share: float
    ) -> list[float]:
        """Seconds of each repeat, on the slowest rank. Collective."""
        warm = self._repeat(trial, ranks, case, WARM_UP)
        return self._repeat(trial, ranks, case, repeats(share, warm[-1], self.wanted.repeats))

    def _repeat(
        self, trial: Trial | None, ranks: Levels | None, case: Case, count: int
    ) -> list[float]:
        taken = np.zeros(count)
        if trial is not None and ranks is not None:
            comm: Any = ranks.whole.comm
            with self.world.waiting(f"a measurement of {case.operation}"):
                for number in range(count):
                    comm.Barrier()
                    begin = time.perf_counter()
                    trial.call()
                    if self.device.type != "cpu":
                        getattr(torch, self.device.type).synchronize(self.device)
                    taken[number] = time.perf_counter() - begin
        if self.scopes.size(case.scope, case.operation) < self.world.size:
            meet(self.world)  # some ranks have nothing to do, and must not take the others' cores
        from mpi4py import MPI  # it is running, because there are several ranks

        slowest = np.empty(count)
        with self.world.waiting("the times of all ranks"):
            self.world.comm.Allreduce(taken, slowest, op=MPI.MAX)  # type: ignore[union-attr]
        return slowest.tolist()

    def _check(self, trial: Trial | None, ranks: Levels | None, case: Case) -> None:
        """Carry the operation out once more, and look at its result. Collective.

        Raises:
            HpcTrainError: it is wrong on some rank; raised on all ranks.
        """
        failure: Exception | None = None
        if trial is not None and ranks is not None:
            count = _count(case, ranks)
            trial.given.copy_(brought(case.operation, ranks.whole, count))
            returned = trial.call()
            found: Any = returned if trial.result is None else trial.result
            right = expected(case.operation, ranks.whole, count)
            if not torch.equal(found.cpu(), right):
                failure = HpcTrainError(
                    f"{case.operation} of {size_text(case.nbytes)} by "
                    f"{IMPLEMENTATIONS[case.implementation]} has a wrong result",
                    "do not train on this machine before its MPI library or network is mended",
                )
        settle(self.world, failure)

    def _keep(self, case: Case, times: Sequence[float]) -> None:
        size = self.scopes.size(case.scope, case.operation)
        nbytes = 4 * elements(case.operation, case.nbytes, size)
        figure = figure_of(case[:3], size, nbytes, times)
        self.last.setdefault(case[:3], []).append(figure)
        self.measured.figures.append(figure)


def predicted(before: Sequence[CollectiveFigure], case: Case) -> float:
    """Seconds of a call, by a line through the last two sizes; 0 if there are fewer than two."""
    if len(before) < 2:
        return 0.0
    one, two = before[-2:]
    slope = max(0.0, (two.least - one.least) / (two.nbytes - one.nbytes))
    return two.least + slope * (case.nbytes - two.nbytes)


def _count(case: Case, ranks: Levels) -> int:
    return elements(case.operation, case.nbytes, ranks.whole.size)
