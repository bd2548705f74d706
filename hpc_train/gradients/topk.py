"""Top-k compression: sums only the largest elements over the nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.gradients.compression import ErrorFeedback, is_finite

if TYPE_CHECKING:
    from hpc_train.collectives.ring import Cross

SAMPLE = 1 << 14  # elements by which the threshold of a large tensor is estimated


class TopK(ErrorFeedback):
    """Implements `Compressor` by sending the largest elements, with their places.

    Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", https://arxiv.org/abs/1809.07599;
    Lin et al., "Deep gradient compression", https://arxiv.org/abs/1712.01887.

    Ranks choose different places, so every rank gets every other rank's message: each of n nodes
    sends n - 1 messages of ratio * elements * (4 bytes for the place + the bytes of a value). In a
    tensor of more than 2^31 elements a place takes 8 bytes. In float32, with 4 bytes, this is less
    than the ring's 2 (n - 1) / n of all elements if ratio < 1 / n. If it is not less, all elements
    are sent round the ring.

    Args:
        ratio: fraction of the elements that is sent.
        warmup_steps: number of steps over which the fraction falls from 1 to `ratio`, by the same
            factor in each step, as in Lin et al., section 3.3.
    """

    def __init__(self, ratio: float, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        self.ratio = ratio

    def is_exact(self, number: int, part: Tensor, ranks: int) -> bool:
        """Whether an exact sum takes fewer bytes."""
        width = part.element_size()
        sent = dtype_of_places(part.numel()).itemsize + width
        return ranks * self._ratio_now(number) * sent > 2 * width

    def _ratio_now(self, number: int) -> float:
        done = (self.step(number) - 1) / self.warmup_steps if self.warmup_steps else 1.0
        return math.pow(self.ratio, min(1.0, done))

    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum the largest elements of each rank; each rank keeps its others as the residual."""
        kept = self.with_residual(number, part)
        wanted = self._ratio_now(number) * part.numel()
        count = max(1, math.ceil(wanted - 1e-6))  # 0.07 * 100 is slightly above 7
        values = kept.new_full((count,), math.nan)  # sent if this rank's elements are not finite
        narrow = dtype_of_places(part.numel())
        places = torch.arange(count, dtype=narrow, device=part.device)
        if is_finite(kept):
            places = largest_places(kept, count).to(narrow)
            values = kept[places]
            kept[places] = 0
        all_values, all_places = yield from _exchanged(cross, number, values, places)
        part.zero_()
        # All ranks add in the order of ranks, so that all get the same bits.
        for theirs, where in zip(all_values, all_places, strict=True):
            part.index_add_(0, where, theirs)
        if is_finite(part[all_places.flatten()]):
            self.residuals[number] = kept


def _exchanged(
    cross: Cross, number: int, values: Tensor, places: Tensor
) -> Coroutine[tuple[Tensor, Tensor]]:
    """The values and places of all ranks, (n, count) each, in one message per rank."""
    payload = torch.cat([values.view(torch.uint8), places.view(torch.uint8)])
    gathered = yield from cross.gather(payload, number)
    first, second = gathered.split([values.nbytes, places.nbytes], dim=1)
    all_values = first.reshape(-1).view(values.dtype).view(-1, len(values))
    return all_values, second.reshape(-1).view(places.dtype).view(-1, len(places))


def dtype_of_places(size: int) -> torch.dtype:
    """The narrowest type of 32 or 64 bits that numbers this many elements."""
    return torch.int32 if size <= 1 << 31 else torch.int64


def largest_places(flat: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest magnitudes of a finite tensor, in no order; int64.

    In a large tensor a sample gives a threshold that slightly more than `count` elements reach, and
    only these are compared with each other. On a processor this is several times as fast as
    `torch.topk` over all elements, with the same result.
    """
    size = flat.numel()
    magnitudes = flat.abs()
    if not flat.is_cpu:
        return magnitudes.topk(count, sorted=False).indices
    array = magnitudes.numpy()
    places = np.arange(0)
    if size > 4 * SAMPLE and count < size // 4:
        places = np.flatnonzero(array >= _reached_by_more(magnitudes, count / size))
    if len(places) < count:  # the tensor is small, or the sample was not like the whole
        places = np.arange(size)
    chosen = np.argpartition(array[places], len(places) - count)[len(places) - count :]
    return torch.from_numpy(places[chosen])


def _reached_by_more(magnitudes: Tensor, ratio: float) -> float:
    """A threshold that probably slightly more than this fraction of all elements reach.

    It is chosen so that the sample has three standard deviations more elements above it than the
    fraction needs.
    """
    # Places at regular distances could all lie in few columns of a matrix, so they are random. The
    # seed is fixed, so that a repeated step gives the same bits.
    drawn = torch.Generator().manual_seed(0)
    sample = magnitudes[torch.randint(len(magnitudes), (SAMPLE,), generator=drawn)]
    expected = ratio * SAMPLE
    more = min(SAMPLE, math.ceil(expected + 3 * math.sqrt(expected)) + 1)
    return sample.kthvalue(SAMPLE - more + 1).values.item()
