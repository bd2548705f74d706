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

import numpy as np
import torch
from torch import Tensor, nn

from hpc_train.seeds import FIRST_FACTOR, GAMMA, SECOND_FACTOR, scramble

PER_WORD = 4  # numbers of 16 bits in one of 64
LEVELS = 1 << 16
AT_ONCE_ALONE, AT_ONCE = 1 << 15, 1 << 17
"""Hashes that are computed at once by one thread, and by several or a GPU. They stay in a cache."""


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
        return self.dropped(x) if self.drops else x

    def dropped(self, x: Tensor) -> Tensor:
        """Drop elements of x (see `forward`)."""
        every = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows, masks in self.masks(x):
            every[rows] = masks
        return (x * every).mul_(self.factor)

    @property
    def drops(self) -> bool:
        """Whether elements are dropped at present."""
        return self.training and self.share > 0

    @property
    def factor(self) -> float:
        """The factor of the elements that are left, so that the mean stays as it is.

        The masks do not contain it: rounded to 16 bits it would change the mean.
        """
        return LEVELS / (LEVELS - self._dropped)

    @property
    def _dropped(self) -> int:
        return min(LEVELS - 1, round(self.share * LEVELS))

    def masks(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield masks of zeros and ones for x, of shape (B, ...): those of some samples at a time.

        They are cut to this rank's part if `section` is set. B seeds must have been set.
        """
        if len(self.seeds) != len(x):
            raise ValueError(f"{len(x)} samples but {len(self.seeds)} seeds: call seed_samples")
        shape = list(x.shape)
        dim, index, parts = self.section or (1, 0, 1)
        shape[dim] *= parts
        elements = math.prod(shape[1:])
        words = -(-elements // PER_WORD)
        keys = _keys(self.seeds, self.place, x.device)
        counts = torch.arange(1, words + 1, device=x.device).mul_(signed(GAMMA))
        at_once = AT_ONCE_ALONE if _is_alone(x.device) else AT_ONCE
        step = max(1, at_once // max(1, words))
        for begin in range(0, len(x), step):
            drawn = scrambled(keys[begin : begin + step] + counts).view(torch.int16)
            masks = torch.empty(len(drawn), elements, dtype=x.dtype, device=x.device)
            # Without `out`, torch makes truth values, which takes 3 times as long.
            torch.ge(drawn[:, :elements], self._dropped - LEVELS // 2, out=masks)
            masks = masks.view(len(masks), *shape[1:]).chunk(parts, dim)[index]
            yield slice(begin, begin + step), masks


def seeds_near(model: nn.Module, seeds: Sequence[int]) -> Tensor:
    """Seeds of samples, int64 (B), where a model's dropout layers need them.

    They are copied once for all layers, and the processor does not wait for the copy.
    """
    near = torch.as_tensor(seeds, dtype=torch.int64)
    first = next(model.parameters(), near)
    return near.pin_memory().to(first.device, non_blocking=True) if first.is_cuda else near


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
    if _is_alone(numbers.device) and not torch.compiler.is_compiling():
        # NumPy shifts without signs, in one pass over the memory, but has one thread only.
        scramble(numbers.numpy().view(np.uint64))
        return numbers
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        numbers ^= _shifted(numbers, shift)
        numbers *= signed(factor)
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _is_alone(device: torch.device) -> bool:
    """Whether one thread of a processor computes."""
    return device.type == "cpu" and torch.get_num_threads() == 1


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
