"""A rank's parts of a step in a loop, and what the losses of parts weigh in that of the step."""

from __future__ import annotations

from typing import Any

from hpc_train.data.by_length import PartsByLength
from hpc_train.data.lengths import lengths_of
from hpc_train.data.loader import Part, Step
from hpc_train.data.order import SampleOrder
from hpc_train.errors import ConfigError, DataError, UserError
from hpc_train.gradients.ownership import is_wrapped
from hpc_train.mpi.group import Group

MANY_PASSES = 2  # as a hint: a step has several backward passes, nobody knows how many


def micro_batches(batch: int, ranks: int, rank: int, accumulate: int) -> list[Part]:
    """This rank's parts of a step's batch, one for each backward pass.

    The first parts of all ranks together are the first micro-batch of a single process, and so on.
    So what depends on the samples of a pass, as BatchNorm does, is the same on any number of ranks.

    Args:
        batch: samples per step over the whole job.
        ranks: number of ranks.
        rank: this rank's number.
        accumulate: backward passes per step.

    Raises:
        ConfigError: the batch cannot be cut evenly.
    """
    if accumulate < 1:
        raise ConfigError(f"accumulate is {accumulate}", "give 1 or more")
    unit = ranks * accumulate
    if batch % unit:
        what = f"{ranks} ranks" + (f" x accumulate {accumulate}" if accumulate > 1 else "")
        near = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
        raise ConfigError(
            f"batch {batch} is not divisible by {what}",
            f"nearest that are: {', '.join(map(str, near))}",
        )
    size = batch // unit
    firsts = [(number * ranks + rank) * size for number in range(accumulate)]
    return [Part(range(first, first + size)) for first in firsts]


def parts_of_loop(
    dataset: Any,
    order: SampleOrder,
    group: Group,
    optimizer: Any,
    *,
    accumulate: int,
    most: int | None,
) -> tuple[list[Part] | PartsByLength, list[int]]:
    """This rank's parts of a step in a loop, and the lengths of the first step's samples.

    Args:
        dataset: the data set.
        order: which samples belong to which step.
        group: all ranks of the job.
        optimizer: the optimizer of the loop.
        accumulate: backward passes per step.
        most: largest number of padded tokens of a part; None: parts have equally many samples.

    Returns:
        The parts, or a function of the step that returns them. The lengths are only given with it.

    Raises:
        ConfigError: the batch cannot be cut evenly, or `accumulate` was given together with `most`.
        UserError: the data set has no lengths, or Horovod counts the optimizer's backward passes.
    """
    if most is None:
        parts = micro_batches(order.batch, group.size, group.rank, accumulate)
        _check_passes(optimizer, accumulate)
        return parts, []
    if accumulate != 1:
        raise ConfigError(
            f"accumulate is {accumulate}, but the loop has micro_tokens, and lengths decide how "
            "many micro-batches a step has",
            "leave accumulate out",
        )
    if not hasattr(dataset, "lengths"):
        raise UserError(
            f"micro_tokens is {most}, but the data set has no method lengths",
            "give it one, or leave micro_tokens out",
        )
    if is_wrapped(optimizer):
        raise UserError(
            f"micro_tokens is {most}, but the optimizer was wrapped for a fixed number of backward "
            "passes",
            "give the loop the optimizer itself, or leave micro_tokens out",
        )
    by_length = PartsByLength(dataset, order, most, ranks=group.size, rank=group.rank)
    return by_length, lengths_of(dataset, order.indices(1, 0, order.batch)).tolist()


def _check_passes(optimizer: Any, accumulate: int) -> None:
    """Check that an optimizer of Horovod was wrapped for enough backward passes per step.

    Raises:
        UserError: it was wrapped for fewer than `accumulate`.
    """
    passes = getattr(optimizer, "backward_passes_per_step", accumulate)
    if is_wrapped(optimizer) and passes < accumulate:
        raise UserError(
            f"accumulate is {accumulate}, and the optimizer was wrapped with "
            f"backward_passes_per_step={passes}",
            f"wrap it with backward_passes_per_step={accumulate}",
        )


def loss_weights(step: Step, batch: int, group: Group, *, counted: bool) -> list[float]:
    """The weights of the losses of this rank's micro-batches. Collective if `counted`.

    The weighted losses of all ranks, divided by the number of ranks, add up to that of the step.

    Args:
        step: the step. The loss of each of its micro-batches is the mean over its items.
        batch: samples per step over the whole job.
        group: the ranks that share the step's samples.
        counted: whether the items were counted; otherwise they are the samples.

    Raises:
        DataError: nothing in the whole step counts; on all ranks.
    """
    items = [micro_batch.items for micro_batch in step.micro_batches]
    total = group.total(sum(items)) if counted else batch
    if not total:
        error = DataError(
            f"no token of step {step.number} counts", "use a larger batch, or other data"
        )
        error.agreed = True
        raise error
    return [count * group.size / total for count in items]
