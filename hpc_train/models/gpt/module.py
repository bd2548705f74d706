"""GPT: a decoder-only transformer language model with pre-norm blocks.

Architecture and initialisation are from Radford et al., "Language models are unsupervised multitask
learners" (GPT-2, 2019). The tied embeddings are from Press and Wolf,
https://arxiv.org/abs/1608.05859. Shapes use B samples, T tokens, C channels, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.attention import Attention
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.foreign import Converted
from hpc_train.models.gpt import gpt2
from hpc_train.models.initial import fill
from hpc_train.models.language import LanguageModel
from hpc_train.models.linear import Linear


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


class GPT(LanguageModel):
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
    """

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
        super().__init__(layers, dropout)
        self.sequence = sequence
        self.sizes = {"vocab": vocab, "sequence": sequence, "layers": layers, "hidden": hidden}
        self.sizes |= {"heads": heads, "tie_embeddings": tie_embeddings}
        self.embedding = Embedding(vocab, sequence, hidden, dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout, i) for i in range(layers))
        self.head = Head(hidden, vocab)
        if tie_embeddings:
            self.head.output.weight = self.embedding.token.weight
        fill(self)

    def foreign_weights(
        self, about: Mapping[str, Any], *, whole: bool
    ) -> Callable[[str], Converted | None]:
        """Choose how weights are converted for this model: see `gpt2.foreign_weights`."""
        return gpt2.foreign_weights(self.sizes, about, whole=whole)

    def logits(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Compute logits (B, T, V). Arguments are as for the base."""
        x = self.embedding(tokens, positions)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits
