"""Dropout whose masks belong to the samples, not to the process that computes them.

PyTorch's dropout draws from one stream per process. If a batch is cut over other ranks or
micro-batches, every mask changes. Here each sample brings a seed. Its masks, and so the loss, are
the same on every layout and after every resume, and no generator state has to be saved.

A mask's numbers are hashes of the sample's seed, the layer's place and the number of the element.
They are computed for all samples at once, on any device. The idea of keys in place of streams is
from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11). The hash is SplitMix64 of
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), which
`hpc_train.seeds` has for integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpc_train.seeds import FIRST_FACTOR, GAMMA, SECOND_FACTOR

PER_WORD = 4  # numbers of 16 bits in one of 64
LEVELS = 1 << 16
HASHES_AT_ONCE = (
    1 << 17
)  # hashes that are computed at once, so that they stay in the processor's cache


class SampleDropout(nn.Module):
    """Dropout for tensors whose first dimension runs over samples.

    Args:
        share: probability that an element is dropped. It is rounded to a multiple of 2^-16.
        place: a number that differs between the dropout layers of one model.
    """

    def __init__(self, share: float, place: int) -> None:
        super().__init__()
        self.share = share
        self.place = place
        self.seeds: Sequence[int] | Tensor = ()
        """A seed for each sample, below 2^63: integers, or a tensor of int64."""
        self.section: tuple[int, int, int] | None = None
        """(dim, index, parts): x is only part `index` of `parts` equal parts along a dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x, of shape (B, ...), in training; B seeds must have been set."""
        if not self.training or self.share == 0:
            return x
        if len(self.seeds) != len(x):
            raise ValueError(f"{len(x)} samples but {len(self.seeds)} seeds: call seed_samples")
        dropped = min(LEVELS - 1, round(self.share * LEVELS))
        # The masks do not contain the factor: rounded to 16 bits it would change the mean.
        return (x * self._masks(x, dropped)).mul_(LEVELS / (LEVELS - dropped))

    def _masks(self, x: Tensor, dropped: int) -> Tensor:
        """The samples' masks of zeros and ones, cut to this rank's part if `section` is set."""
        shape = list(x.shape)
        dim, index, parts = self.section or (1, 0, 1)
        shape[dim] *= parts
        elements = math.prod(shape[1:])
        words = -(-elements // PER_WORD)
        keys = _keys(self.seeds, self.place, x.device)
        counts = torch.arange(1, words + 1, device=x.device).mul_(signed(GAMMA))
        masks = torch.empty(len(x), elements, dtype=x.dtype, device=x.device)
        step = max(1, HASHES_AT_ONCE // max(1, words))
        for begin in range(0, len(x), step):
            drawn = scrambled(keys[begin : begin + step] + counts).view(torch.int16)
            torch.ge(drawn[:, :elements], dropped - LEVELS // 2, out=masks[begin : begin + step])
        return masks.view(shape).chunk(parts, dim)[index]


def uniforms(
    seeds: Sequence[int] | Tensor, place: int, count: int, device: torch.device | None = None
) -> Tensor:
    """Random numbers of samples, which follow from their seeds alone.

    Args:
        seeds: a seed for each of B samples, below 2^63.
        place: a number that differs between the draws for one sample.
        count: how many numbers of each sample.
        device: where to compute them.

    Returns:
        Numbers from 0 to below 1, float64 (B, count).
    """
    counts = torch.arange(1, count + 1, device=device).mul_(signed(GAMMA))
    drawn = scrambled(_keys(seeds, place, device) + counts)
    return _shifted(drawn, 11).double().mul_(2.0**-53)


def _keys(seeds: Sequence[int] | Tensor, place: int, device: torch.device | None) -> Tensor:
    """The keys of samples' random numbers at a place, int64 (B, 1)."""
    given = torch.as_tensor(seeds, dtype=torch.int64, device=device)
    return scrambled(given + (place + 1) * GAMMA % (1 << 63)).unsqueeze(1)


def scrambled(numbers: Tensor) -> Tensor:
    """Hash a tensor of int64, in place."""
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        numbers ^= _shifted(numbers, shift)
        numbers *= signed(factor)
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def signed(number: int) -> int:
    """The number of int64 that has the same 64 bits. Products of both wrap around alike."""
    return number - (1 << 64)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift the bits of int64 numbers to the right, with zeros in front."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class SeedsInUse:
    """Keeps the seeds that a model's dropout layers have now, to set them again later.

    A backward pass that recomputes activations (torch.utils.checkpoint) has to draw the masks of
    its own forward pass. By then the layers may have other seeds, because a pipeline has several
    micro-batches under way.

    Args:
        dropouts: all dropout layers of the model.
    """

    def __init__(self, dropouts: Sequence[SampleDropout]) -> None:
        self.dropouts = dropouts
        self._seeds = [dropout.seeds for dropout in dropouts]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which the dropout layers have the kept seeds."""
        later = [dropout.seeds for dropout in self.dropouts]
        self._set(self._seeds)
        try:
            yield
        finally:
            self._set(later)

    def _set(self, seeds: Sequence[Sequence[int] | Tensor]) -> None:
        for dropout, its in zip(self.dropouts, seeds, strict=True):
            dropout.seeds = its
