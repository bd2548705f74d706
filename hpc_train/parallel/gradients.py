"""Completes gradients and takes their norm after they were averaged over the replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.errors import UserError
from hpc_train.gradients import GradientAverager
from hpc_train.gradients.norms import total_norm

SAMPLED = 4096  # elements of each gradient
ALIKE = 0.05  # relative difference of gradients that is no rounding, in 32 bits or more
LOSS_ALIKE = 0.01  # relative difference of losses that is no rounding, likewise
LOSS_ALIKE_16 = 0.02  # relative or absolute difference of those that were computed in 16 bits
TINY = 1e-3  # part of the norm of all gradients below which one may be nothing but rounding
SMALL = 1 << 18  # bytes; copying a gradient up to this size costs less than a call of its own


class LayoutGradients:
    """Sums gradients of parameters that several ranks of one replica hold, and takes the norm.

    Args:
        partial: parameters between the layers that tensor-parallel ranks share, if sequence
            parallelism is on: each rank has seen only its part of the tokens. And parameters of
            adapters that each rank has whole, and has seen only its part of a layer for.
        tied: parameters that the first and the last stage share, in the same order on both.
        counted: parameters whose part on this rank counts for the norm.
        alike: names of the parameters that tensor-parallel ranks have whole and whose gradients
            are the same on all of them.
        tensor: the tensor-parallel group.
        embedding: the ranks of the first and the last stage.
        model: all ranks of the replica.
    """

    def __init__(
        self,
        partial: Sequence[Parameter],
        tied: Sequence[Parameter],
        counted: Sequence[Parameter],
        alike: Mapping[Parameter, str],
        *,
        tensor: Collectives,
        embedding: Collectives,
        model: Collectives,
    ) -> None:
        self.partial, self.tied, self._counted = partial, tied, frozenset(counted)
        self._alike = dict(alike)
        self.tensor, self.embedding, self.model = tensor, embedding, model

    def complete(self) -> None:
        """Sum the gradients of which each rank has a part. Collective over the replica's ranks."""
        _sum_gradients(self.partial, self.tensor)
        _sum_gradients(self.tied, self.embedding)

    def check_alike(
        self, averager: GradientAverager, losses: Sequence[Tensor], *, exact: bool = True
    ) -> None:
        """Check that losses and gradients which should be the same on tensor-parallel ranks are.

        A sample of each gradient is compared, until it was finite and not zero in one step.
        Collective over the tensor-parallel group.

        Args:
            averager: has averaged and completed the gradients.
            losses: of the micro-batches, times their weights; none on ranks whose stage is not the
                last.
            exact: whether they were computed in 32 bits or more. In 16 bits a correct gradient may
                be mostly rounding, so only the losses are compared.

        Raises:
            UserError: they differ; perhaps not on all ranks.
        """
        if self.tensor.group.size == 1:
            return
        # Only some ranks find a difference. So all of them compare all before one raises an error.
        unlike = bool(losses) and self._losses_differ(torch.stack([*losses]), exact=exact)
        differing = self._gradient_that_differs(averager) if exact else ""
        if unlike:
            raise UserError(
                "the loss differs between the ranks of parallel.tp",
                "the loss, or a layer before it, sees only its rank's part of the vocabulary, the "
                "width, the tokens or the weights: give the layers before it no styles in "
                "`tensor_plan`, or use nn.CrossEntropyLoss with style vocab, and weight_decay in "
                "place of a penalty",
            )
        if differing:
            raise UserError(
                f"the gradient of {differing} differs between the ranks of parallel.tp",
                "between a colwise and a rowwise layer each rank computes only its part: use the "
                "parameter outside of the two, or give them no styles in `tensor_plan`",
            )

    def _losses_differ(self, losses: Tensor, *, exact: bool) -> bool:
        """Whether this rank's losses are others than those of the first rank. Collective."""
        mine = losses.detach().double()
        first = mine.clone()
        self.tensor.broadcast_(first)
        largest = max(float(mine.norm(1)), float(first.norm(1)))
        limit = LOSS_ALIKE * largest if exact else LOSS_ALIKE_16 * max(1.0, largest)
        return float((mine - first).norm(1)) > limit

    def _gradient_that_differs(self, averager: GradientAverager) -> str:
        """The first parameter whose gradient is another than on the first rank. Collective."""
        if not self._alike:
            return ""
        mine, sizes = self._samples(averager)
        first = mine.clone()
        self.tensor.broadcast_(first)
        least, differing, later = TINY * float(first.norm()), "", {}
        pairs = zip(mine.split(sizes), first.split(sizes), strict=True)
        for (parameter, name), (a, b) in zip(self._alike.items(), pairs, strict=True):
            norm, difference = float(b.norm()), float((a - b).norm())
            if difference > max(least, ALIKE * max(norm, float(a.norm()))):
                differing = differing or name
            if not least < norm < math.inf:
                later[parameter] = name
        # The averaged gradients are the same on all replicas, so all come to the same `later`.
        self._alike = later
        return differing

    def _samples(self, averager: GradientAverager) -> tuple[Tensor, list[int]]:
        """Elements of all gradients of `_alike` side by side, and their number for each gradient.

        Only the parameters decide which elements these are: not which rows of a gradient a rank
        has, nor whether there is a gradient; without one they are 0. So tensor-parallel ranks can
        compare them. Collective over `averager.shards`.
        """
        steps = {p: -(-p.numel() // SAMPLED) or 1 for p in self._alike}
        sizes = [-(-p.numel() // step) for p, step in steps.items()]
        whole = torch.zeros(sum(sizes), dtype=torch.float64, device=next(iter(steps)).device)
        samples = dict(zip(steps, whole.split(sizes), strict=True))
        for parameter, part in averager.parts():
            if parameter in samples:
                begin, step = averager.begins.get(parameter, 0), steps[parameter]
                found = part.detach().flatten()[-begin % step :: step]
                place = -(-begin // step)
                samples[parameter][place : place + len(found)] = found
        if averager.shards.group.size > 1:
            averager.shards.sum_(whole)
        return whole, sizes

    @property
    def completed(self) -> Sequence[Parameter]:
        """The parameters whose gradients `complete` changes."""
        return [*self.partial, *self.tied]

    def norm(self, averager: GradientAverager) -> Tensor:
        """The 2-norm of the whole model's averaged gradients, float64. Collective over the job.

        If a gradient is not finite on any of the ranks, the norm is not finite on all of them.

        Args:
            averager: has averaged and completed the gradients.
        """
        if self.model.group.size == 1:  # an averager need not go through all parameters
            return averager.norm()
        mine: list[Tensor] = []
        copies: list[Tensor] = []
        for parameter, part in averager.parts():
            (mine if parameter in self._counted else copies).append(part)
        # Other ranks count the copies. Here they add 0, or NaN if one of them is not finite.
        total = _square(mine) + 0 * _square(copies)
        for over in (averager.shards, self.model):
            if over.group.size > 1:
                over.sum_(total)
        return total.sqrt()


def _square(gradients: list[Tensor]) -> Tensor:
    """The square of their 2-norm."""
    return total_norm(gradients).square()


def _sum_gradients(parameters: Iterable[Parameter], over: Collectives) -> None:
    """Sum gradients over ranks: large ones in place, small ones in one call for each type.

    A parameter that has a gradient on no rank gets none: an optimizer would move it even by zeros.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if over.group.size == 1 or not trained:
        return
    used = over.group.largest_each([int(parameter.grad is not None) for parameter in trained])
    small: dict[torch.dtype, list[Tensor]] = {}
    for parameter in compress(trained, used):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.nbytes > SMALL:
            over.sum_(parameter.grad)
        else:
            small.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in small.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        over.sum_(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(total.view(gradient.shape))  # in place: it may be part of a bucket
