"""Rotary position embeddings: queries and keys are rotated by angles that grow with the position.

The method is from Su et al., "RoFormer: enhanced transformer with rotary position embedding",
https://arxiv.org/abs/2104.09864. The slower rotations for longer texts are those of Llama 3.1:
Grattafiori et al., "The Llama 3 herd of models", https://arxiv.org/abs/2407.21783. Channels are
paired as Hugging Face's models pair them: the first half of a head with its second half.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# What Llama 3.1 to 3.3 have in `rope_scaling`, all alike.
LOW_FREQUENCY, HIGH_FREQUENCY, ORIGINAL_LENGTH = 1.0, 4.0, 8192


class Rotary:
    """The rotations of a head's channels.

    Args:
        width: channels D of a head, an even number.
        theta: the base of the angles: pair i turns by theta^(-2i / D) per token.
        factor: how much slower the slowest pairs turn, as in Llama 3.1. 1 changes none.
    """

    def __init__(self, width: int, theta: float, factor: float = 1.0) -> None:
        self.width, self.theta, self.factor = width, theta, factor
        self._near: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def angles(self) -> Tensor:
        """The angle of each pair per token, float64 (D / 2)."""
        angles = self.theta ** -(torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        if self.factor != 1:
            # Pairs that turn fewer times than LOW_FREQUENCY over the original length become slower
            # by the factor, those above HIGH_FREQUENCY stay, and between them it is a blend.
            turns = ORIGINAL_LENGTH * angles / (2 * math.pi)
            share = (turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
            share = share.clamp(0, 1)
            angles = (1 - share) * angles / self.factor + share * angles
        return angles

    def table(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines of all pairs at some positions.

        Args:
            positions: int64 of shape (B, T).
            dtype: type of the model's parameters. The table has it, or 32 bits if it has fewer.

        Returns:
            A tensor (2, B, T, 1, D / 2), which is given to `rotated`.
        """
        wide = torch.promote_types(dtype, torch.float32)
        place = positions.device, wide
        if place not in self._near:  # once, as a copy to a GPU waits for it
            self._near[place] = self.angles().to(wide).to(positions.device)
        turned = positions.unsqueeze(-1).to(wide) * self._near[place]
        return torch.stack([turned.cos(), turned.sin()]).unsqueeze(3)


class _Rotation(torch.autograd.Function):
    """Turns both halves of a tensor's last dimension into each other, without copies besides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    one, other = turned.chunk(2, -1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=other).addcmul_(first, sin)
    return turned


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """Rotate queries or keys of shape (B, T, H, D) by a `Rotary.table`; they keep their type."""
    cos, sin = table
    if x.dtype == table.dtype and not torch.compiler.is_compiling():
        turned: Tensor = _Rotation.apply(x, cos, sin)
        return turned
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
