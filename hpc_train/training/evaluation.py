"""Evaluates a data set over all ranks, without an effect on training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpc_train.data.generators import of_gpu, of_process, seed_process
from hpc_train.data.order import number_of_samples
from hpc_train.data.reader import Reader
from hpc_train.errors import ConfigError, UserError, plural
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.seeds import mix
from hpc_train.training.same_data import compared

logger = logging.getLogger(__name__)

HELD_OUT = 2  # makes the random draws for these samples differ from those of training

PerSample = Callable[[Any], "Tensor | Mapping[str, Tensor]"]
"""A function of a batch: it returns a tensor of shape (samples,), or several such by name."""


def evaluate(
    group: Group,
    reader: Reader,
    per_sample: PerSample,
    batch: int,
    models: Sequence[nn.Module],
    *,
    alike: bool = False,
    compared_sizes: set[int],
) -> float | dict[str, float]:
    """The means over all samples, the same on all ranks; see `Loop.evaluate`. Collective.

    If `alike`, all ranks call the function equally often, some for a sample that does not count,
    because they gather parameters together in it. Then an error of one rank alone ends the program
    on that rank: the others wait in a gather, where they could not hear of it.

    The ranks compare some samples of the first data set of each size. `compared_sizes` remembers
    the sizes, the same on all ranks.
    """
    with agreed(group, "loop.evaluate"):
        samples = number_of_samples(reader.dataset)
        if samples < 1 or not isinstance(batch, Integral) or batch < 1:
            raise ConfigError(
                f"loop.evaluate was given {plural(samples, 'sample')} and a batch of {batch!r}",
                "give at least one sample, and for the batch an integer of at least 1",
            )
    same(
        group,
        "what loop.evaluate was given (size of the data set or batch)",
        repr((samples, batch)),
        "give all ranks the same",
    )
    if not compared_sizes and group.size > 1 and group.rank == 0:
        _tell_of_batches(models)
    if samples not in compared_sizes:
        compared_sizes.add(samples)
        compared(group, reader, "the data set of loop.evaluate")
    totals: dict[str | None, Tensor] = {}  # the key None: a tensor without a name
    with nullcontext() if alike else agreed(group), aside(models), torch.no_grad():
        mine = np.arange(group.rank, samples, group.size)
        size = -(-batch // group.size)
        most = -(-samples // group.size) if alike else len(mine)
        for begin in range(0, most, size):
            some = mine[begin : begin + size]
            found_of = _values(reader, some if len(some) else np.arange(1), per_sample)
            for name, values in found_of.items():
                if len(some):
                    totals[name] = totals.get(name, torch.zeros(())) + values.double().sum().cpu()
    found = group.gathered(
        {name: float(total) for name, total in totals.items()}, "what all ranks have evaluated"
    )
    parts = [part for part in found if part]  # with few samples some ranks have none
    if any(part.keys() != parts[0].keys() for part in parts):
        error = UserError(
            "the function of loop.evaluate returned different names on different ranks",
            "let it return the same names for every batch",
        )
        error.agreed = True  # all ranks raise it
        raise error
    means = {name: sum(part[name] for part in parts) / samples for name in parts[0]}
    return means[None] if None in means else {str(name): mean for name, mean in means.items()}


def _tell_of_batches(models: Sequence[nn.Module]) -> None:
    """Warn of a layer whose result for a sample depends on the others of the rank's batch."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
                logger.warning(
                    "loop.evaluate: layer %s has no running statistics (track_running_stats=False) "
                    "and takes those of a rank's part of the batch, so the means depend on the "
                    "number of ranks: make the layer with running statistics",
                    name,
                )
                return


def _values(reader: Reader, indices: np.ndarray, per_sample: PerSample) -> dict[str | None, Tensor]:
    """The function's numbers for the samples of one batch, checked, by name."""
    with reader.naming("the data set of loop.evaluate"):
        batch = reader.read(indices, lambda place: mix(HELD_OUT, int(indices[place])))
    seed_process(mix(HELD_OUT, int(indices[0]), len(indices)))
    given = per_sample(batch)
    found: dict[str | None, Tensor] = {}
    if isinstance(given, Mapping):
        if wrong := [name for name in given if not (isinstance(name, str) and name)]:
            raise UserError(
                f"the function of loop.evaluate returned a number with the name {wrong[0]!r}",
                "let it return texts as names",
            )
        found.update(given.items())
    else:
        found[None] = given
    if not found:
        raise UserError("the function of loop.evaluate returned nothing", "let it return a tensor")
    for name, values in found.items():
        what = "the function of loop.evaluate returned " + (f"for {name!r} " if name else "")
        remedy = 'return one number per sample, as losses do with reduction="none"'
        if not isinstance(values, Tensor):
            raise UserError(f"{what}a {type(values).__name__}", remedy)
        if values.is_complex():
            raise UserError(f"{what}a tensor of type {values.dtype}", remedy)
        if values.shape != (len(indices),):
            raise UserError(
                f"{what}a tensor of shape {list(values.shape)} for "
                f"{plural(len(indices), 'sample')}",
                remedy,
            )
    return found


def train_mode(model: nn.Module, *, tell: bool = False) -> None:
    """Put a model into train mode, but not parts that its user has put into eval mode.

    Such parts are frozen, as BatchNorm often is. A model that is in eval mode as a whole is put
    into train mode as a whole, because other libraries load models so.

    Args:
        model: the model.
        tell: whether to log which parts stay in eval mode.
    """
    resting = [name for name, module in model.named_modules() if not module.training]
    if len(resting) == len(list(model.modules())):
        model.train()
    elif resting and tell:
        logger.info(
            "%s of the model came in eval mode and will stay so (%s%s); to train the whole model, "
            "call `model.train()` before",
            plural(len(resting), "module"),
            ", ".join(name or "the model itself" for name in resting[:3]),
            ", ..." if len(resting) > 3 else "",
        )


def telling_of_eval_mode(model: nn.Module) -> Callable[..., None]:
    """A hook of an optimizer's step, which tells at the first step of a model in eval mode."""
    steps = count()

    def tell(*_: Any) -> None:
        if next(steps) or model.training:
            return
        if names := [name for name, module in model.named_modules() if _depends_on_mode(module)]:
            logger.info(
                "the model is trained in eval mode, in which dropout draws nothing and BatchNorm "
                "keeps its statistics (layer %s, %d in all): call model.train() before, unless it "
                "is meant",
                names[0],
                len(names),
            )

    return tell


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module computes something else in train mode than in eval mode."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.dropout)
    dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return dropout or isinstance(module, nn.modules.batchnorm._BatchNorm)


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode, and each of their modules into its own mode at the end."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def aside(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and restore them and the random generators at the end."""
    generators = [*of_process(), *of_gpu()]
    states = [generator.get() for generator in generators]
    try:
        with eval_mode(*models):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.put(state)
