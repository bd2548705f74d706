"""`hpc-train plan`: how long ranks wait and what they hold under each pipeline schedule.

All of it follows from the configuration; no rank, tensor or device is needed. Memory is an
estimate: parameters, gradients and optimizer state, and what the blocks keep for their backward
pass; not what is held for a moment only, nor what libraries take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hpc_train.config import ModelSection, ParallelSection, RunConfig
from hpc_train.data import manifest as manifests
from hpc_train.errors import ConfigError, DataError
from hpc_train.parallel.divide import divide
from hpc_train.parallel.schedule import Name, Schedule, build
from hpc_train.parallel.simulate import Costs, bubble_formula, peak_live, simulate

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 1}  # per parameter: two moments; the momentum


@dataclass(frozen=True)
class Estimate:
    """What a step comes to under one schedule.

    Args:
        schedule: its name.
        virtual_stages: runs of layers per rank.
        chosen: whether the configuration asks for it.
        bubble: share of the ranks' time in which they wait, with the stages' own costs.
        bubble_even: the same if the stages were equal.
        peak_live: (micro-batch, virtual stage) pairs held at once on the rank that holds most.
        activation_bytes: what the rank that needs most memory keeps for backward passes.
        state_bytes: its parameters, gradients and optimizer state.
        layers: blocks of each virtual stage of the model.
    """

    schedule: Name
    virtual_stages: int
    chosen: bool
    bubble: float
    bubble_even: float
    peak_live: int
    activation_bytes: int
    state_bytes: int
    layers: list[int]


@dataclass(frozen=True)
class Plan:
    """All schedules for one layout; those that the layers are too few for are left out."""

    dp: int
    tp: int
    pp: int
    micro_batch: int
    micro_batches: int
    vocab: int
    schedules: list[Estimate]


def plan(config: RunConfig) -> Plan:
    """Estimate every schedule for a configuration's layout; without parallel.dp, for dp 1.

    Raises:
        ConfigError: the vocabulary is not known, or the batch, the heads, the vocabulary or the
            layers cannot be divided as the layout asks.
    """
    vocab = vocabulary(config)
    section = config.parallel
    check_layout(config.model, vocab, section)
    micro_batch, micro_batches = micro_batching(config)
    modules = config.model.layers + 2
    fit = [name for name in get_args(Name) if section.pp * chunks_of(section, name) <= modules]
    schedules = [estimate(config, vocab, name, micro_batch, micro_batches) for name in fit]
    return Plan(
        section.dp or 1, section.tp, section.pp, micro_batch, micro_batches, vocab, schedules
    )


def vocabulary(config: RunConfig) -> int:
    """The vocabulary's size: model.vocab, or the data's.

    Raises:
        ConfigError: neither is given.
    """
    if config.model.vocab is not None:
        return config.model.vocab
    if config.data.path is None:
        raise ConfigError("the vocabulary is not known", "give model.vocab, or data.path")
    try:
        return manifests.read_manifest(Path(config.data.path)).vocab
    except DataError as error:
        raise ConfigError(
            f"the vocabulary is not known: {error.cause}", "give model.vocab"
        ) from None


def check_layout(model: ModelSection, vocab: int, section: ParallelSection) -> None:
    """Check that the model can be divided over the ranks of its tensor and pipeline groups.

    Raises:
        ConfigError: naming what cannot.
    """
    sizes = [("model.heads", model.heads), ("model.vocab", vocab)]
    if section.sequence_parallel:
        sizes.append(("model.sequence", model.sequence))
    for key, size in sizes:
        if size % section.tp:
            raise ConfigError(f"parallel.tp {section.tp} does not divide {key} {size}")
    stages = section.pp * section.chunks
    if stages > model.layers + 2:
        of = f" x {section.chunks} virtual stages" if section.chunks > 1 else ""
        raise ConfigError(
            f"parallel.pp {section.pp}{of} is more than the {model.layers + 2} parts of the model "
            f"(embedding, {model.layers} layers, head)",
            "give fewer, or more layers",
        )


def micro_batching(config: RunConfig) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches that a pipeline computes per step.

    Raises:
        ConfigError: the batch cannot be cut so.
    """
    batch, dp = config.data.batch, config.parallel.dp or 1
    size = config.data.micro_batch or max(1, batch // dp)
    if batch % (dp * size):
        raise ConfigError(
            f"data.batch {batch} is not divisible by parallel.dp {dp} x data.micro_batch {size}",
            "give a multiple",
        )
    return size, batch // dp // size


def chunks_of(section: ParallelSection, name: Name) -> int:
    """Virtual stages per rank that a schedule would have under this configuration."""
    return (section.virtual_stages or 2) if name == "interleaved" else 1


def gpt_costs(layers: int, hidden: int, vocab: int) -> list[float]:
    """What embedding, blocks and head cost: the weights in their matrix products.

    Args:
        layers: number of blocks.
        hidden: width of the residual stream.
        vocab: vocabulary size.

    Returns:
        0 for the embedding, 12 hidden^2 for each block, vocab * hidden for the head.
    """
    return [0.0, *[12.0 * hidden**2] * layers, float(vocab * hidden)]


def gpt_parameters(model: ModelSection, vocab: int, tp: int, pp: int) -> list[int]:
    """Number of parameters of embedding, blocks and head on a rank that has them.

    The ranks of a tensor group share matrices, their first biases and the vocabulary. A tied output
    matrix is stored again where the head is on another rank than the embedding.
    """
    C = model.hidden
    table = vocab * C // tp
    block = (12 * C * C + 7 * C) // tp + 6 * C
    shared = model.tie_embeddings and pp == 1
    return [table + model.sequence * C, *[block] * model.layers, 2 * C + (0 if shared else table)]


def gpt_activations(
    model: ModelSection, vocab: int, tp: int, sequence_parallel: bool
) -> list[float]:
    """Numbers that embedding, blocks and head keep for the backward pass of one sample.

    Korthikanti et al., "Reducing activation recomputation in large transformer models",
    https://arxiv.org/abs/2205.05198, counted for our block in units of tokens * hidden. Whole on
    each rank, or with sequence parallelism cut: two norms' inputs, two linear inputs, two dropout
    masks of full width. Shared over the tensor group: query, key and value 3, attention's result 1,
    the MLP 8. The fused attention keeps no matrix of tokens * tokens. The head: the norm's and the
    product's input, and the logarithms of the softmax.
    """
    T, C = model.sequence, model.hidden
    mask = int(model.dropout > 0)
    across = tp if sequence_parallel else 1
    block = T * C * ((4 + 2 * mask) / across + 12 / tp)
    return [T * C * mask / across, *[block] * model.layers, T * (2 * C / across + vocab / tp)]


def estimate(
    config: RunConfig, vocab: int, name: Name, micro_batch: int, micro_batches: int
) -> Estimate:
    """Estimate one schedule."""
    model, pp = config.model, config.parallel.pp
    chunks = chunks_of(config.parallel, name)
    costs = gpt_costs(model.layers, model.hidden, vocab)
    runs = divide(costs, pp * chunks)
    schedule = build(name, pp, micro_batches, chunks)
    timing = simulate(schedule, chunks, [Costs(cost, cost, cost) for cost in _sums(costs, runs)])
    activation_bytes, state_bytes = max(memory(config, vocab, schedule, runs, micro_batch), key=sum)
    return Estimate(
        schedule=name,
        virtual_stages=chunks,
        chosen=name == config.parallel.schedule,
        bubble=timing.bubble,
        bubble_even=bubble_formula(name, pp, micro_batches, chunks),
        peak_live=max(timing.peak_live),
        activation_bytes=activation_bytes,
        state_bytes=state_bytes,
        layers=[sum(0 < module <= model.layers for module in run) for run in runs],
    )


def memory(
    config: RunConfig,
    vocab: int,
    schedule: Schedule,
    runs: Sequence[range],
    micro_batch: float,
    share: float = 1,
) -> list[tuple[int, int]]:
    """For each pipeline rank, bytes of its activations at their peak and of its state.

    Args:
        config: model, layout, number format and optimizer.
        vocab: vocabulary size.
        schedule: what the ranks do.
        runs: of embedding, blocks and head; run c * pp + r is chunk c of rank r.
        micro_batch: samples.
        share: ranks of a node that share parameters and the optimizer's state (memory.zero).
    """
    section, pp = config.parallel, len(schedule)
    numbers = gpt_activations(config.model, vocab, section.tp, section.sequence_parallel)
    kept = _sums(numbers, runs)
    parameters = _sums(gpt_parameters(config.model, vocab, section.tp, pp), runs)
    activation, parameter = (
        ITEM_BYTES[config.precision.dtype],
        ITEM_BYTES[config.precision.parameters],
    )
    copies = (
        1 + (1 + OPTIMIZER_TENSORS[config.optimizer.name]) / share
    )  # gradient; parameter, state
    return [
        (
            round(peak_live(actions, kept[rank::pp]) * micro_batch * activation),
            round(sum(parameters[rank::pp]) * copies * parameter),
        )
        for rank, actions in enumerate(schedule)
    ]


def _sums(values: Sequence[float], runs: Sequence[range]) -> list[float]:
    return [sum(values[run.start : run.stop]) for run in runs]


def size(number: int) -> str:
    """A number of bytes in MiB, from 1 GiB on in GiB."""
    mib = number / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
