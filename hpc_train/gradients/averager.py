"""The interface of gradient averaging, and how an averager is put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives, connect
from hpc_train.errors import UserError
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.ownership import is_wrapped, parameters_of, take_over
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.state import broadcast_state
from hpc_train.host.allocator import keep_freed_memory
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels

if TYPE_CHECKING:
    from hpc_train.gradients.mpi import BucketAverager

DEFAULT_OPTIONS = AveragingOptions()


class GradientAverager(Protocol):
    """Makes every rank's gradients the mean over the ranks.

    The user's own loop stays as it is: `optimizer.zero_grad()`, backward as often as there are
    micro-batches, `optimizer.step()`. The step averages first; so does whoever looks at a gradient
    before, clips them, or asks for their norm. The loss of each backward pass is the mean over the
    rank's own samples, divided by the number of passes. A parameter that had no part in any rank's
    loss has no gradient, as in one process.

    All ranks take the same steps: one that steps while another does not makes both raise.
    """

    at_close: list[Callable[[], None]]
    """What else to release in `close`."""

    @property
    def profile(self) -> Profile:
        """What averaging has taken so far."""

    def zero_grad(self) -> None:
        """Forget the gradients, before a step's first backward pass."""

    def weight(self, items: int) -> float:
        """The factor for this rank's loss with which the mean over ranks is one over items.

        For losses that are means over samples, tokens or whatever else, of which ranks have
        unequally many: items x ranks / all ranks' items. A rank without any passes 0, makes no
        backward pass and goes on as the others do. Call it after `zero_grad`. Collective.
        """

    def average(self) -> None:
        """Average the gradients, once per step, after its last backward pass. Collective."""

    def norm(self) -> Tensor:
        """The 2-norm of all averaged gradients, a float64 scalar. Collective."""

    def scale_(self, factor: float) -> None:
        """Multiply the averaged gradients by a number, the same on all ranks."""

    def step(self) -> None:
        """The optimizer's own step, under another name. Collective."""

    def leave_step(self) -> None:
        """Say that this rank is between two steps, in a loop whose ranks meet there. Collective."""

    def refresh(self) -> None:
        """Take over parameters that were added to the optimizer or unfrozen. Collective.

        All ranks get rank 0's values. What all ranks have alike is also found without this call.
        """

    def parts(self) -> Sequence[tuple[Parameter, Tensor]]:
        """The averaged gradients that this rank counts. Across `shards`, each is counted once."""

    @property
    def shards(self) -> Collectives:
        """The ranks whose `parts` together cover every gradient. Usually it is this rank alone."""

    def rescale(self, factor: float) -> None:
        """Rescale what the averager keeps: the loss scale was multiplied by `factor`."""

    def settle(self) -> None:
        """Bring all ranks to one state, before it is saved or judged. Collective."""

    def close(self) -> None:
        """Release what the averager holds. Collective."""


def best_engine(device: torch.device) -> Literal["horovod", "mpi"]:
    """What engine "auto" takes, by what is built and by what we have measured.

    Engine mpi was the faster one on processors, in every run (benchmarks/RESULTS.md). For GPUs it
    is Horovod if that has NCCL while MPI cannot read their memory: gradients then stay there.
    """
    if device.type != "cuda" or not runtime.horovod_built():
        return "mpi"
    from hpc_train.collectives.mpi import reads_gpu_memory  # which starts MPI

    if reads_gpu_memory():
        return "mpi"
    import horovod.torch as hvd

    return "horovod" if hvd.nccl_built() else "mpi"


def average_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group | Levels,
    options: AveragingOptions = DEFAULT_OPTIONS,
) -> GradientAverager:
    """Set up gradient averaging; all ranks get rank 0's weights and optimizer state. Collective.

    A loop needs this line only. Making another averager for the same parameters closes the first.

    Args:
        model: its parameters that require gradients are averaged; all ranks build the same one.
        optimizer: its parameters are averaged, too. It stays usable, also to save its state. One
            that hvd.DistributedOptimizer has made averages by itself, and nothing is done twice.
        group: the ranks to average over, or these ranks by nodes, where the caller knows them. For
            engine horovod all ranks of the job, or one of the process sets that Horovod was started
            with (`runtime.start_horovod`).
        options: how they are averaged.

    Raises:
        UserError: the ranks have built different models, or options do not go together.
        SetupError: engine horovod, and Horovod is missing or does not load.
    """
    given = group
    levels = given if isinstance(given, Levels) else Levels.of(given)
    group = levels.whole
    if options.reduction == "adasum" and options.engine != "horovod":
        raise UserError("reduction adasum is Horovod's", 'give engine="horovod" as well')
    _check(group, model, optimizer, replace(options, whole=(), cores=1))
    take_over(optimizer)
    collectives = connect(group)
    tensors = [*model.parameters(), *model.buffers(), *parameters_of(optimizer)]
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        collectives.broadcast_(tensor.data)
    broadcast_state(optimizer, collectives)
    from hpc_train.gradients.autotune import mpi_averager

    device = _device(model)
    engine = options.engine
    if engine == "auto" and not is_wrapped(optimizer):
        engine = "mpi" if options.average_every > 1 else best_engine(device)
    if device.type == "cpu":
        keep_freed_memory()
    averager: BucketAverager
    if is_wrapped(optimizer):
        from hpc_train.gradients.wrapped import wrapped_averager

        averager = wrapped_averager(model, optimizer, group, options)
    elif engine == "horovod" and group.size > 1:
        from hpc_train.gradients.horovod import horovod_averager

        averager = horovod_averager(model, optimizer, group, options)
    else:
        averager = mpi_averager(model, optimizer, levels, options)
    if levels is not given:
        averager.at_close.append(levels.close)
    return averager


def _check(group: Group, model: nn.Module, optimizer: Optimizer, options: object) -> None:
    """Check that all ranks were given the same. Collective."""
    if type(optimizer).__name__ == "SparseAdam" and group.size > 1:
        raise UserError(
            "SparseAdam takes sparse gradients, and their mean over ranks is not sparse",
            "use Adam, or SGD without momentum",
        )
    built = [
        (name, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    what = "the model (its parameters' names, shapes, strides and types)"
    same(group, what, repr(built), "build the same")
    stepped = [(tuple(p.shape), p.requires_grad) for p in parameters_of(optimizer)]
    same(group, "the optimizer (its parameters)", repr(stepped), "build the same")
    same(group, "what averaging was asked for", repr(options), "give all ranks the same options")


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))
