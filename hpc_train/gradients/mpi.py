"""Engine mpi: flat buckets, summed over the ranks by MPI after the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.gradients.buckets import Bucket, make_buckets


class MpiAverager:
    """Implements `GradientAverager` with one collective per bucket.

    The backward pass makes a gradient in memory of its own; a hook moves it into its bucket while
    it is still in the processor's cache, divided by the number of ranks on the way. A bucket is
    thus written once, never zeroed, and its sum over the ranks is the mean. Until `average`, `grad`
    of the parameters is None. Parameters that had no part in the loss have gradients of zero, on
    any number of ranks.

    Args:
        model: its parameters that require gradients now take part.
        optimizer: steps on those parameters.
        collectives: of the ranks to average over; one rank alone needs neither buckets nor hooks.
        bucket_bytes: size of the flat buckets.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, collectives: Collectives, bucket_bytes: int
    ) -> None:
        self.optimizer = optimizer
        self.collectives = collectives
        self.share = 1 / collectives.group.size
        self.trained = [p for p in model.parameters() if p.requires_grad]
        alone = collectives.group.size == 1
        self.buckets: list[Bucket] = [] if alone else make_buckets(self.trained, bucket_bytes)
        self._views = {p: view for bucket in self.buckets for p, view in bucket.views.items()}
        self._filled: set[Parameter] = set()
        self._averaged = False
        # A user's own zero_grad has to reach the buckets, too: what they hold is not in `grad`.
        self._zero_optimizer = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._hooks = [p.register_post_accumulate_grad_hook(self._move) for p in self._views]

    def zero_grad(self) -> None:
        """Forget the gradients; the buckets are written anew."""
        self._zero_grad()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_optimizer(set_to_none=set_to_none)
        self._filled.clear()
        self._averaged = False

    def average(self) -> None:
        """Sum each bucket over the ranks; the gradients are then views of them. Collective."""
        for bucket in self.buckets:
            for parameter, view in bucket.views.items():
                if parameter not in self._filled:
                    view.zero_()
            self.collectives.sum_(bucket.flat)
            for parameter, view in bucket.views.items():
                parameter.grad = view
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._filled.clear()
        self._averaged = True

    def step(self) -> None:
        """Take the optimizer's step, after averaging. Collective."""
        if not self._averaged:
            self.average()
        self.optimizer.step()
        self._averaged = False

    def close(self) -> None:
        """Remove the hooks and give the buckets' memory back."""
        self.optimizer.zero_grad = self._zero_optimizer  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        for parameter in self._views:
            parameter.grad = None
        self.buckets, self._views = [], {}

    def _move(self, parameter: Tensor) -> None:
        """Put a gradient that a backward pass has just made into its bucket."""
        assert isinstance(parameter, Parameter)  # the hook's type in torch is wider
        assert parameter.grad is not None
        view = self._views[parameter]
        if parameter in self._filled:
            view.add_(parameter.grad, alpha=self.share)
        else:
            view.copy_(parameter.grad).mul_(self.share)
            self._filled.add(parameter)
        parameter.grad = None
