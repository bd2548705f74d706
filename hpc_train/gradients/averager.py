"""The interface of gradient averaging, and the choice of an engine."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from hpc_train.collectives import connect
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import same
from hpc_train.mpi.group import Group

Engine = Literal["auto", "horovod", "mpi"]


class GradientAverager(Protocol):
    """Makes every rank's gradients the mean over the ranks, and takes the optimizer's step.

    A loop calls `zero_grad`, backward once per micro-batch, `average`, `step`. The loss of each
    backward pass is the mean over the rank's own samples, divided by the number of passes.
    Parameters that had no part in any rank's loss get gradients of zero.
    """

    def zero_grad(self) -> None:
        """Zero the gradients before a step's first backward pass."""

    def average(self) -> None:
        """Average the gradients, once per step, after its last backward pass. Collective."""

    def step(self) -> None:
        """Take the optimizer's step; averages first if `average` was not called. Collective."""

    def close(self) -> None:
        """Release what the averager holds. Collective."""


def average_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    *,
    engine: Engine = "auto",
    bucket_bytes: int = 4 << 20,
    backward_passes: int = 1,
) -> GradientAverager:
    """Set up gradient averaging and give all ranks rank 0's weights. Collective.

    Args:
        model: its parameters that require gradients are averaged; all ranks build the same one.
        optimizer: over the model's parameters; stays usable, also to save its state.
        group: the ranks to average over. For engine horovod all ranks of the job, or one of the
            process sets that Horovod was started with (`runtime.start_horovod`).
        engine: "horovod", "mpi", or "auto", which takes mpi: it was the faster of the two wherever
            we measured (benchmarks/RESULTS.md).
        bucket_bytes: size of the flat buckets of engine mpi.
        backward_passes: backward passes in each step.

    Raises:
        UserError: the ranks have built different models.
        SetupError: engine horovod, and Horovod is missing or does not load.
    """
    plan = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    same(group, "the model (its parameters' names, shapes and types)", repr(plan), "build the same")
    collectives = connect(group)
    for tensor in [*model.parameters(), *model.buffers()]:
        collectives.broadcast_(tensor.data)
    if engine == "horovod":
        from hpc_train.gradients.horovod import HorovodAverager

        hvd = runtime.running_horovod() or runtime.start_horovod(group)
        ranks = group.comm.allgather(hvd.rank()) if group.comm else [0]
        ours = runtime.process_set(hvd, ranks)
        return HorovodAverager(hvd, model, optimizer, backward_passes, ours, group.waiting)
    from hpc_train.gradients.mpi import MpiAverager

    return MpiAverager(model, optimizer, collectives, bucket_bytes)
