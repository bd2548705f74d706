"""Compressed sums over nodes, with error feedback.

What a rank's message leaves out stays in its residual and is added to what it has to send in the
next step, so that nothing is lost, only late: Seide et al., "1-bit stochastic gradient descent",
Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
https://arxiv.org/abs/1901.09847.

A step with a NaN or an infinity anywhere gives a result that is not finite, on all ranks. Such a
step is skipped by all, and leaves the residuals of all as they were: each rank sees it in the
result, which all have alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.compression import parse_scheme

if TYPE_CHECKING:
    from hpc_train.collectives.ring import Cross  # which starts MPI


class Compressor(Protocol):
    """Sums over the nodes with fewer bytes on the wire than `Cross.sum_`.

    Of the n ranks of a `Cross` each has a compressor; all make the same calls in the same order.
    """

    @property
    def steps(self) -> int:
        """How many sums each bucket has had, including those that were not finite."""

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Replace a tensor by about its sum over the nodes, the same bits on all n ranks.

        Args:
            cross: the n ranks; operations have the tag `number`.
            number: of the bucket, under which this rank's residual is kept.
            part: (elements,) contiguous, float32 or float64: the same place of the bucket on all
                n ranks. If that of one rank is not finite, the result is not, and the step leaves
                nothing behind.
            pieces: views that cover `part` in order, each in the shape of a parameter or of some
                of its rows.
        """

    def unify(self, cross: Cross) -> Coroutine[dict[int, Tensor]]:
        """For a checkpoint: what the ranks together have not sent yet, by bucket number.

        Every rank then keeps an equal share of it, as if by `load`, so that a run that goes on and
        one that is resumed do the same, bit for bit.
        """

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Go on where another run was.

        Args:
            totals: what its ranks had not sent yet, by bucket number, as `unify` returned them; on
                any number of nodes.
            ranks: n, the number of nodes that share it now.
            steps: its `steps`; by default the compression is full at once.
        """

    def scale_(self, factor: float) -> None:
        """Multiply what has not been sent yet, when gradients come in another unit from now on."""


def make_compressor(text: str) -> Compressor | None:
    """The compressor of a value of `gradients.compression`; None for "none".

    Raises:
        ConfigError: there is no such compression.
    """
    kind, number, steps = parse_scheme(text)
    if kind == "topk":
        from hpc_train.gradients.topk import TopK

        return TopK(number, steps)
    if kind == "powersgd":
        from hpc_train.gradients.powersgd import PowerSgd

        return PowerSgd(int(number), steps)
    return None if kind == "none" else SixteenBit(kind)


class ErrorFeedback(ABC):
    """What compressors have in common: residuals, and that they begin slowly.

    `residuals` holds what this rank has not sent yet, by bucket number; a bucket that has none yet
    is missing, on all ranks alike.

    Args:
        warmup_steps: number of steps before the compression is full. At the start, gradients are
            large and change direction quickly, so that late parts do the most harm.
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        self.residuals: dict[int, Tensor] = {}
        self.warmup_steps = warmup_steps
        self._before = 0  # steps of another run that this one goes on with
        self._sums: Counter[int] = Counter()  # by bucket number

    @property
    def steps(self) -> int:
        """How many sums each bucket has had."""
        return self._before + max(self._sums.values(), default=0)

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum with compression, or without where that is better."""
        if not part.numel():
            return
        self._sums[number] += 1
        if not self.is_exact(number, part, cross.group.size):
            yield from self._sum_compressed(cross, number, part, pieces)
            return
        if number in self.residuals:
            part.add_(self.residuals[number])
        yield from cross.sum_(part, number)
        if is_finite(part):
            self.residuals.pop(number, None)

    def step(self, number: int) -> int:
        """The number of a bucket's sum under way; the first is 1."""
        return self._before + self._sums[number]

    def is_exact(self, number: int, part: Tensor, ranks: int) -> bool:
        """Whether the bucket's sum under way is one without compression."""
        return self.step(number) <= self.warmup_steps

    @abstractmethod
    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """`Compressor.sum_` of one element or more."""

    def unify(self, cross: Cross) -> Coroutine[dict[int, Tensor]]:
        """Add up the residuals of all ranks, and give each an equal share."""
        totals = {number: self.residuals[number].clone() for number in sorted(self.residuals)}
        for number, total in totals.items():
            yield from cross.sum_(total, number)
        self.load(totals, cross.group.size, self.steps)
        return totals

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Take this rank's share of what was not sent."""
        self.residuals = {number: total / ranks for number, total in totals.items()}
        self._before = self.warmup_steps if steps is None else steps
        self._sums.clear()

    def scale_(self, factor: float) -> None:
        """Multiply the residuals."""
        for residual in self.residuals.values():
            residual.mul_(factor)

    def with_residual(self, number: int, part: Tensor) -> Tensor:
        """What is to be sent, in new memory: `part` stays as it is."""
        residual = self.residuals.get(number)
        return part.clone() if residual is None else part + residual


class SixteenBit(ErrorFeedback):
    """Implements `Compressor` by rounding: half of float32's bytes.

    Args:
        kind: "fp16", with 11 significant bits, or "bf16", with 8.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]

    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum with every number rounded on its way; who rounds keeps what that loses."""
        if number in self.residuals:
            part.add_(self.residuals[number])
        lost = torch.zeros_like(part)
        if self.dtype is torch.float16:
            scale = yield from _half_scale(cross, part)
            yield from cross.sum_16_(part.mul_(scale), self.dtype, lost, number)
            part.div_(scale)
            lost.div_(scale)
        else:  # its largest and smallest numbers are about float32's
            yield from cross.sum_16_(part, self.dtype, lost, number)
        if is_finite(part):
            self.residuals[number] = lost


def _half_scale(cross: Cross, part: Tensor) -> Coroutine[float]:
    """The power of two, the same on all ranks, that brings the sums near to float16's largest.

    Float16 ends at 65504 and has nothing below 6e-8: averaged gradients of a large model would be
    lost at its lower end, and sums of large ones at its upper. No sum is larger than n times the
    ranks' largest magnitude; that goes to 2 ** 15, which leaves room for rounding upwards on the
    way over a thousand nodes. A power of two rounds nothing.
    """
    mine = largest(part)
    bound = yield from cross.largest(mine if math.isfinite(mine) else math.inf)
    bound *= cross.group.size
    if not 0 < bound < math.inf:
        return 1.0
    return 2.0 ** min(15 - math.frexp(bound)[1], 120)  # within float32's own range


def largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if there is one. One pass, unlike `norm` or `isfinite().all()`."""
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item())


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of one element or more has neither NaN nor infinity."""
    return math.isfinite(largest(tensor))
