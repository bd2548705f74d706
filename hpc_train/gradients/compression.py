"""Compressed sums over nodes, with error feedback.

A rank keeps what its message leaves out in a residual, and adds it to what it has to send in the
next step. So nothing is lost, it only arrives later: Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
https://arxiv.org/abs/1901.09847.

If any rank has a NaN or an infinity, the result is not finite on any rank. The result has the same
bits everywhere, so without asking each other all ranks skip such a step and leave their residuals
as they were.
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
    from hpc_train.collectives.ring import Cross


class Compressor(Protocol):
    """Sums over the nodes with fewer bytes on the wire than `Cross.sum_`.

    Each of the n ranks of a `Cross` has a compressor, and all make the same calls in the same
    order.
    """

    residuals: dict[int, Tensor]
    """What this rank has not sent yet, by bucket number."""

    @property
    def steps(self) -> int:
        """How many sums each bucket has had, including those that were not finite."""

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Replace a tensor by an approximation of its sum over the nodes. Collective.

        The result has the same bits on all n ranks.

        Args:
            cross: the n ranks; operations have the tag `number`.
            number: the bucket's number, under which this rank's residual is kept.
            part: (elements,) contiguous, float32 or float64: the same part of the bucket on all
                n ranks. If it is not finite on one rank, the result is not finite on any, and the
                residuals stay as they were.
            pieces: views that cover `part` in order, each in the shape of a parameter or of some
                of its rows.
        """

    def unify(self, cross: Cross) -> Coroutine[dict[int, Tensor]]:
        """The sums of all ranks' residuals, by bucket number, for a checkpoint. Collective.

        Afterwards every rank keeps an equal share of them, as `load` would give it. So a run that
        continues and one that is resumed from the checkpoint compute the same bits.
        """

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Continue from the state of another run.

        Args:
            totals: the sums of its residuals by bucket number, as `unify` returned them, from any
                number of nodes.
            ranks: n, the number of nodes that share them now.
            steps: its `steps`; by default the warm-up counts as over.
        """

    def scale_(self, factor: float) -> None:
        """Multiply the residuals, because later gradients have another loss scale."""


def make_compressor(text: str) -> Compressor | None:
    """The compressor that a value of `gradients.compression` names; None for "none".

    Raises:
        ConfigError: the value names no compression.
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
    """Base class of the compressors: it keeps residuals and counts the warm-up.

    `residuals` holds what this rank has not sent yet, by bucket number. A bucket without a residual
    is missing there, on all ranks or on none.

    Args:
        warmup_steps: number of steps before the compression is full. At the start of a training,
            gradients are large and change direction quickly, so parts that arrive late do the most
            harm.
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        self.residuals: dict[int, Tensor] = {}
        self.warmup_steps = warmup_steps
        self._before = 0  # steps of the run that this one was resumed from
        self._sums: Counter[int] = Counter()  # since then, by bucket number

    @property
    def steps(self) -> int:
        """How many sums each bucket has had."""
        return self._before + max(self._sums.values(), default=0)

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum with compression, or without it if `is_exact` says so (see `Compressor`)."""
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
        """The number of the bucket's current sum, counted from 1."""
        return self._before + self._sums[number]

    def is_exact(self, number: int, part: Tensor, ranks: int) -> bool:
        """Whether the bucket's current sum goes without compression."""
        return self.step(number) <= self.warmup_steps

    @abstractmethod
    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Do `Compressor.sum_` for a part of one element or more."""

    def unify(self, cross: Cross) -> Coroutine[dict[int, Tensor]]:
        """Add up the residuals of all ranks, and give each rank an equal share. Collective."""
        totals = {number: self.residuals[number].clone() for number in sorted(self.residuals)}
        for number, total in totals.items():
            yield from cross.sum_(total, number)
        self.load(totals, cross.group.size, self.steps)
        return totals

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Take this rank's share of the residuals (see `Compressor`)."""
        self.residuals = {number: total / ranks for number, total in totals.items()}
        self._before = self.warmup_steps if steps is None else steps
        self._sums.clear()

    def scale_(self, factor: float) -> None:
        """Multiply the residuals."""
        for residual in self.residuals.values():
            residual.mul_(factor)

    def with_residual(self, number: int, part: Tensor) -> Tensor:
        """The sum of `part` and the bucket's residual, in new memory; `part` stays as it is."""
        residual = self.residuals.get(number)
        return part.clone() if residual is None else part + residual


class SixteenBit(ErrorFeedback):
    """Implements `Compressor` by rounding to 16 bits, half of float32's bytes.

    Args:
        kind: "fp16", with 11 significant bits, or "bf16", with 8.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[kind]

    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum with every message rounded; the rank that rounds keeps the error as its residual."""
        if number in self.residuals:
            part.add_(self.residuals[number])
        lost = torch.zeros_like(part)
        if self.dtype is torch.float16:
            scale = yield from _half_scale(cross, part)
            yield from cross.sum_16_(part.mul_(scale), self.dtype, lost, number)
            part.div_(scale)
            lost.div_(scale)
        else:  # bfloat16 has about float32's range and needs no scale
            yield from cross.sum_16_(part, self.dtype, lost, number)
        if is_finite(part):
            self.residuals[number] = lost


def _half_scale(cross: Cross, part: Tensor) -> Coroutine[float]:
    """A power of two by which to multiply, so that sums use the upper end of float16's range.

    Float16 ends at 65504 and has nothing below 6e-8. Averaged gradients of a large model would
    underflow, and sums of large gradients would overflow. No sum is larger than n times the ranks'
    largest magnitude. This bound is scaled to 2 ** 15 at most, which leaves room for rounding
    upwards on the way over a thousand nodes. Multiplying by a power of two rounds nothing.

    All ranks get the same number. Collective.
    """
    mine = largest(part)
    bound = yield from cross.largest(mine if math.isfinite(mine) else math.inf)
    bound *= cross.group.size
    if not 0 < bound < math.inf:
        return 1.0
    return 2.0 ** min(15 - math.frexp(bound)[1], 120)  # float32 could not hold much more


def largest(tensor: Tensor) -> float:
    """The largest magnitude of a tensor's elements; NaN if one of them is NaN.

    It reads the tensor once, without the temporary tensor of `isfinite().all()`.
    """
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item())


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of one element or more has neither NaN nor infinity."""
    return math.isfinite(largest(tensor))
