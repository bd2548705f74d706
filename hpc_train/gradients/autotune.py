"""Chooses by measurement how engine mpi sums its buckets, and how large the buckets are."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch.nn import Parameter

from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.coroutines import drive
from hpc_train.collectives.device import DeviceCollectives
from hpc_train.collectives.halving import Halving
from hpc_train.collectives.protocol import reaches
from hpc_train.collectives.ring import Library, Ring
from hpc_train.compression import depends_on_buckets
from hpc_train.errors import SetupError, size_text
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.compression import make_compressor
from hpc_train.gradients.device_sums import DeviceNodeSums, DeviceSums
from hpc_train.gradients.division import Reach
from hpc_train.gradients.options import AveragingOptions, TwoLevel
from hpc_train.gradients.staged_sums import CPU, StagedSums
from hpc_train.gradients.sums import CollectiveSums, LevelSums, Sums
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.times import time_text

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """An object that holds memory or communicators."""

    def close(self) -> None:
        """Release them. Collective."""


MakeSums = Callable[[Sequence[Bucket]], Sums]
ClosableT = TypeVar("ClosableT", bound=Closable)

USUAL_BUCKET = 4 << 20  # bytes; also the size that the ways are compared with
SMALLEST_BUCKET, LARGEST_BUCKET = 1 << 19, 64 << 20
LARGEST_SHARE = 32  # pooled buckets are at most this part of all gradients; planning.state has it
SMALL_TRIAL = 1 << 18
TRIALS = 3
# A message of our ring takes 21 us (docs/scaling.md), and a ring of n ranks sends 2 (n - 1) of them
# one after the other. With 256 ranks they take 11 ms. In that time a link of 6 Gbit/s carries a
# bucket there and back, so a larger ring is not tried.
RING_TRIED = 256
# Compressed buckets are smaller, so the latency of the messages outweighs them with fewer nodes.
RING_COMPRESSED = 8
BETTER = 0.9  # the usual way is kept unless another one takes less than this part of its time


def ways(levels: Levels, collectives: Collectives, two_level: TwoLevel) -> dict[str, MakeSums]:
    """The ways to sum buckets in host memory, by name, the usual one first.

    A ring of more than RING_TRIED ranks is left out.

    Args:
        levels: the ranks by nodes.
        collectives: connect the same ranks.
        two_level: "on" returns the ways in which the ranks of a node sum in shared memory and only
            the node's sum crosses the network. "off" returns those in which every rank communicates
            for itself. "auto" returns both.
    """
    flat = Levels.flat(levels.whole)
    if levels.nodes == 1 and two_level != "off":
        return {"shared memory": lambda buckets: LevelSums(levels, buckets, None)}

    def cross(kind: type[Ring]) -> Ring | None:
        return kind(levels.cross) if levels.owns else None

    found: dict[str, MakeSums] = {
        "two levels, ring": lambda buckets: LevelSums(levels, buckets, cross(Ring)),
        "two levels, MPI": lambda buckets: LevelSums(levels, buckets, cross(Library)),
        "ring": lambda buckets: LevelSums(flat, buckets, Ring(flat.cross)),
        "MPI": lambda buckets: CollectiveSums(collectives, buckets),
    }
    left_out = {
        *(("two levels, ring", "two levels, MPI") if two_level == "off" else ()),
        *(("ring", "MPI") if two_level == "on" else ()),
        *(("two levels, ring",) if levels.nodes > RING_TRIED else ()),
        *(("ring",) if flat.nodes > RING_TRIED else ()),
    }
    return {name: make for name, make in found.items() if name not in left_out}


def fastest(group: Group, ways: Mapping[str, MakeSums], device: torch.device = CPU) -> str:
    """The name of the way that sums a bucket on a device in the least time. Collective.

    The first way is chosen unless another one is clearly faster (`BETTER`).
    """
    if len(ways) == 1:
        return next(iter(ways))
    times = {n: bucket_seconds(group, make, USUAL_BUCKET, device) for n, make in ways.items()}
    first, best = next(iter(ways)), min(times, key=times.__getitem__)
    chosen = best if times[best] < BETTER * times[first] else first
    if group.rank == 0:
        shown = ", ".join(f"{name} {time_text(took)}" for name, took in times.items())
        logger.info("gradients are averaged by %s (4 MiB take: %s)", chosen, shown)
    return chosen


def bucket_size(group: Group, make: MakeSums, total: int, device: torch.device = CPU) -> int:
    """The bucket size in bytes for which averaging costs least. Collective.

    The sum of a bucket of b bytes takes a + b / r seconds: a latency, and a time at r bytes per
    second. There are total / b buckets, and each costs its latency. Only the last one's b / r
    cannot overlap with the backward pass. The cost a total / b + b / r is least for
    b^2 = a r total.

    Args:
        group: the ranks.
        make: makes the sums.
        total: bytes of all gradients.
        device: the gradients' device.

    Returns:
        SMALLEST_BUCKET to LARGEST_BUCKET; the same number on all ranks.
    """
    small = bucket_seconds(group, make, SMALL_TRIAL, device)
    large = bucket_seconds(group, make, USUAL_BUCKET, device)
    # The bounds keep both numbers positive where noise exceeds the difference of the two times.
    per_byte = max(large - small, 0.1 * large) / (USUAL_BUCKET - SMALL_TRIAL)
    latency = max(small - SMALL_TRIAL * per_byte, 1e-6)
    best = math.sqrt(latency / per_byte * total)
    return int(min(max(best, SMALLEST_BUCKET), LARGEST_BUCKET))


def bucket_seconds(group: Group, make: MakeSums, nbytes: int, device: torch.device = CPU) -> float:
    """Seconds that the sum of a bucket on a device takes. Collective.

    Each of TRIALS trials takes as long as its slowest rank, and the shortest one counts. All ranks
    get the same number.
    """
    trial = torch.empty(nbytes // 4, device=device)
    sums = make([Bucket([Parameter(trial, requires_grad=False)])])
    times = []
    for _ in range(1 + TRIALS):  # the first one opens connections and touches memory: not counted
        group.barrier()
        begin = time.perf_counter()
        with group.waiting("a trial of gradient averaging"):
            drive(sums.begin(0), polite=True)
        times.append(group.largest(int(1e9 * (time.perf_counter() - begin))))
    sums.close()
    return min(times[1:]) / 1e9


def made_on_all_nodes(group: Group, make: Callable[[], ClosableT]) -> ClosableT:
    """The result of `on_all_nodes`; if one node fails, all ranks raise. Collective."""
    made, failure = on_all_nodes(group, make)
    if failure is not None:
        raise failure
    assert made is not None
    return made


def chosen_bucket_bytes(
    group: Group, make: MakeSums, trained: Sequence[Parameter], options: AveragingOptions
) -> int:
    """The size of buckets, in bytes: the option's, or the one that is measured best. Collective.

    It is not measured if the result depends on it.
    """
    if options.bucket_bytes is not None:
        return options.bucket_bytes
    if options.deterministic or depends_on_buckets(options.compression):
        return USUAL_BUCKET
    total = sum(parameter.nbytes for parameter in trained)
    size = bucket_size(group, make, total, CPU if options.staged else trained[0].device)
    if options.zero > 1:  # a pool of large buckets would take what dividing the gradients saves
        size = min(size, max(USUAL_BUCKET, total // LARGEST_SHARE))
    if group.rank == 0:
        logger.info("gradient buckets of %s", size_text(size))
    return size


def way(
    levels: Levels, options: AveragingOptions, device: torch.device
) -> tuple[MakeSums, list[Callable[[], None]]]:
    """Choose how buckets on a device are summed. Collective.

    Buckets on a GPU are summed in host memory by the same ways as those of processors, or by
    collectives that read the GPU's memory, if there are any.

    Returns:
        A function that makes the sums, and functions to call when no more are needed.
    """
    group = levels.whole
    if options.compression != "none":
        level = Levels.flat(group) if options.two_level == "off" else levels
        if level.nodes == 1 and group.rank == 0:
            logger.info("gradients.compression has nothing to do: all ranks are on one node")

        def packed(buckets: Sequence[Bucket]) -> Sums:
            return made_on_all_nodes(group, lambda: compressed(level, buckets, options.compression))

        return staged(packed, device, whole=True), []
    collectives = connect(group, purpose="gradient")
    there = {
        name: staged(or_collectives(group, make, collectives), device)
        for name, make in ways(levels, collectives, options.two_level).items()
    }
    closing: list[Callable[[], None]] = []
    if options.two_level != "on" and group.smallest(int(reaches(device))):
        on_device = connect(group, device, overlap=options.spare_core, purpose="gradient")
        early = on_device.overlaps
        there["GPU memory"] = lambda buckets: CollectiveSums(on_device, buckets, early=early)
        closing = [on_device.close]
    if options.deterministic:
        return next(iter(there.values())), closing
    return there[fastest(group, there, device)], closing


def device_way(
    levels: Levels, options: AveragingOptions, device: torch.device
) -> tuple[MakeSums, list[Callable[[], None]]]:
    """Choose how engine nccl sums buckets on GPUs, which are claimed. Collective.

    Returns:
        As `way`.

    Raises:
        SetupError: the GPUs cannot be connected, or a node has too little shared memory.
    """
    group = levels.whole
    alike = levels.nodes > 1 and 1 < levels.owners == group.largest(levels.node.size)
    two = alike and options.two_level != "off"
    opened: dict[str, DeviceCollectives] = {}
    found: dict[str, MakeSums] = {}
    if not two or options.two_level == "auto":
        opened["NCCL"] = everyone = DeviceCollectives(group, device)
        found["NCCL"] = lambda buckets: DeviceSums(everyone, buckets)
    if two and not (found and options.deterministic):
        name = "NCCL in nodes, MPI between them"
        opened[name] = inside = made_on_all_nodes(
            group, lambda: DeviceCollectives(levels.node, device)
        )
        kind = Ring if levels.nodes <= RING_TRIED else Library
        found[name] = lambda buckets: made_on_all_nodes(
            group, lambda: DeviceNodeSums(levels, inside, buckets, kind(levels.cross))
        )
    chosen = fastest(group, found, device)
    for name, gpus in opened.items():
        if name != chosen:
            gpus.close()
    return found[chosen], [opened[chosen].close]


def staged(make: MakeSums, device: torch.device, *, whole: bool = False) -> MakeSums:
    """The same way of summing for buckets on a device, which are copied to host memory and back."""
    return make if device.type == "cpu" else lambda some: StagedSums(some, make, whole=whole)


def compressed(
    levels: Levels, buckets: Sequence[Bucket], compression: str, reach: Sequence[Reach] = ()
) -> LevelSums:
    """Sums in two levels, compressed between nodes. Collective.

    Args:
        levels: the ranks by nodes.
        buckets: to be summed.
        compression: a value of `gradients.compression`.
        reach: as for `LevelSums`.
    """
    return LevelSums(levels, buckets, ring_of(levels), make_compressor(compression), reach)


def compressed_cross(nodes: int) -> type[Ring]:
    """The class that sums compressed buckets over this number of nodes.

    It is never `Library`, because MPI's own sums have no 16-bit floats.
    """
    return Ring if nodes <= RING_COMPRESSED else Halving


def ring_of(levels: Levels) -> Ring | None:
    """The ring over nodes; None on one node, and for ranks that own no part. Collective."""
    kind = compressed_cross(levels.nodes)
    return kind(levels.cross) if levels.nodes > 1 and levels.owns else None


def or_collectives(group: Group, make: MakeSums, collectives: Collectives) -> MakeSums:
    """The same way of summing, which falls back to the collectives if memory cannot be shared."""
    shared = True

    def made(buckets: Sequence[Bucket]) -> Sums:
        nonlocal shared
        if shared:
            sums, failure = on_all_nodes(group, lambda: make(buckets))
            if sums is not None:
                return sums
            shared = False
            if group.rank == 0:
                logger.warning(
                    "%s; gradients are averaged by MPI's own sums, which are slower", failure
                )
        return CollectiveSums(collectives, buckets)

    return made


def on_all_nodes(
    group: Group, make: Callable[[], ClosableT]
) -> tuple[ClosableT | None, SetupError | None]:
    """Call `make` on every rank; if it fails on one node, all ranks go without. Collective.

    Args:
        group: the ranks of all nodes.
        make: collective over the ranks of a node; it raises SetupError on all of them or on none.

    Returns:
        What `make` returned, and None; or None and the error on all ranks if it failed on any node.
        Objects that other nodes had made are closed then.

    Raises:
        HpcTrainError: `make` failed otherwise on some rank.
    """
    failure: Exception | None = None
    made: ClosableT | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001  # the other nodes must hear of any error
        failure = error
    try:
        settle(group, failure)
    except SetupError as error:
        if made is not None:
            made.close()
        return None, error
    return made, None
