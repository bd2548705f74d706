"""`hpc-train plan`: how long ranks wait, and how much memory they need, under each schedule.

All of it follows from the configuration; no rank, tensor or device is needed. Memory is an
estimate. It counts parameters, gradients, optimizer state, and what blocks keep for their backward
pass. For the layouts of a job it also counts the buffers of `planning.buffers`. It does not count
tensors that are held for a moment only, and the memory of libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from hpc_train.config import GradientsSection, ParallelSection, RunConfig
from hpc_train.errors import ConfigError
from hpc_train.models.shape import PartCost, Shape
from hpc_train.parallel.divide import divide
from hpc_train.parallel.schedule import Name, Schedule, build
from hpc_train.parallel.simulate import Costs, bubble_formula, peak_live, simulate
from hpc_train.planning.buffers import buffer_bytes
from hpc_train.planning.model import division_of, planned_shape, trained_parameters
from hpc_train.planning.state import Dividing, state_bytes

WHOLE_STATE = Dividing()
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SUMMED_BYTES = 4  # of a number in a bucket, at least
OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 1}  # per parameter: two moments; the momentum


@dataclass(frozen=True)
class Estimate:
    """The costs of a step under one schedule.

    Args:
        schedule: name of the schedule.
        virtual_stages: virtual stages of each rank.
        chosen: whether the configuration asks for this schedule.
        bubble: share of the ranks' time in which they wait, with the costs of the actual stages.
        bubble_even: the same share if all stages cost the same.
        peak_live: (micro-batch, virtual stage) pairs held at once on the rank that holds most.
        activation_bytes: bytes that the rank that needs most memory keeps for backward passes.
        state_bytes: bytes of that rank's parameters, gradients and optimizer state.
        host_bytes: bytes of its share of the node's memory, if the state is there and not with the
            parameters (memory.offload optimizer); state_bytes are those on the GPU then.
        layers: number of blocks in each virtual stage.
    """

    schedule: Name
    virtual_stages: int
    chosen: bool
    bubble: float
    bubble_even: float
    peak_live: int
    activation_bytes: int
    state_bytes: int
    host_bytes: int
    layers: list[int]


@dataclass(frozen=True)
class Plan:
    """All schedules for one layout, without those that need more layers than the model has.

    `sizes` are those that follow from the data, in words. The note says how activations are
    counted.
    """

    dp: int
    tp: int
    pp: int
    micro_batch: int
    micro_batches: int
    sizes: str
    schedules: list[Estimate]
    note: str


def plan(config: RunConfig) -> Plan:
    """Estimate every schedule for a configuration's layout. Without parallel.dp, dp is 1.

    Raises:
        ConfigError: the vocabulary size is not known, or the layout cannot divide the batch, the
            heads, the vocabulary or the layers.
    """
    shape, section = planned_shape(config), config.parallel
    shape.check(division_of(section))
    micro_batch, micro_batches = micro_batching(config)
    parts = len(shape.parts())
    fit = [
        name for name in get_args(Name) if section.pp * virtual_stages_of(section, name) <= parts
    ]
    return Plan(
        section.dp or 1,
        section.tp,
        section.pp,
        micro_batch,
        micro_batches,
        shape.described,
        [estimate(config, shape, name, micro_batch, micro_batches) for name in fit],
        shape.NOTE,
    )


def micro_batching(config: RunConfig) -> tuple[int, int]:
    """Samples of a micro-batch, and number of micro-batches that a pipeline computes per step.

    Raises:
        ConfigError: the batch is not a multiple of dp x micro-batch.
    """
    return micro_batches_of(
        config.data.batch, config.parallel.dp or 1, config.data.samples_at_a_time
    )


def micro_batches_of(batch: int, dp: int, given: int | None) -> tuple[int, int]:
    """`micro_batching` of a batch, a data-parallel size, and a micro-batch if one is given.

    Raises:
        ConfigError: as `micro_batching`.
    """
    size = given or max(1, batch // dp)
    if batch % (dp * size):
        raise ConfigError(
            f"data.batch {batch} is not divisible by parallel.dp {dp}"
            + f" x data.micro_batch {size}" * bool(given),
            "give a multiple of their product" if given else "give a multiple of it",
        )
    return size, batch // dp // size


def sizes_that_divide(samples: int) -> list[int]:
    """Sizes of micro-batches that divide a replica's samples: powers of two, and all samples."""
    powers = {1 << power for power in range(samples.bit_length())}
    return sorted(part for part in {*powers, samples} if samples % part == 0)


def virtual_stages_of(section: ParallelSection, name: Name) -> int:
    """Virtual stages per rank that a schedule would have under this configuration."""
    return (section.virtual_stages or 2) if name == "interleaved" else 1


def estimate(
    config: RunConfig, shape: Shape, name: Name, micro_batch: int, micro_batches: int
) -> Estimate:
    """Estimate one schedule."""
    pp, virtual_stages = config.parallel.pp, virtual_stages_of(config.parallel, name)
    costs = [part.weights for part in shape.parts()]
    runs = divide(costs, pp * virtual_stages)
    schedule = build(name, pp, micro_batches, virtual_stages)
    timing = simulate(
        schedule, virtual_stages, [Costs(cost, cost, cost) for cost in _sums(costs, runs)]
    )
    by = Dividing(zero=1, staged=True) if config.memory.staged else WHOLE_STATE
    needs = max(memory(config, shape, schedule, runs, micro_batch, by), key=lambda need: need.own)
    return Estimate(
        schedule=name,
        virtual_stages=virtual_stages,
        chosen=name == config.parallel.schedule,
        bubble=timing.bubble,
        bubble_even=bubble_formula(name, pp, micro_batches, virtual_stages),
        peak_live=max(timing.peak_live),
        activation_bytes=needs.activations,
        state_bytes=needs.state,
        host_bytes=needs.host,
        layers=[sum(0 < module <= shape.layers for module in run) for run in runs],
    )


class RankBytes(NamedTuple):
    """The memory that a rank needs.

    Args:
        activations: bytes of its activations at their peak.
        state: bytes of its state; if that is staged, of what is on its GPU.
        host: bytes that it needs of its node's memory if it computes on a GPU: its staged state, or
            the gradients that are summed there, and buffers.
        buffers: bytes of its buffers if it computes on a processor.
    """

    activations: int
    state: int
    host: int = 0
    buffers: int = 0

    @property
    def on_gpu(self) -> int:
        """Bytes of the GPU, if it computes on one."""
        return self.activations + self.state

    @property
    def own(self) -> int:
        """Bytes of its node's memory, if it computes on a processor."""
        return self.on_gpu + self.buffers


def memory(
    config: RunConfig,
    shape: Shape,
    schedule: Schedule,
    runs: Sequence[range],
    micro_batch: int,
    by: Dividing = WHOLE_STATE,
    held: float = 1.0,
) -> list[RankBytes]:
    """The memory that each pipeline rank needs.

    Args:
        config: layout, number format and optimizer.
        shape: the sizes of the model.
        schedule: the actions of each rank.
        runs: indices of embedding, blocks and head in each virtual stage; run c * pp + r is virtual
            stage c of rank r.
        micro_batch: samples of a micro-batch.
        by: how replicas divide the state.
        held: the micro-batches that are held at once, as a multiple of those of the schedule.
    """
    parts, pp = shape.parts(division_of(config.parallel)), len(schedule)
    item, parameter = (
        ITEM_BYTES[config.precision.dtype],
        ITEM_BYTES[config.precision.parameters],
    )
    costs = [part.in_bytes(item, micro_batch, config.parallel.tp) for part in parts]
    each = shape.kept(costs, config.memory.recompute)
    seen = 0 if config.data.across_documents else shape.tokens**2  # the tokens that a token sees
    kept = [its + item * micro_batch * seen for its in _sums(each, runs)]
    # While a block's backward pass runs, the block has all of its activations, and those after it
    # have none any more.
    again = [
        _more_in_backward(costs[run.start : run.stop], each[run.start : run.stop]) for run in runs
    ]
    offloaded = config.memory.offload != "none" and not config.memory.staged
    moments = 0 if offloaded else OPTIMIZER_TENSORS[config.optimizer.name]
    trained, frozen = trained_parameters(config, shape, parts)
    mine = [[i for run in runs[rank::pp] for i in run] for rank in range(pp)]
    stages, left = ([[of[i] * parameter for i in its] for its in mine] for of in (trained, frozen))
    tensors = 1 + OPTIMIZER_TENSORS[config.optimizer.name]
    whole = parameter * (tensors * sum(trained) + sum(frozen))  # of all pipeline ranks
    written = whole / pp / (config.parallel.dp or 1)
    found = []
    for rank, actions in enumerate(schedule):
        live = held * peak_live(actions, kept[rank::pp]) + max(again[rank::pp])
        state = state_bytes(stages[rank], moments, by, left[rank])
        wider = max(parameter, SUMMED_BYTES) / parameter
        more = buffer_bytes(config, wider * sum(stages[rank]), written, by)
        beside = share_in_node(config.gradients, by) * wider * state.gradients
        device, host = (state.on_gpu, state.total) if by.staged else (state.total, beside)
        if config.gradients.engine == "nccl":
            device += more.mean
        host += more.residual + more.copied  # the mean is where gradients are counted
        found.append(RankBytes(round(live), round(device), round(host), round(sum(more))))
    return found


def share_in_node(gradients: GradientsSection, by: Dividing) -> float:
    """The share of a rank's gradients that is summed in its node's memory, if it is on a GPU."""
    if gradients.engine == "nccl":  # a part for each rank, if MPI sums between nodes
        return 1 / by.ranks if by.nodes > 1 and gradients.two_level != "off" else 0.0
    return float(gradients.engine != "horovod" and by.nodes * by.ranks > 1)


def _more_in_backward(parts: Sequence[PartCost], kept: Sequence[float]) -> float:
    """By how much recomputed activations exceed, at their peak, what a run of parts has kept."""
    most = total = 0.0
    for part, its in zip(parts, kept, strict=True):
        if its < part.activations:
            most = max(most, total + part.activations + part.gradients)
        total += its
    return max(0.0, most - total)


def _sums(values: Sequence[float], runs: Sequence[range]) -> list[float]:
    return [sum(values[run.start : run.stop]) for run in runs]
