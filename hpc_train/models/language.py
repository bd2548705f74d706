"""What all language models here share: the loss of tokens, and documents within a sample.

Shapes use B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hpc_train.models.dropout import SampleDropout, seeds_near
from hpc_train.models.initial import Initial

INIT_STD = 0.02
NOT_COUNTED = -100  # the target of a token that has none, as in torch


class TokenLoss(nn.CrossEntropyLoss):
    """The cross-entropy of each target in nats, 0 for those that do not count."""

    def __init__(self) -> None:
        super().__init__(ignore_index=NOT_COUNTED, reduction="none")

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses (N) of logits (N, V) and targets (N), of 32 bits or more."""
        # autocast converts 16-bit logits on GPUs only.
        return super().forward(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask with which a token attends to itself and to tokens before it in its document.

    It has numbers to add, because torch makes them of truth values anew in each block, and keeps
    them for the backward pass.

    Args:
        positions: int64 of shape (B, T), 0 where a document begins.
        dtype: torch's type of the queries.

    Returns:
        0 or minus infinity, (B, 1, T, T).
    """
    document = (positions == 0).cumsum(1)
    seen = (document.unsqueeze(2) == document.unsqueeze(1)).tril().unsqueeze(1)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def counted_targets(batch: Sequence[Tensor]) -> int:
    """Number of targets that count in a batch of tokens, targets and maybe positions."""
    return int((batch[1] != NOT_COUNTED).sum())


class LanguageModel(nn.Module, ABC):
    """The base of language models.

    Args:
        layers: number of blocks.
        dropout: probability with which the model's dropout layers drop an element.

    The attribute `loss_over` says what the loss is the mean over: "sample" or "token", as
    `data.loss` does. The Trainer sets it.
    """

    stages = ("embedding", "blocks.*", "head")
    memory_blocks = ("blocks.*",)

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        # Drawn first, because modules draw numbers only if they are filled when they are built.
        self.initial_seed = int(torch.randint(1 << 62, (), device="cpu"))
        self.drops = dropout > 0
        self.end_std = INIT_STD / math.sqrt(2 * layers)
        self.loss = TokenLoss()
        self.loss_over: Literal["sample", "token"] = "sample"

    def initial(self, name: str) -> Initial:
        """How the parameter of this name begins."""
        if name.endswith("bias"):
            return Initial()
        if "norm" in name:
            return Initial(mean=1.0)
        # Layers that add to the residual stream start smaller, by the root of their number.
        ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
        return Initial(std=self.end_std if ends else INIT_STD)

    def seed_samples(self, seeds: Sequence[int]) -> None:
        """Set the seeds of dropout for the next forward pass, one for each sample."""
        if not self.drops:
            return  # walking through all modules takes time, and no layer would use the seeds
        kept = seeds_near(self, seeds)
        for module in self.modules():
            if isinstance(module, SampleDropout):
                module.seeds = kept

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute logits, or with targets the mean cross-entropy.

        Args:
            tokens: int64 of shape (B, T).
            targets: int64 of shape (B, T), the token that follows each one. Those that are -100 do
                not count.
            positions: int64 of shape (B, T), the place of each token in its document, from 0. A
                token attends to its own document only. By default a sample is one document.

        Returns:
            Logits of shape (B, T, V), or the loss in nats per token, a scalar of 32 bits or more. A
            sample without a target that counts has a loss of 0.
        """
        logits = self.logits(tokens, positions, self._mask(positions))
        if targets is None:
            return logits
        losses: Tensor = self.loss(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
        counted = targets != NOT_COUNTED
        if self.loss_over == "token":
            return losses.sum() / counted.sum().clamp(min=1)
        return (losses.sum(1) / counted.sum(1).clamp(min=1)).mean()

    @abstractmethod
    def logits(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Compute logits (B, T, V).

        Args:
            tokens: as for `forward`.
            positions: as for `forward`.
            mask: the mask of samples with several documents: see `document_mask`.
        """

    def _mask(self, positions: Tensor | None) -> Tensor | None:
        """The mask of documents, in the type that queries have: the parameters' or autocast's."""
        if positions is None:
            return None
        device = positions.device.type
        autocast = torch.is_autocast_enabled(device)
        kind = next(self.parameters()).dtype
        return document_mask(positions, torch.get_autocast_dtype(device) if autocast else kind)
