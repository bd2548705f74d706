"""The layouts dp x tp x pp that a job can have, where their ranks run, and the memory they need."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hpc_train.config import ParallelSection, RunConfig
from hpc_train.config.spread import Recompute, Zero
from hpc_train.errors import ConfigError, size_text
from hpc_train.models.shape import PartCost, Shape
from hpc_train.mpi.placement import place
from hpc_train.mpi.topology import Topology
from hpc_train.parallel.divide import divide
from hpc_train.parallel.schedule import Name, build
from hpc_train.parallel.simulate import enough
from hpc_train.planning.machine import Machine
from hpc_train.planning.model import division_of
from hpc_train.planning.schedules import memory, micro_batching, sizes_that_divide
from hpc_train.planning.state import Dividing

GIB = 1 << 30


class Needs(NamedTuple):
    """The memory that a layout needs.

    Args:
        rank: bytes of the rank that needs most, if ranks compute on processors.
        nodes: bytes of each node's ranks then.
        hosts: bytes of each node beside its GPUs, if ranks compute on GPUs.
        gpu: bytes of the GPU that needs most then.
    """

    rank: int
    nodes: NDArray[np.int64]
    hosts: NDArray[np.int64]
    gpu: int

    def of_rank(self, machine: Machine) -> int:
        """Bytes of the rank that needs most, on this machine."""
        return self.rank if machine.device == "cpu" else self.gpu


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout that a job could have.

    Args:
        config: every key of the layout is set in it: sizes, schedule, micro-batch, memory.zero.
        shape: the sizes of the model.
        node: number of the node that each rank runs on, of shape (dp, pp, tp).

    Raises:
        ConfigError: the model or the batch cannot be divided in this way.
    """

    config: RunConfig
    shape: Shape
    node: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.shape.check(division_of(self.config.parallel))
        micro_batching(self.config)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Data-, tensor- and pipeline-parallel size."""
        dp, pp, tp = self.node.shape
        return dp, tp, pp

    @functools.cached_property
    def runs(self) -> list[range]:
        """The modules of each virtual stage: indices into `parts`."""
        parallel = self.config.parallel
        return divide([part.weights for part in self.parts], parallel.pp * parallel.stages_per_rank)

    @functools.cached_property
    def parts(self) -> list[PartCost]:
        """The costs of embedding, blocks and head."""
        return self.shape.parts(division_of(self.config.parallel))

    @functools.cached_property
    def replicas(self) -> tuple[int, float]:
        """On how many nodes the replicas of a part of the model are, and how many are on each."""
        column = np.sort(self.node, axis=0)
        nodes = 1 + int((np.diff(column, axis=0) != 0).sum(axis=0).max())
        return nodes, len(self.node) / nodes

    @functools.cached_property
    def together(self) -> NDArray[np.int64]:
        """How many replicas of each rank's part of the model are on its node, as `node`."""
        parts = np.arange(self.node[0].size).reshape(self.node[:1].shape)
        place = self.node * parts.size + parts
        return np.bincount(place.ravel())[place]

    @functools.cached_property
    def dividing(self) -> Dividing:
        """How the replicas divide the training state, on a node with the mean number of them."""
        config, (nodes, ranks) = self.config, self.replicas
        return Dividing(
            zero=config.memory.stage,
            scope=config.memory.scope,
            nodes=nodes,
            ranks=ranks,
            passes=micro_batching(config)[1],
            bucket=config.gradients.bucket_bytes,
            staged=config.memory.staged,
        )

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the rank that needs most, and of the node that needs most."""
        needs, staged = self.needs, self.dividing.staged
        of_rank, of_nodes = (needs.gpu, needs.hosts) if staged else (needs.rank, needs.nodes)
        return of_rank, int(of_nodes.max())

    @functools.cached_property
    def needs(self) -> Needs:
        """The memory that it needs."""
        parallel = self.config.parallel
        micro_batch, number = micro_batching(self.config)
        few = enough(parallel.pp, number)[-1]
        # Only gpipe holds more when there are more micro-batches.
        held = number / few if parallel.schedule == "gpipe" else 1.0
        schedule = build(parallel.schedule, parallel.pp, few, parallel.stages_per_rank)
        each = np.zeros((3, *self.node.shape))
        for count in np.unique(self.together).tolist():  # nodes may have different numbers of ranks
            by = replace(self.dividing, ranks=count)
            needs = memory(self.config, self.shape, schedule, self.runs, micro_batch, by, held)
            of_stages = np.array(
                [(need.own, need.host, need.on_gpu) for need in needs],
                dtype=np.float64,  # the needs of absurd sizes are larger than any integer of numpy
            ).T
            each = np.where(self.together == count, of_stages[:, None, :, None], each)
        own, host, on_gpu = each

        def of_nodes(ranks: NDArray[np.float64]) -> NDArray[np.int64]:
            sums = np.bincount(self.node.ravel(), ranks.ravel())
            return np.rint(np.minimum(sums, 1 << 62)).astype(np.int64)

        return Needs(int(own.max()), of_nodes(own), of_nodes(host), int(on_gpu.max()))


@dataclass(frozen=True)
class LeftOut:
    """Sizes of a layout that the job cannot have, and why.

    Args:
        dp, tp, pp: the sizes.
        why: the reason, in words.
        memory_bytes: bytes of the rank that would need most; 0 if memory is not the reason.
    """

    dp: int
    tp: int
    pp: int
    why: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class Options:
    """The values of section memory that layouts are tried with.

    Args:
        zeros: the stages of zero; those above 0 for layouts whose replicas divide something.
        recompute: the values of recompute.
    """

    zeros: Sequence[Zero] = (0,)
    recompute: Sequence[Recompute] = ("none",)


def layouts(
    config: RunConfig, shape: Shape, nodes: int, ranks_per_node: int, options: Options
) -> Iterator[Candidate | LeftOut]:
    """All layouts of a job's ranks, with each schedule, micro-batch and option that they can have.

    Args:
        config: the job's configuration. The layouts keep its data.micro_batch, if it is given, and
            interleaved ones its parallel.virtual_stages. They replace the other keys of section
            parallel, and memory.zero.
        shape: the sizes of the model.
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        options: the values of section memory to try.
    """
    for dp, tp, pp in sizes(nodes * ranks_per_node):
        try:
            sized = replace(config, parallel=ParallelSection(dp=dp, tp=tp, pp=pp))
            shape.check(division_of(sized.parallel))
            micro_batch, number = micro_batching(sized)
        except ConfigError as error:
            yield LeftOut(dp, tp, pp, error.cause)
            continue
        node = node_of_ranks(nodes, ranks_per_node, dp, tp, pp)
        for variant in variants(config, sized.parallel, micro_batch * number, options):
            with suppress(ConfigError):  # too few layers, or tokens that tp does not divide
                layout = Candidate(variant, shape, node)
                if variant.memory.zero == 0 or variant.memory.staged or _divides(layout):
                    yield layout


def _divides(layout: Candidate) -> bool:
    """Whether the layout's replicas divide some of their state."""
    return layout.dividing.optimizing > 1


def sizes(ranks: int) -> list[tuple[int, int, int]]:
    """All (dp, tp, pp) whose product is the number of ranks."""
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    pairs = product(divisors, divisors)
    return [(ranks // (tp * pp), tp, pp) for tp, pp in pairs if ranks % (tp * pp) == 0]


def variants(
    config: RunConfig, sized: ParallelSection, samples: int, options: Options
) -> Iterator[RunConfig]:
    """Configurations with these sizes that pass the configuration's own checks.

    Args:
        config: the job's configuration.
        sized: dp, tp and pp.
        samples: samples of a replica in a step.
        options: as for `layouts`.
    """
    every: tuple[Name, ...] = get_args(Name)
    virtual = {"interleaved": config.parallel.virtual_stages}
    given = config.data.samples_at_a_time
    for schedule, cut, micro_batch, zero, recompute in product(
        every if sized.pp > 1 else every[1:2],
        (False, True) if sized.tp > 1 else (False,),
        [given] if given else sizes_that_divide(samples),
        options.zeros,
        options.recompute,
    ):
        with suppress(ConfigError):
            yield replace(
                config,
                parallel=replace(
                    sized,
                    schedule=schedule,
                    virtual_stages=virtual.get(schedule),
                    sequence_parallel=cut,
                ),
                data=replace(config.data, micro_batch=micro_batch),
                memory=replace(config.memory, zero=zero, recompute=recompute),
            )


@functools.lru_cache(maxsize=256)
def node_of_ranks(nodes: int, ranks_per_node: int, dp: int, tp: int, pp: int) -> NDArray[np.int64]:
    """The node that each rank runs on, of shape (dp, pp, tp), as the package places ranks."""
    ranks = range(nodes * ranks_per_node)
    hosts = tuple(f"node{number}" for number in range(nodes))
    topology = Topology(hosts, tuple(rank // ranks_per_node for rank in ranks), (-1,) * len(ranks))
    return place(topology, dp, tp, pp).ranks // ranks_per_node


def why_too_large(layout: Candidate, machine: Machine) -> str:
    """The reason why a layout does not fit in the machine's memory; "" if it fits."""
    needs = layout.needs
    of_nodes = needs.nodes if machine.device == "cpu" else needs.hosts
    for need, gib, whose in (
        (needs.of_rank(machine), machine.rank_gib, "rank"),
        (int(of_nodes.max()), machine.node_gib, "node"),
    ):
        if gib is not None and need > gib * GIB:
            return f"needs {size_text(need)} of a {whose}'s {size_text(round(gib * GIB))}"
    return ""
