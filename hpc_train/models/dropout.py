"""Dropout whose masks belong to the samples, not to the process that computes them.

PyTorch's dropout draws from one stream per process. If a batch is cut over other ranks or
micro-batches, every mask changes. Here each sample brings a seed. Its masks, and so the loss, are
the same on every layout and after every resume, and no generator state has to be saved. The idea of
keys in place of streams is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpc_train.seeds import mix


class SampleDropout(nn.Module):
    """Dropout for tensors whose first dimension runs over samples.

    Args:
        share: probability that an element is dropped.
        place: a number that differs between the dropout layers of one model.
    """

    def __init__(self, share: float, place: int) -> None:
        super().__init__()
        self.share = share
        self.place = place
        self.seeds: Sequence[int] = ()
        self.section: tuple[int, int, int] | None = None
        """(dim, index, parts): x is only part `index` of `parts` equal parts along a dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x, of shape (B, ...), in training; B seeds must have been set."""
        if not self.training or self.share == 0:
            return x
        if len(self.seeds) != len(x):
            raise ValueError(f"{len(x)} samples but {len(self.seeds)} seeds: call seed_samples")
        masks = torch.stack([self._mask(x, seed) for seed in self.seeds])
        # The masks do not contain the factor: rounded to 16 bits it would change the mean.
        return (x * masks).mul_(1 / (1 - self.share))

    def _mask(self, x: Tensor, seed: int) -> Tensor:
        """One sample's mask of zeros and ones, cut to this rank's part if `section` is set."""
        generator = torch.Generator(x.device).manual_seed(mix(seed, self.place))
        shape = list(x.shape[1:])
        if self.section is None:
            drawn = torch.rand(shape, generator=generator, device=x.device)
        else:
            dim, index, parts = self.section
            dim = dim % x.dim() - 1
            shape[dim] *= parts
            drawn = torch.rand(shape, generator=generator, device=x.device)
            drawn = drawn.chunk(parts, dim)[index]
        return (drawn >= self.share).to(x.dtype)


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

    def _set(self, seeds: Sequence[Sequence[int]]) -> None:
        for dropout, its in zip(self.dropouts, seeds, strict=True):
            dropout.seeds = its
