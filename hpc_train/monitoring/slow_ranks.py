"""Finds the rank that the others wait for, and why it is slow, from a table of all ranks' numbers.

Nothing here communicates. A rank is slow if its own time, which is data and computing without
waits, is longer than that of other ranks with the same work. The part of its own time that makes
the difference names the cause. Medians and the scatter of steps keep noise from naming a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.monitoring import slow_words as words
from hpc_train.times import time_text

Cause = Literal["data", "compute", "memory", "network", "load"]

RANK_COLUMNS = (
    "wall",  # seconds of a step
    "scatter",  # standard error of the mean of the rank's own time, data and computing
    "data_scatter",  # the same of data alone
    "data",  # seconds of data
    "compute",  # seconds of all else but waits, saves and evaluations
    "processor",  # the part of them in which the rank had a processor; on GPUs the GPU's seconds
    "waiting",  # seconds of waits for other ranks
    "faults",  # new pages
    "reads",  # pages read from a disk
    "system",  # seconds in the kernel
    "switches",  # times that a thread lost its processor
    "delayed",  # seconds without a processor
    "stolen",  # seconds that the hypervisor took
    "frequency",  # Hz; this and what follows is not per step, and NaN unless there was a probe
    "temperature",  # degrees Celsius
    "arithmetic",  # seconds of a trial of products
    "memory",  # seconds of a trial of copies
    "link",  # seconds of a message to a neighbouring host, on one rank of each host
)
"""What each rank tells the others of the steps since the last time, per step unless said."""

MATERIAL = 0.05  # of a step: less is not worth a line
CLEAR = 3.0  # times the scatter
IN_A_ROW = {"data": 2, "compute": 2, "memory": 2, "network": 2, "load": 3}
NAMED_AT_ONCE = 0.5  # of a step: such a delay by data is named at once
FORGOTTEN = 3  # tables in a row without the slow rank, after which it is slow no longer
SLOWER = 1.2  # times the others' trial: a processor or memory that is slow
SLOW_LINK = 2.0  # times the others' trial
ALL_WAIT = 0.1  # of a step that all ranks wait, above which links are tried
TRIED_EVERY = 20  # tables between two trials of one kind, unless the first has found something
FAULT = 5e-7  # seconds of a page fault at the least


class SlowRank(NamedTuple):
    """A rank that is slow.

    Args:
        rank: its number.
        cause: what makes it slow.
        seconds: what each step loses by it.
        share: the part of a step that this is.
        why: the numbers, as a sentence without its subject.
    """

    rank: int
    cause: Cause
    seconds: float
    share: float
    why: str


class RankTable:
    """The numbers of all ranks.

    Args:
        numbers: (ranks, len(RANK_COLUMNS)), float64.
        stages: (ranks,): ranks with the same number have the same work.
        hosts: the host of each rank.
    """

    def __init__(
        self, numbers: NDArray[np.float64], stages: Sequence[int], hosts: Sequence[str]
    ) -> None:
        self.columns = dict(zip(RANK_COLUMNS, numbers.T, strict=True))
        self.stages, self.hosts = np.asarray(stages), hosts
        self.wall = float(np.median(self.columns["wall"]))

    def of(self, column: str, rank: int) -> float:
        """A rank's number."""
        return float(self.columns[column][rank])

    def others(self, column: str, rank: int, *, alike: bool = False) -> float:
        """The median of the other ranks' numbers, NaN left out; NaN if there is none.

        Args:
            column: the name of the numbers.
            rank: the rank that is left out.
            alike: whether to take only ranks with the same work.
        """
        return (
            float(np.median(found)) if (found := self._rest(column, rank, alike)).size else np.nan
        )

    def _rest(self, column: str, rank: int, alike: bool) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.columns[column]
        kept = ~np.isnan(values)
        kept[rank] = False
        if alike:
            kept &= self.stages == self.stages[rank]
        rest: NDArray[np.float64] = values[kept]
        return rest

    def excess(self, column: str, rank: int, *, alike: bool = False) -> float:
        """How much a rank's number is above that of the others; 0 if one of them is unknown."""
        found = self.of(column, rank) - self.others(column, rank, alike=alike)
        return 0.0 if np.isnan(found) else found

    def ratio(self, column: str, rank: int) -> float:
        """A rank's number divided by that of the others; 1 if one of them is unknown."""
        found = self.of(column, rank) / self.others(column, rank)
        return found if np.isfinite(found) else 1.0

    def scatter(self, column: str, rank: int) -> float:
        """How far the other ranks with the same work are from their median; 0 for fewer than 3."""
        found = self._rest(column, rank, alike=True)
        return 1.4826 * float(np.median(abs(found - np.median(found)))) if len(found) > 2 else 0.0


def slowest(table: RankTable) -> SlowRank | None:
    """The rank that makes all others wait, if one clearly does, with the cause. Pure."""
    columns = table.columns
    columns["own"] = columns["data"] + columns["compute"]
    columns["idle"] = columns["compute"] - columns["processor"]
    if len(table.stages) < 2 or not table.wall > 0:
        return None
    return _late(table) or _slow_link(table)


def _late(table: RankTable) -> SlowRank | None:
    """The rank whose own time is longest, if that is clear."""
    columns = table.columns
    above = np.zeros(len(table.stages))
    for stage in np.unique(table.stages):
        alike = table.stages == stage
        above[alike] = columns["processor"][alike] - np.median(columns["processor"][alike])
    above += columns["data"] + columns["idle"]
    rank = int(above.argmax())
    # Where all ranks share their processors with others, more work means more such delays, too.
    delays = min(_delays_of_others(table, rank), _per_second(table, rank))
    more_work = table.excess("processor", rank, alike=True) * (1 + delays)
    parts = {"data": table.excess("data", rank), "compute": more_work}
    parts["load"] = table.excess("idle", rank) - more_work * delays / (1 + delays)
    excess = sum(parts.values())
    # All ranks leave a step together, so who comes last waits least.
    peers = bool((table.stages == table.stages[rank]).sum() > 1)
    seconds = min(excess, -table.excess("waiting", rank, alike=peers))
    part = max(parts, key=lambda name: parts[name])
    # Data has a scatter of its own, because that of computing may be large on a busy host.
    steps, ranks = ("data_scatter", "data") if part == "data" else ("scatter", "own")
    error = float(np.hypot(table.of(steps, rank), table.others(steps, rank)))
    clear = parts[part] > CLEAR * max(error, table.scatter(ranks, rank))
    if seconds <= MATERIAL * table.wall or not clear:
        return None
    lost = parts[part] / (1 + delays if part == "compute" else 1)
    cause, why = _cause(table, rank, part, lost)
    return SlowRank(rank, cause, seconds, seconds / table.wall, why)


def _per_second(table: RankTable, rank: int) -> float:
    """The delays of a rank's computing, for each second in which it had a processor."""
    return table.of("idle", rank) / max(table.of("processor", rank), 1e-9)


def _delays_of_others(table: RankTable, rank: int) -> float:
    """The same for the others, by their computing, or by all their time if that says more."""
    computing = table.others("idle", rank) / max(table.others("processor", rank), 1e-9)
    delayed = np.nan_to_num(table.others("delayed", rank))
    return float(max(computing, delayed / max(table.wall - delayed, 1e-9)))


def _cause(table: RankTable, rank: int, part: str, lost: float) -> tuple[Cause, str]:
    """The cause of a rank's long own time, and the sentence about it.

    Args:
        table: all ranks' numbers.
        rank: the rank.
        part: the part of its own time that is longest beside the others': data, load or compute.
        lost: the seconds by which it is; for compute, of a processor.
    """
    if part == "data":
        return "data", words.say_data(table.of("data", rank), table.others("data", rank))
    computing = table.of("compute", rank), table.others("compute", rank)
    reads, switches = table.excess("reads", rank), table.excess("switches", rank)
    if part == "load":
        known = not np.isnan(table.of("delayed", rank))
        delayed = table.of("delayed", rank) + np.nan_to_num(table.of("stolen", rank))
        if not known or delayed > lost / 3:
            stolen = table.excess("stolen", rank)
            return "load", words.say_load(computing[0], computing[0] - lost, stolen, switches)
        if reads >= 1:
            return "memory", words.say_pages(*computing, reads, read=True)
        return "compute", words.say_stands_still(*computing, lost)
    faults = table.excess("faults", rank)
    system = table.excess("system", rank)  # seconds in the kernel
    if faults >= 1 and (faults * FAULT > 0.3 * lost or system > 0.4 * lost):
        return "memory", words.say_pages(*computing, faults, read=False)
    arithmetic, memory = table.ratio("arithmetic", rank), table.ratio("memory", rank)
    if memory > SLOWER and memory > 1.1 * arithmetic:
        return "memory", words.say_memory(*computing, memory)
    tried = not np.isnan(table.of("arithmetic", rank))
    clock = table.of("frequency", rank), table.others("frequency", rank)
    heat = table.of("temperature", rank)
    slower = arithmetic if arithmetic > SLOWER else 0.0
    return "compute", words.say_compute(*computing, slower, clock, heat, tried=tried)


def _slow_link(table: RankTable) -> SlowRank | None:
    """The host whose link makes all sums between nodes slow, as its first rank."""
    links = table.columns["link"]
    tried = np.flatnonzero(~np.isnan(links))
    if len(tried) < 3:  # of two hosts nobody can say whose link it is
        return None
    rank = int(tried[links[tried].argmax()])
    ratio = table.ratio("link", rank)
    seconds = float(table.columns["waiting"].min()) * (1 - 1 / ratio)
    if ratio < SLOW_LINK or seconds < MATERIAL * table.wall:
        return None
    times = table.of("link", rank), table.others("link", rank)
    why = words.say_link(table.hosts[rank], *times)
    return SlowRank(rank, "network", seconds, seconds / table.wall, why)


class Probes(NamedTuple):
    """What the ranks try before they exchange the next table."""

    processor: bool = False
    links: bool = False


class SlowRankTracker:
    """Names a rank if several tables in a row show that it is slow, and only once.

    Attributes:
        named: the rank that is slow now; None: there is none.
        probes: what to try before the next table.
    """

    def __init__(self) -> None:
        self.named: SlowRank | None = None
        self.probes = Probes()
        self._seen: list[SlowRank] = []  # in the last tables in a row, all of one rank and cause
        self._without = 0  # tables in a row in which the named rank was not slow
        self._processor_in = self._links_in = 0  # tables until there may be a trial again

    def note(self, table: RankTable) -> SlowRank | None:
        """Look at a table. Returns a rank that has to be named now; None: there is nothing new."""
        found = slowest(table)
        links_tried = not np.isnan(table.columns["link"]).all()
        if found is None and self.named is not None and self.named.cause == "network":
            if links_tried:  # the link has recovered
                self.named = None
            elif _all_wait(table):  # links are not tried for each table
                found = self.named
        found = self._as_named(found, table)
        self._follow(found)
        new = self._named_now(found)
        self.probes = self._next(table, found)
        self._processor_in = TRIED_EVERY if self.probes.processor else self._processor_in - 1
        self._links_in = TRIED_EVERY if self.probes.links else self._links_in - 1
        return new

    def _as_named(self, found: SlowRank | None, table: RankTable) -> SlowRank | None:
        """What was found, with the cause that the probes gave when it was named."""
        by_probes = ("compute", "memory")
        named = self.named
        if found is None or named is None or found.rank != named.rank:
            return found
        if found.cause in by_probes and named.cause in by_probes:
            return found._replace(cause=named.cause, why=named.why)
        return found

    def _follow(self, found: SlowRank | None) -> None:
        """Count the tables in a row that agree."""
        alike = {"compute": "memory"}  # the second table has probes, which tell them apart
        before = self._seen[-1] if self._seen else None
        if found is None:
            self._seen = []
        elif (
            before is not None
            and before.rank == found.rank
            and alike.get(before.cause, before.cause) == alike.get(found.cause, found.cause)
        ):
            self._seen.append(found)
        else:
            self._seen = [found]

    def _named_now(self, found: SlowRank | None) -> SlowRank | None:
        named = self.named
        if named is not None and found is not None and found[:2] == named[:2]:
            self._without = 0
            self.named = found
            return None
        if found is not None:
            at_once = found.cause == "data" and found.share > NAMED_AT_ONCE
            # Another cause of a rank that was named already needs to be seen for longer.
            known = named is not None and named.rank == found.rank
            if at_once or len(self._seen) >= IN_A_ROW[found.cause] * (1 + known):
                self.named, self._without = found, 0
                return found
        self._without += 1
        if named is not None and self._without >= FORGOTTEN:
            self.named = None
        return None

    def _next(self, table: RankTable, found: SlowRank | None) -> Probes:
        """What to try next: only what can tell causes apart that were not named yet."""
        new = found is not None and (self.named is None or self.named[:2] != found[:2])
        if found is not None and found.cause in ("compute", "memory"):
            return Probes(processor=new and self._processor_in <= 0)
        if found is not None and found.cause == "network" and new:
            return Probes(links=True)
        others = found is None or found.cause == "network"
        several = len(set(table.hosts)) > 2
        return Probes(links=others and several and _all_wait(table) and self._links_in <= 0)


def _all_wait(table: RankTable) -> bool:
    """Whether even the last rank waits long, so that it is communication that takes the time."""
    return bool(table.columns["waiting"].min() > ALL_WAIT * table.wall)


def line(slow: SlowRank, hosts: Sequence[Any]) -> str:
    """What the log says of a slow rank."""
    return (
        f"rank {slow.rank} ({hosts[slow.rank]}) is slow: {slow.why}; all ranks wait for it "
        f"{time_text(slow.seconds)} per step ({100 * slow.share:.0f} %)"
    )
