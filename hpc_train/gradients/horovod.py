"""Engine horovod: Horovod's DistributedOptimizer, with its pitfalls taken care of.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
https://arxiv.org/abs/1802.05799
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from hpc_train.mpi.watch import Watch


class HorovodAverager:
    """Implements `GradientAverager` with `hvd.DistributedOptimizer`.

    Args:
        hvd: the module horovod.torch, initialised.
        model: gives the parameters their names, by which Horovod matches them across ranks.
        optimizer: the plain optimizer; shares its state and parameter groups with Horovod's, so
            that saving, restoring and learning rates work on either.
        backward_passes: backward passes in each step; Horovod communicates after the last.
        process_set: the ranks to average over; by default all.
        waiting: the group's, to tell what this rank waits for.
    """

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        optimizer: Optimizer,
        backward_passes: int = 1,
        process_set: Any = None,
        waiting: Watch | None = None,
    ) -> None:
        self.waiting = waiting or Watch()
        self.distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=backward_passes,
            process_set=process_set or hvd.global_process_set,
        )
        self.distributed.state = optimizer.state
        self._averaged = False

    def zero_grad(self) -> None:
        """Drop the gradients; Horovod's `zero_grad` takes no set_to_none argument."""
        self.distributed.zero_grad()
        self._averaged = False

    def average(self) -> None:
        """Wait for the averages that the backward pass has begun. Collective."""
        with self.waiting("the sums of the gradients by Horovod"):
            self.distributed.synchronize()
        self._averaged = True

    def step(self) -> None:
        """Take the optimizer's step, after averaging. Collective."""
        if not self._averaged:
            self.average()
        with self.distributed.skip_synchronize():  # it would average a second time
            self.distributed.step()
        self._averaged = False

    def close(self) -> None:
        """Horovod's hooks live as long as the model: there is nothing to release."""
