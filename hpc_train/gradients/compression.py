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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from hpc_train.collectives.steps import Steps
from hpc_train.compression import parse

if TYPE_CHECKING:
    from hpc_train.collectives.ring import Cross  # which starts MPI

SAMPLE = 1 << 14


class Compressor(Protocol):
    """Sums over the nodes with fewer bytes on the wire than `Cross.sum_`.

    Of the n ranks of a `Cross` each has a compressor; all make the same calls.
    """

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Steps[None]:
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

    def unify(self, cross: Cross) -> Steps[dict[int, Tensor]]:
        """For a checkpoint: what the ranks together have not sent yet, by bucket number.

        Every rank then keeps an equal share of it, as if by `load`, so that a run that goes on and
        one that is resumed do the same, bit for bit.
        """

    def load(self, totals: Mapping[int, Tensor], ranks: int) -> None:
        """Begin with what another run's ranks had not sent yet.

        Args:
            totals: by bucket number, as `unify` returned them; on any number of nodes.
            ranks: n, the number of nodes that share it now.
        """

    def scale_(self, factor: float) -> None:
        """Multiply what has not been sent yet, when gradients come in another unit from now on."""


def make_compressor(text: str) -> Compressor | None:
    """The compressor of a value of `gradients.compression`; None for "none".

    Raises:
        ConfigError: there is no such compression.
    """
    kind, number = parse(text)
    if kind == "topk":
        assert number is not None
        return TopK(number)
    if kind == "powersgd":
        from hpc_train.gradients.powersgd import PowerSgd

        assert number is not None
        return PowerSgd(int(number))
    return None if kind == "none" else SixteenBit(kind)


class ErrorFeedback:
    """The residuals of a compressor.

    `residuals` holds what this rank has not sent yet, by bucket number; a bucket that has none yet
    is missing, on all ranks alike.
    """

    def __init__(self) -> None:
        self.residuals: dict[int, Tensor] = {}

    def unify(self, cross: Cross) -> Steps[dict[int, Tensor]]:
        """Add up the residuals of all ranks, and give each an equal share."""
        totals = {number: self.residuals[number].clone() for number in sorted(self.residuals)}
        for number, total in totals.items():
            yield from cross.sum_(total, number)
        self.load(totals, cross.group.size)
        return totals

    def load(self, totals: Mapping[int, Tensor], ranks: int) -> None:
        """Take this rank's share of what was not sent."""
        self.residuals = {number: total / ranks for number, total in totals.items()}

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

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Steps[None]:
        """Sum with every number rounded on its way; who rounds keeps what that loses."""
        if not part.numel():
            return
        if number in self.residuals:
            part.add_(self.residuals[number])
        lost = torch.zeros_like(part)
        if self.dtype is torch.float16:
            scale = yield from _half_scale(cross, number, part)
            yield from cross.sum_16_(part.mul_(scale), self.dtype, lost, number)
            part.div_(scale)
            lost.div_(scale)
        else:  # its largest and smallest numbers are about float32's
            yield from cross.sum_16_(part, self.dtype, lost, number)
        if is_finite(part):
            self.residuals[number] = lost


def _half_scale(cross: Cross, number: int, part: Tensor) -> Steps[float]:
    """The power of two, the same on all ranks, that brings the sums near to float16's largest.

    Float16 ends at 65504 and has nothing below 6e-8: averaged gradients of a large model would be
    lost at its lower end, and sums of large ones at its upper. No sum is larger than the sum of the
    ranks' largest magnitudes; that goes to 2 ** 15, which leaves room for rounding upwards on the
    way over a thousand nodes. 8 bytes per rank go round for it. A power of two rounds nothing.
    """
    mine = torch.tensor([largest(part)], dtype=torch.float64)
    bound = (yield from cross.gather(mine, number)).sum().item()
    if not 0 < bound < math.inf:
        return 1.0
    return 2.0 ** min(15 - math.frexp(bound)[1], 120)  # within float32's own range


class TopK(ErrorFeedback):
    """Implements `Compressor` by sending the largest elements, with their places.

    Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", https://arxiv.org/abs/1809.07599;
    Lin et al., "Deep gradient compression", https://arxiv.org/abs/1712.01887.

    Ranks choose different places, so every rank gets every other's message: of n nodes each sends
    n - 1 messages of ratio * elements * (4 bytes + those of the value). In float32 that is less
    than the ring's 2 (n - 1) / n of all elements while ratio < 1 / n.

    Args:
        ratio: the part of the elements that is sent.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def sum_(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Steps[None]:
        """Sum the largest elements of each rank; it keeps the others."""
        if not part.numel():
            return
        kept = self.with_residual(number, part)
        count = max(1, math.ceil(self.ratio * part.numel() - 1e-6))  # 0.07 * 100 is above 7
        values = kept.new_full((count,), math.nan)  # what the others get if ours are not finite
        places = torch.arange(count, dtype=torch.int32, device=part.device)
        if is_finite(kept):
            places = largest_places(kept, count).to(torch.int32)
            values = kept[places]
            kept[places] = 0
        all_values, all_places = yield from _exchanged(cross, number, values, places)
        part.zero_()
        for theirs, where in zip(all_values, all_places, strict=True):  # in all ranks' same order
            part.index_add_(0, where, theirs)
        if is_finite(part[all_places.flatten()]):
            self.residuals[number] = kept


def _exchanged(
    cross: Cross, number: int, values: Tensor, places: Tensor
) -> Steps[tuple[Tensor, Tensor]]:
    """The values and places of all ranks, (n, count) each, in one message per rank."""
    payload = torch.cat([values.view(torch.uint8), places.view(torch.uint8)])
    gathered = yield from cross.gather(payload, number)
    first, second = gathered.split([values.nbytes, places.nbytes], dim=1)
    all_values = first.reshape(-1).view(values.dtype).view(-1, len(values))
    return all_values, second.reshape(-1).view(places.dtype).view(-1, len(places))


def largest_places(flat: Tensor, count: int) -> Tensor:
    """Where the `count` largest magnitudes of a finite tensor lie, in no order; int64.

    Of a large tensor a sample tells a magnitude that some more than `count` elements reach, and
    only these are compared with each other: on a processor that is several times as fast as
    `torch.topk` over all, with the same result.
    """
    size = flat.numel()
    magnitudes = flat.abs()
    if flat.is_cuda:
        return magnitudes.topk(count, sorted=False).indices
    array = magnitudes.numpy()
    places = np.arange(0)
    if size > 4 * SAMPLE and count < size // 4:
        places = np.flatnonzero(array >= _reached_by_more(magnitudes, count / size))
    if len(places) < count:  # a small tensor, or a sample unlike the whole
        places = np.arange(size)
    chosen = np.argpartition(array[places], len(places) - count)[len(places) - count :]
    return torch.from_numpy(places[chosen])


def _reached_by_more(magnitudes: Tensor, ratio: float) -> float:
    """A magnitude that probably more than this part of all elements reach, but few more.

    Three standard deviations of the number within the sample. Its places are drawn: at regular
    distances they could all lie in few columns of a matrix. Always the same are drawn, so that a
    step repeated gives the same bits.
    """
    drawn = torch.Generator().manual_seed(0)
    sample = magnitudes[torch.randint(len(magnitudes), (SAMPLE,), generator=drawn)]
    expected = ratio * SAMPLE
    more = min(SAMPLE, math.ceil(expected + 3 * math.sqrt(expected)) + 1)
    return sample.kthvalue(SAMPLE - more + 1).values.item()


def largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if there is one. One pass, unlike `norm` or `isfinite().all()`."""
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item())


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of one element or more has neither NaN nor infinity."""
    return math.isfinite(largest(tensor))
