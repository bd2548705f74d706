"""GPT: a decoder-only transformer language model with pre-norm blocks.

Architecture and initialisation are from Radford et al., "Language models are unsupervised multitask
learners" (GPT-2, 2019). The tied embeddings are from Press and Wolf,
https://arxiv.org/abs/1608.05859. Shapes use B samples, T tokens, C channels, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.attention import Attention
from hpc_train.models.dropout import SampleDropout, seeds_near
from hpc_train.models.gpt import gpt2
from hpc_train.models.initial import Initial, fill
from hpc_train.models.linear import Linear

INIT_STD = 0.02
NOT_COUNTED = -100  # the target of a token that has none, as in torch


class Mlp(nn.Module):
    """The position-wise layers. Between them the width is four times as large, with a GELU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = Linear(hidden, 4 * hidden)
        self.down = Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape."""
        transformed: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return transformed


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, hidden: int, heads: int, dropout: float, index: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=True)
        self.dropout_attention = SampleDropout(dropout, 2 * index + 1)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)
        self.dropout_mlp = SampleDropout(dropout, 2 * index + 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape. `Attention` takes the mask."""
        x = x + self.dropout_attention(self.attention(self.norm_attention(x), mask))
        added: Tensor = self.dropout_mlp(self.mlp(self.norm_mlp(x)))
        return x + added


class Embedding(nn.Module):
    """Token and position embeddings, added."""

    def __init__(self, vocab: int, sequence: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.dropout = SampleDropout(dropout, 0)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed int64 tokens of shape (B, T) in (B, T, C). By default they are at 0 to T - 1."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class Head(nn.Module):
    """The last norm, and the product with the output embedding."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn x of shape (B, T, C) into logits of shape (B, T, V)."""
        logits: Tensor = self.output(self.norm(x))
        return logits


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


class GPT(nn.Module):
    """A GPT language model.

    `stages` and `tensor_plan` say how ranks can share it (see docs/reference/parallel.md),
    `memory_blocks` which modules can be recomputed (docs/how-to/memory.md).

    Args:
        vocab: vocabulary size V.
        sequence: largest number of tokens T that it attends over.
        layers: number of blocks.
        hidden: channels C of the residual stream.
        heads: attention heads; they divide `hidden`.
        dropout: probability of dropping an element, after the embedding and in each residual
            branch.
        tie_embeddings: whether the output layer shares the token embedding's weights.

    The attribute `loss_over` says what the loss is the mean over: "sample" or "token", as
    `data.loss` does. The Trainer sets it.
    """

    stages = ("embedding", "blocks.*", "head")
    memory_blocks = ("blocks.*",)
    tensor_plan: ClassVar[dict[str, str]] = {
        "embedding.token": "vocab",
        "embedding.position": "sequence",
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head.output": "vocab",
        "loss": "vocab",
    }

    def __init__(
        self,
        *,
        vocab: int,
        sequence: int,
        layers: int,
        hidden: int,
        heads: int,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        # Drawn first, because modules draw numbers only if they are filled when they are built.
        self.initial_seed = int(torch.randint(1 << 62, (), device="cpu"))
        self.sequence = sequence
        self.sizes = {"vocab": vocab, "sequence": sequence, "layers": layers, "hidden": hidden}
        self.sizes |= {"heads": heads, "tie_embeddings": tie_embeddings}
        self.drops = dropout > 0
        self.embedding = Embedding(vocab, sequence, hidden, dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout, i) for i in range(layers))
        self.head = Head(hidden, vocab)
        self.loss = TokenLoss()
        self.loss_over: Literal["sample", "token"] = "sample"
        if tie_embeddings:
            self.head.output.weight = self.embedding.token.weight
        fill(self)

    def initial(self, name: str) -> Initial:
        """How the parameter of this name begins."""
        if name.endswith("bias"):
            return Initial()
        if ".norm" in name:
            return Initial(mean=1.0)
        # Layers that add to the residual stream start smaller, by the root of their number.
        ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
        return Initial(std=INIT_STD / math.sqrt(2 * self.sizes["layers"]) if ends else INIT_STD)

    def foreign_weights(
        self, about: Mapping[str, Any], *, whole: bool
    ) -> Callable[[str], gpt2.Converted | None]:
        """Choose how weights are converted for this model: see `gpt2.foreign_weights`."""
        return gpt2.foreign_weights(self.sizes, about, whole=whole)

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
        mask = None
        if positions is not None:
            device = positions.device.type
            autocast = torch.is_autocast_enabled(device)
            kind = next(self.parameters()).dtype
            dtype = torch.get_autocast_dtype(device) if autocast else kind
            mask = document_mask(positions, dtype)
        x = self.embedding(tokens, positions)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        if targets is None:
            return logits
        losses: Tensor = self.loss(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
        counted = targets != NOT_COUNTED
        if self.loss_over == "token":
            return losses.sum() / counted.sum().clamp(min=1)
        return (losses.sum(1) / counted.sum(1).clamp(min=1)).mean()
