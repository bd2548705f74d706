"""The interface of gradient averaging, and the function that sets it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.overwrite import is_expanded
from hpc_train.errors import UserError
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.ownership import is_wrapped, parameters_of, take_over, trained
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.state import broadcast_state
from hpc_train.host.allocator import keep_freed_memory
from hpc_train.models.deferred import forget_recipes
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.watchdog import Watchdog

if TYPE_CHECKING:
    from hpc_train.gradients.mpi import BucketAverager

DEFAULT_OPTIONS = AveragingOptions()


class GradientAverager(Protocol):
    """Makes every rank's gradients the mean over the ranks.

    The user's own loop stays as it is: `optimizer.zero_grad()`, one backward pass for each
    micro-batch, `optimizer.step()`. The step averages first. Looking at a gradient before the step,
    clipping, and asking for the norm also average first. The loss of each backward pass is the mean
    over the rank's own samples, divided by the number of passes. A parameter that had no part in
    any rank's loss has no gradient, as in one process.

    All ranks must take the same steps. If one rank steps and another does not, both raise an error.
    """

    at_close: list[Callable[[], None]]
    """Functions that `close` calls at its end."""
    begins: Mapping[Parameter, int]
    """The position at which a part of `parts` begins in its parameter, in elements, if not at 0."""

    @property
    def profile(self) -> Profile:
        """Time and bytes that averaging has taken so far."""

    def zero_grad(self) -> None:
        """Forget the gradients, before a step's first backward pass."""

    def weight(self, items: int) -> float:
        """The factor for this rank's loss that makes the mean over ranks a mean over items.

        Items are what the loss is a mean over, such as samples or tokens. The factor is
        items x ranks / all ranks' items, for ranks that have different numbers of items. A rank
        that has none passes 0, makes no backward pass, and otherwise does the same as the others.
        Call it after `zero_grad`. Collective.
        """

    def average(self) -> None:
        """Average the gradients, once per step, after its last backward pass. Collective."""

    def norm(self) -> Tensor:
        """Average, unless that is done, and return the gradients' 2-norm, float64. Collective."""

    def scale_(self, factor: float) -> None:
        """Average, unless that is done, and multiply all gradients by a number. Collective.

        Args:
            factor: the number, the same on all ranks.
        """

    def step(self) -> None:
        """Average, unless that is done, and call the optimizer's own `step`. Collective."""

    def follow(self, optimizer: Optimizer) -> None:
        """Average before the steps of another optimizer, too, and after each call of a closure.

        A closure then returns the mean loss. Parameters that the optimizer gets or unfreezes later
        are averaged, too.

        Args:
            optimizer: trains a part of the model as well, and has no averager of its own.

        Raises:
            UserError: the reduction is adasum.
        """

    def expect(self, passes: int) -> None:
        """Get ready for steps with a known number of backward passes.

        It is only a hint, which saves memory with zero 2. All ranks give the same, between two
        steps. Without it one pass is expected.
        """

    def leave_step(self, *, gone: bool = False) -> bool:
        """Tell the other ranks that this one is between two steps. Collective.

        For a loop whose ranks all come to this point. A rank that averages instead makes all raise.

        Args:
            gone: whether this rank has left its loop, and takes no further step.

        Returns:
            Whether any rank has left its loop; the same on all ranks.
        """

    def refresh(self) -> None:
        """Average parameters that were added to the optimizer or unfrozen, too. Collective.

        All ranks get rank 0's values. The call is not needed if the values are already the same on
        all ranks: the next `average` finds new parameters by itself.
        """

    def parts(self) -> Sequence[tuple[Parameter, Tensor]]:
        """The averaged gradients that this rank counts. Across `shards`, each is counted once."""

    @property
    def shards(self) -> Collectives:
        """The ranks whose `parts` together cover every gradient. Usually it is this rank alone."""

    def rescale(self, factor: float) -> None:
        """Rescale what the averager keeps: the loss scale was multiplied by `factor`."""

    def settle(self) -> None:
        """Give all ranks the same parameters and optimizer state. Collective.

        It is called before a checkpoint is written or the model is validated.
        """

    def close(self) -> None:
        """Release memory, communicators and hooks. Collective."""


def best_engine(device: torch.device) -> Literal["horovod", "mpi"]:
    """The engine that "auto" stands for on this device.

    On processors it is mpi, the faster one in every run (benchmarks/RESULTS.md). On GPUs it is
    horovod if MPI cannot read GPU memory and Horovod is built with NCCL, because gradients then
    stay on the GPU.
    """
    if device.type != "cuda" or not runtime.horovod_built():
        return "mpi"
    from hpc_train.collectives.mpi import reads_gpu_memory  # here, because the import starts MPI

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

    A loop needs this call only. Setting up another averager for the same parameters closes the
    first.

    Args:
        model: its parameters that require gradients are averaged; all ranks build the same one.
        optimizer: its parameters are averaged, too. It stays usable, also to save its state. An
            optimizer made by hvd.DistributedOptimizer goes on averaging by itself; gradients are
            not averaged twice.
        group: the ranks to average over; `Levels` if the caller already knows the ranks by nodes.
            For engine horovod it has all ranks of the job, or the ranks of one of the process sets
            that Horovod was started with (`runtime.start_horovod`).
        options: how gradients are averaged.

    Raises:
        UserError: the ranks have built different models, an option has a value that it does not
            take, or options do not fit together.
        SetupError: the engine is horovod, and Horovod is missing or does not load.
    """
    given = group
    # Its own communicator outlives the job: a later one in this process may take the parameters.
    levels = given if isinstance(given, Levels) else Levels.of(given.duplicate())
    group = levels.whole
    with agreed(group):
        options.check_values()
    if options.reduction == "adasum" and options.engine != "horovod":
        raise UserError("reduction adasum needs engine horovod", 'give engine="horovod" as well')
    # Ranks may have different cores. `whole` has parameters, whose values are not to be compared.
    _check(group, model, optimizer, replace(options, whole=(), gates=(), values=None, cores=1))
    take_over(optimizer, group)
    # Not before: with memory.zero an earlier averager has divided the optimizer over the ranks.
    stepped = [(tuple(p.shape), p.requires_grad) for p in parameters_of(optimizer)]
    same(group, "the optimizer (its parameters)", repr(stepped), "build the same")
    collectives = connect(group)
    parameters = [*model.parameters(), *parameters_of(optimizer)] if options.values is None else []
    # MPI cannot send sparse buffers: each rank keeps its own.
    tensors = [*parameters, *(b for b in model.buffers() if b.layout is torch.strided)]
    with agreed(group):
        _check_writable(model, optimizer)
        _check_embeddings(model, alone=group.size == 1 or options.average_every > 1)
    for tensor in {id(tensor): tensor for tensor in tensors}.values():  # tied ones only once
        collectives.broadcast_(tensor.data)
    broadcast_state(optimizer, collectives)
    from hpc_train.gradients.set_up import mpi_averager

    device = _device(model)
    engine = options.engine
    if engine == "auto" and not is_wrapped(optimizer):
        ours = options.average_every > 1 or options.staged
        engine = "mpi" if ours else best_engine(device)
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
    if options.values is not None:
        _fill_rest(model, averager, options, levels)
        forget_recipes(model)
    if levels is not given:
        averager.at_close += [levels.close, levels.whole.close]
    if group.size > 1 and options.hang_timeout > 0:
        watchdog = Watchdog(group, options.hang_timeout)
        watchdog.start()
        averager.at_close.append(watchdog.close)
    return averager


def _fill_rest(
    model: nn.Module, averager: GradientAverager, options: AveragingOptions, levels: Levels
) -> None:
    """Fill the parameters that the averager has not moved elsewhere, and so has not filled.

    Then all nodes get the same bits. Collective.
    """
    from hpc_train.gradients.zero import ShardedAverager

    assert options.values is not None
    parameters = averager.parameters if isinstance(averager, ShardedAverager) else None
    shared = {} if parameters is None else parameters.views()
    with agreed(levels.whole):
        for parameter in model.parameters():
            if parameter not in shared:
                options.values.fill(parameter, parameter.data)
    if levels.nodes == 1:
        return
    # Processors of other nodes may round otherwise. Parameters that are divided over nodes need
    # nothing, because each step gathers them.
    everyone = connect(levels.whole)
    between = connect(levels.cross) if levels.node.rank == 0 else None
    for parameter in model.parameters():
        if parameter not in shared:
            everyone.broadcast_(parameter.data)
        elif options.scope == "node" and between is not None:
            between.broadcast_(shared[parameter])
    levels.node.barrier()
    if parameters is not None:
        parameters.bring_all()


def _check(group: Group, model: nn.Module, optimizer: Optimizer, options: object) -> None:
    """Check that all ranks have the same model and options. Collective."""
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
    remedy = "give all ranks the same options"
    same(group, "an option of gradient averaging", repr(options), remedy)


def _check_writable(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer can write to each parameter that is trained.

    Raises:
        UserError: several elements of a parameter lie at one place in memory.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter in trained(model, optimizer):
        if is_expanded(parameter):
            raise UserError(
                f"parameter {names.get(id(parameter), 'of the optimizer')} was made by expand(): "
                "several of its elements are one number in memory, which no optimizer can update",
                "make it from tensor.contiguous(), or expand a smaller parameter where it is used",
            )


def _check_embeddings(model: nn.Module, *, alone: bool) -> None:
    """Check that no embedding does what depends on the samples of its rank alone.

    Args:
        model: the model.
        alone: whether this rank's parameters may differ from the others'.

    Raises:
        UserError: one does, so that the result would depend on the number of ranks.
    """
    for name, module in () if alone else model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            raise UserError(
                f"{name} is an {type(module).__name__} with max_norm, whose forward pass changes "
                "the rows that a rank's samples use, on this rank only",
                "leave max_norm out, and scale its rows on all ranks after the optimizer's step",
            )
        if module.scale_grad_by_freq and module.weight.requires_grad:
            raise UserError(
                f"{name} is an {type(module).__name__} with scale_grad_by_freq, which divides "
                "gradients by how often a row occurs among this rank's samples, not in the batch",
                "leave scale_grad_by_freq out",
            )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))
