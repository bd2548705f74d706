"""`hpc-train plan --nodes N --ranks_per_node R`: layouts that fit in memory, the fastest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from hpc_train.config import RunConfig
from hpc_train.config.spread import Recompute, Zero
from hpc_train.errors import UserError, plural
from hpc_train.models.shape import Shape
from hpc_train.parallel.schedule import Name
from hpc_train.planning.assumed import Figure
from hpc_train.planning.layouts import Candidate, LeftOut, Options, layouts, why_too_large
from hpc_train.planning.machine import GUIDE, Machine
from hpc_train.planning.model import planned_shape
from hpc_train.planning.predict import StepModel, predict
from hpc_train.planning.schedules import micro_batching

LAYOUT_KEYS = (
    *("parallel.dp", "parallel.tp", "parallel.pp", "parallel.schedule"),
    *("parallel.virtual_stages", "parallel.sequence_parallel"),
    *("data.micro_batch", "memory.zero", "memory.recompute"),
)
ALWAYS_TOLD = {"parallel.dp", "parallel.tp", "parallel.pp", "data.micro_batch", "memory.zero"}


@dataclass(frozen=True)
class Row:
    """A layout with its predicted cost.

    Args:
        dp, tp, pp: its sizes.
        schedule, virtual_stages, sequence_parallel, micro_batch, zero, recompute: the keys of the
            configuration. The schedule matters only for pp above 1.
        step_seconds: seconds of a step.
        samples_per_second, tokens_per_second: of the whole job; tokens are those of text, and None
            for a model of tables.
        memory_bytes: bytes on the rank that needs most.
        bubble, communication: shares of the step, see `predict.Prediction`.
        options: the options that give a training of the configuration this layout.
    """

    dp: int
    tp: int
    pp: int
    schedule: Name
    virtual_stages: int
    sequence_parallel: bool
    micro_batch: int
    zero: int
    recompute: Recompute
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    memory_bytes: int
    bubble: float
    communication: float
    options: str

    @classmethod
    def of(cls, layout: Candidate, machine: Machine, given: RunConfig) -> Row:
        """Predict a layout of the given configuration."""
        config, prediction = layout.config, predict(layout, machine)
        parallel, samples = config.parallel, config.data.batch / prediction.seconds
        dp, tp, pp = layout.sizes
        return cls(
            dp,
            tp,
            pp,
            parallel.schedule,
            parallel.stages_per_rank,
            parallel.sequence_parallel,
            micro_batching(config)[0],
            config.memory.stage,
            config.memory.recompute,
            prediction.seconds,
            samples,
            samples * layout.shape.tokens if config.model.is_language else None,
            layout.needs.of_rank(machine),
            prediction.bubble,
            prediction.communication,
            _options(config, given),
        )


def _options(config: RunConfig, given: RunConfig) -> str:
    """The options with which the given configuration has the layout of `config`."""
    words = []
    for key in LAYOUT_KEYS:
        value, asked = map(attrgetter(key), (config, given))
        if key in ALWAYS_TOLD or value != asked:
            words.append(f"--{key} {'null' if value is None else str(value).lower()}")
    return " ".join(words)


@dataclass(frozen=True)
class Choice:
    """The layouts of a job.

    Args:
        nodes, ranks_per_node: the job's size.
        fit: number of layouts that fit in memory.
        layouts: the fastest of them, the fastest first.
        left_out: sizes dp x tp x pp without a layout that fits.
        warning: how the measured job differs from this one; "" if it does not.
        figures: where the machine's figures come from, if it has no description.
    """

    nodes: int
    ranks_per_node: int
    fit: int
    layouts: list[Row]
    left_out: list[LeftOut]
    warning: str = ""
    figures: list[Figure] = field(default_factory=list)


def choose(
    config: RunConfig,
    machine: Machine,
    nodes: int,
    ranks_per_node: int,
    *,
    top: int = 10,
    every: bool = False,
) -> Choice:
    """Predict all layouts of a job that fit in memory.

    Args:
        config: the training.
        machine: where it will run.
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        top: largest number of layouts to return.
        every: return all schedules, micro-batches and options of each dp x tp x pp, not only the
            fastest.

    Raises:
        UserError: nothing fits, or the description lacks what the job needs.
    """
    check_known(config, machine, nodes, ranks_per_node)
    shape = check_size(config, nodes, ranks_per_node)
    timed: list[tuple[float, int, Candidate]] = []
    left_out: list[LeftOut] = []
    for options in memory_options(config, machine):
        left_out = []
        for found in layouts(config, shape, nodes, ranks_per_node, options):
            if isinstance(found, LeftOut):
                left_out.append(found)
                continue
            needed = found.needs.of_rank(machine)
            if why := why_too_large(found, machine):
                left_out.append(LeftOut(*found.sizes, why, needed))
            else:
                timed.append((StepModel(found, machine).seconds(), needed, found))
        if timed:
            break
    else:
        raise nothing_fits(nodes * ranks_per_node, left_out)
    ordered = [layout for _, _, layout in sorted(timed, key=lambda one: one[:2])]
    best = {layout.sizes: layout for layout in reversed(ordered)}
    shown = ordered if every else [layout for layout in ordered if best[layout.sizes] is layout]
    rows = [Row.of(layout, machine, config) for layout in shown[:top]]
    without = [one for one in least(left_out) if (one.dp, one.tp, one.pp) not in best]
    warning = another_job(machine, ranks_per_node)
    return Choice(nodes, ranks_per_node, len(shown), rows, without, warning)


def memory_options(config: RunConfig, machine: Machine) -> Iterator[Options]:
    """The values of section memory to try, and those to try if nothing fits with the first."""
    given = config.memory.recompute
    shared = machine.device == "cpu"
    zeros: tuple[Zero, ...] = (0, 1, 2, 3) if shared else (0,)
    if config.memory.staged:
        zeros = (1, 2)
    yield Options(tuple(zero for zero in zeros if zero < 2), (given,))
    yield Options(
        zeros,
        ("none", "selective", "full") if given == "none" else (given,),
    )


def check_size(config: RunConfig, nodes: int, ranks_per_node: int) -> Shape:
    """Check that so many ranks can share a training; returns the shape of its model.

    Raises:
        UserError: they cannot, or the model's vocabulary is not known.
    """
    shape = planned_shape(config)
    most = config.data.batch * shape.most_ranks
    if nodes * ranks_per_node > most:
        raise UserError(
            f"{nodes * ranks_per_node} ranks are too many: {most} at most can share this training, "
            "by samples of a batch, heads, and layers with embedding and head",
            "plan for fewer ranks",
        )
    return shape


def check_known(config: RunConfig, machine: Machine, nodes: int, ranks_per_node: int) -> None:
    """Check that a description has what a job needs.

    Raises:
        UserError: it does not; the message names what is missing.
    """
    dtype = config.precision.dtype
    if dtype not in machine.compute:
        raise UserError(
            f"the machine description has no compute.{dtype}",
            f"it has {', '.join(machine.compute)}: measure it with --precision.dtype {dtype}",
        )
    for needed, link, key, between in (
        (ranks_per_node > 1, machine.inside, "inside", "ranks of a node"),
        (nodes > 1, machine.across, "across", "nodes"),
    ):
        if needed and link is None:
            raise UserError(
                f"the machine description has no messages between {between} ({key})",
                f"measure it on several {between}; {GUIDE}",
            )


def another_job(machine: Machine, ranks_per_node: int) -> str:
    """A warning if the machine was measured with another number of ranks per node; else ""."""
    if machine.ranks_per_node in (None, ranks_per_node):
        return ""
    return (
        f"the machine was measured with {machine.ranks_per_node:.0f} ranks on each node: "
        f"{ranks_per_node} share cores and links in another way"
    )


def least(left_out: Iterable[LeftOut]) -> list[LeftOut]:
    """For each dp x tp x pp, the layout that comes nearest to fitting."""
    found: dict[tuple[int, int, int], LeftOut] = {}
    for one in left_out:
        known = found.setdefault((one.dp, one.tp, one.pp), one)
        if one.memory_bytes < known.memory_bytes:
            found[one.dp, one.tp, one.pp] = one
    return list(found.values())


def nothing_fits(ranks: int, left_out: Sequence[LeftOut]) -> UserError:
    """The error of a job that has no layout."""
    reasons = least(left_out)
    near = min(reasons, key=lambda one: (not one.memory_bytes, one.memory_bytes))
    remedy = "take more nodes, fewer ranks on each, or a smaller data.micro_batch"
    return UserError(
        f"none of {plural(len(reasons), 'layout')} of {plural(ranks, 'rank')} fits: "
        f"dp {near.dp} x tp {near.tp} x pp {near.pp}: {near.why}",
        remedy if near.memory_bytes else "",
    )
