"""What `hpc-train info collectives` has measured, and the bandwidths that follow.

Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there). The size S is that
of the largest buffer of a rank: a tensor that is summed or broadcast, the whole that an allgather
makes, the whole that a reduce-scatter begins with. The algorithm bandwidth is S / t. The bus
bandwidth is what the slowest link has to carry for it in any algorithm. It does not depend on the
number of ranks, so it can be compared with the data sheet of a link. Latencies are measured as in
the OSU micro-benchmarks: that of a ping-pong is half of a message's time there and back.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

OperationName = str

ALLREDUCE, BROADCAST, ALLGATHER = "allreduce", "broadcast", "allgather"
REDUCE_SCATTER, PING_PONG, BARRIER = "reduce_scatter", "ping_pong", "barrier"
OPERATIONS = (PING_PONG, BARRIER, ALLREDUCE, BROADCAST, ALLGATHER, REDUCE_SCATTER)
INSIDE, ACROSS, ALL = "inside", "across", "all"
SCOPES = {
    INSIDE: "inside a node",
    ACROSS: "across nodes",
    ALL: "over all ranks",
}
BARE, MPI, SHARED, RING, HALVING = "bare", "mpi", "shared", "ring", "halving"
PIPELINE, HOROVOD = "pipeline", "horovod"
# What the words of --implementations stand for.
IMPLEMENTATIONS = {
    BARE: "bare MPI, called through mpi4py",
    MPI: "hpc_train's collectives over MPI",
    SHARED: "hpc_train's sums in the shared memory of a node",
    RING: "hpc_train's ring between nodes; over all ranks with shared memory inside nodes",
    HALVING: "hpc_train's recursive halving between nodes, likewise",
    PIPELINE: "hpc_train's messages between the stages of a pipeline",
    HOROVOD: "Horovod, through hpc_train's collectives",
}


@dataclass(frozen=True)
class CollectiveFigure:
    """The times of one operation of one implementation at one size.

    The time of a repeat is that of the slowest rank, from a barrier on.

    Args:
        scope: which ranks take part, a key of SCOPES.
        operation: one of OPERATIONS.
        implementation: a key of IMPLEMENTATIONS.
        ranks: number of ranks; inside nodes those of the largest node.
        nbytes: the size S in bytes; 0 for a barrier.
        seconds: median of the repeats; for a ping-pong half of the time there and back.
        least, low, high: the smallest time, and the lower and the upper quartile, in seconds.
        repeats: number of repeats that count.
    """

    scope: str
    operation: OperationName
    implementation: str
    ranks: int
    nbytes: int
    seconds: float
    least: float
    low: float
    high: float
    repeats: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, S / t."""
        return self.nbytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that the slowest link carries."""
        return self.algorithm_bandwidth * bus_factor(self.operation, self.ranks)

    @property
    def scatter(self) -> float:
        """Half of the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.seconds

    def as_row(self) -> dict[str, Any]:
        """All numbers by name, in seconds, bytes and bytes per second."""
        return {name: getattr(self, name) for name in FIGURE_COLUMNS}


FIGURE_COLUMNS = (
    *(one.name for one in fields(CollectiveFigure)),
    "algorithm_bandwidth",
    "bus_bandwidth",
)


def bus_factor(operation: OperationName, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth, by nccl-tests."""
    if operation == ALLREDUCE:
        return 2 * (ranks - 1) / ranks
    if operation in (ALLGATHER, REDUCE_SCATTER):
        return (ranks - 1) / ranks
    return 1.0


def figure_of(
    case: tuple[str, OperationName, str], ranks: int, nbytes: int, times: Sequence[float]
) -> CollectiveFigure:
    """The figure of one case.

    Args:
        case: its scope, operation and implementation.
        ranks: number of ranks.
        nbytes: the size.
        times: seconds of each repeat, one or more.
    """
    share = 0.5 if case[1] == PING_PONG else 1.0
    taken = [share * seconds for seconds in times]
    quartiles = (
        statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
    )
    low, middle, high = quartiles
    return CollectiveFigure(*case, ranks, nbytes, middle, min(taken), low, high, len(taken))


def elements(operation: OperationName, nbytes: int, ranks: int) -> int:
    """The number of float32 elements of a size; 0 if it is too small for these ranks.

    What is gathered or scattered has as many elements for each rank, so it may be a little smaller.
    """
    count = nbytes // 4
    return count - count % ranks if operation in (ALLGATHER, REDUCE_SCATTER) else count


def to_csv(figures: Sequence[CollectiveFigure]) -> str:
    """The figures as a table with one row for each, in seconds, bytes and bytes per second."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(FIGURE_COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(figure.as_row() for figure in figures)
    return text.getvalue()
