"""Llama and its relatives: language models with RMS norms, rotary positions, and gated MLPs.

The architecture is from Touvron et al., "LLaMA: open and efficient foundation language models",
https://arxiv.org/abs/2302.13971. Heads that share keys and values are from Ainslie et al., "GQA:
training generalized multi-query transformer models", https://arxiv.org/abs/2305.13245, and the
gated MLP from Shazeer, "GLU variants improve transformer", https://arxiv.org/abs/2002.05202.
Qwen2 has biases at queries, keys and values besides, and Qwen3 norms of each head's queries and
keys. Shapes use B samples, T tokens, C channels, H heads of D channels, K heads of keys and values,
F channels inside the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.models.dropout import SampleDropout
from hpc_train.models.foreign import Converted
from hpc_train.models.initial import fill
from hpc_train.models.kept import kept_with_its_graph
from hpc_train.models.language import LanguageModel
from hpc_train.models.linear import Linear
from hpc_train.models.llama import hugging_face
from hpc_train.models.llama.rotary import Rotary, rotated
from hpc_train.models.llama.shape import LlamaShape
from hpc_train.models.rms_norm import HeadNorm, RmsNorm


class _SwiGluFunction(torch.autograd.Function):
    """silu(gate) * up of x (..., 2, W), whose last rows but one are gate and up.

    It keeps x only, where torch's functions keep silu(gate) besides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.unbind(-2)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.unbind(-2)
        dx = torch.empty_like(x)
        dgate, dup = dx.unbind(-2)
        dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
        torch.mul(F.silu(gate), dy, out=dup)
        return dx


class SwiGlu(nn.Module):
    """The position-wise layers: a product of two linear layers, one of them with a SiLU.

    One matrix has the rows of both layers. They lie in `groups` groups, each with its rows of the
    gate in front. So a tensor-parallel rank's consecutive rows belong together.

    Args:
        hidden: channels C.
        width: channels F between the layers.
        groups: number of groups, which divides F.
    """

    def __init__(self, hidden: int, width: int, groups: int) -> None:
        super().__init__()
        self.group_width = width // groups
        self.gate_up = Linear(hidden, 2 * width, bias=False)
        self.down = Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape."""
        both = self.gate_up(x).unflatten(-1, (-1, 2, self.group_width))
        transformed: Tensor = self.down(_SwiGluFunction.apply(both).flatten(-2))
        return transformed


class GroupedAttention(nn.Module):
    """Causal self-attention in which several heads share their keys and values.

    Args:
        hidden: channels C.
        heads: number of heads H.
        kv_heads: number of heads K of keys and values, which divides H.
        rotary: the rotations of queries and keys.
        qkv_bias: whether the products for queries, keys and values have a bias.
        norm_eps: the epsilon of norms of queries and keys; None for no such norms.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        rotary: Rotary,
        *,
        qkv_bias: bool,
        norm_eps: float | None,
    ) -> None:
        super().__init__()
        width = rotary.width
        self.rotary, self.group, self.head_width = rotary, heads // kv_heads, width
        self.qkv = Linear(hidden, (heads + 2 * kv_heads) * width, bias=qkv_bias)
        self.query_norm = HeadNorm(width, norm_eps) if norm_eps is not None else nn.Identity()
        self.key_norm = HeadNorm(width, norm_eps) if norm_eps is not None else nn.Identity()
        self.out = Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend within x of shape (B, T, C); returns the same shape.

        Args:
            x: the activations.
            table: `Rotary.table` of the tokens' positions; by default they are 0 to T - 1.
            mask: what is added to the logarithms of weights, (B, 1, T, T). It takes the place of
                the causal mask.
        """
        # Rows are ordered by the heads of keys and values, each behind its heads of queries, so
        # that a rank's consecutive rows are whole groups.
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_width))  # (B, T, K, ., D)
        query, key, value = qkv.split([self.group, 1, 1], dim=3)
        if table is None:
            positions = torch.arange(qkv.shape[1], device=x.device).unsqueeze(0)
            table = self.rotary.table(positions, self.qkv.weight.dtype)
        query = rotated(self.query_norm(query).flatten(2, 3), table)  # (B, T, H, D)
        key = rotated(self.key_norm(key).flatten(2, 3), table)
        value = value.flatten(2, 3)
        if isinstance(self.key_norm, nn.Identity):  # norms keep all of `qkv`
            value = value.contiguous()  # else it would be kept for these numbers alone
        how: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}
        if self.group > 1 and value.is_cuda and (mask is not None or value.dtype.itemsize > 2):
            # On GPUs only the kernel for 16 bits without a mask lets heads share keys and values.
            key, value = (part.repeat_interleave(self.group, 2) for part in (key, value))
        elif self.group > 1:
            how["enable_gqa"] = True
        attend = F.scaled_dot_product_attention
        heads = (part.transpose(1, 2) for part in (query, key, value))
        y = kept_with_its_graph(attend, *heads, **how)
        joined: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return joined


class LlamaBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    Args:
        hidden: channels C.
        attention: the attention.
        mlp: the MLP.
        norm_eps: the epsilon of the norms.
        dropout: probability of dropping an element of what is added.
        index: the number of the block, from 0.
    """

    def __init__(
        self,
        hidden: int,
        attention: GroupedAttention,
        mlp: SwiGlu,
        *,
        norm_eps: float,
        dropout: float,
        index: int,
    ) -> None:
        super().__init__()
        self.norm_attention = RmsNorm(hidden, norm_eps)
        self.attention = attention
        self.dropout_attention = SampleDropout(dropout, 2 * index + 1)
        self.norm_mlp = RmsNorm(hidden, norm_eps)
        self.mlp = mlp
        self.dropout_mlp = SampleDropout(dropout, 2 * index + 2)

    def forward(self, x: Tensor, table: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape. See `GroupedAttention`."""
        x = x + self.dropout_attention(self.attention(self.norm_attention(x), table, mask))
        added: Tensor = self.dropout_mlp(self.mlp(self.norm_mlp(x)))
        return x + added


class LlamaEmbedding(nn.Module):
    """The embedding of tokens."""

    def __init__(self, vocab: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.dropout = SampleDropout(dropout, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed int64 tokens of shape (B, T) in (B, T, C)."""
        embedded: Tensor = self.dropout(self.token(tokens))
        return embedded


class LlamaHead(nn.Module):
    """The last norm, and the product with the output embedding."""

    def __init__(self, hidden: int, vocab: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RmsNorm(hidden, norm_eps)
        self.output = Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn x of shape (B, T, C) into logits of shape (B, T, V)."""
        logits: Tensor = self.output(self.norm(x))
        return logits


class Llama(LanguageModel):
    """A language model of the kinds llama, mistral, qwen2 and qwen3.

    `stages` and `tensor_plan` say how ranks can share it (see docs/reference/parallel.md),
    `memory_blocks` which modules can be recomputed (docs/how-to/memory.md).

    Args:
        shape: its sizes.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape.layers, shape.dropout)
        self.kind, self.sizes, self.sequence = shape.KIND, asdict(shape), shape.sequence
        self.rotary = _rotary_of(shape)
        self.embedding = LlamaEmbedding(shape.vocab, shape.hidden, shape.dropout)
        self.blocks = nn.ModuleList(
            _block_of(shape, self.rotary, index) for index in range(shape.layers)
        )
        self.head = LlamaHead(shape.hidden, shape.vocab, shape.norm_eps)
        self.tensor_plan = {
            "embedding.token": "vocab",
            "blocks.*.attention.qkv": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.gate_up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "head.output": "vocab",
            "loss": "vocab",
        }
        if shape.HEAD_NORMS:
            names = ("query_norm", "key_norm")
            self.tensor_plan |= {f"blocks.*.attention.{name}": "colwise" for name in names}
        if shape.tie_embeddings:
            self.head.output.weight = self.embedding.token.weight
        fill(self)

    def foreign_weights(
        self, about: Mapping[str, Any], *, whole: bool
    ) -> Callable[[str], Converted | None]:
        """Choose how weights are converted for this model: see `hugging_face.llama_weights`."""
        return hugging_face.llama_weights(self.kind, self.sizes, about, whole=whole)

    def logits(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Compute logits (B, T, V). Arguments are as for the base."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        table = self.rotary.table(positions, next(self.parameters()).dtype)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, table, mask)
        logits: Tensor = self.head(x)
        return logits


def lone_block(shape: LlamaShape) -> LlamaBlock:
    """A block without dropout, outside of a model."""
    return _block_of(replace(shape, dropout=0.0), _rotary_of(shape), 0)


def _rotary_of(shape: LlamaShape) -> Rotary:
    return Rotary(shape.head_width, shape.rope_theta, shape.rope_factor)


def _block_of(shape: LlamaShape, rotary: Rotary, index: int) -> LlamaBlock:
    attention = GroupedAttention(
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        rotary,
        qkv_bias=shape.QKV_BIAS,
        norm_eps=shape.norm_eps if shape.HEAD_NORMS else None,
    )
    groups = math.gcd(shape.mlp_width, shape.kv_heads)
    return LlamaBlock(
        shape.hidden,
        attention,
        SwiGlu(shape.hidden, shape.mlp_width, groups),
        norm_eps=shape.norm_eps,
        dropout=shape.dropout,
        index=index,
    )
