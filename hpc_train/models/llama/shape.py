"""The costs of a Llama, without torch. T tokens, C channels, V vocabulary, as in module.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hpc_train.models.language_shape import LanguageShape
from hpc_train.models.shape import Division, PartCost, narrower

if TYPE_CHECKING:
    from hpc_train.models.llama.module import Llama, LlamaBlock


@dataclass(frozen=True, kw_only=True)
class LlamaShape(LanguageShape):
    """The sizes of a `Llama`, and what a model with these sizes costs.

    What is shared, and what counts, is as for `GptShape`. The numbers are counted for our block.

    Args:
        layers: number of blocks.
        hidden: channels C of the residual stream.
        heads: attention heads H.
        kv_heads: heads K of keys and values; they divide `heads`.
        head_width: channels D of a head, an even number.
        mlp_width: channels F inside each MLP.
        vocab: vocabulary size V.
        sequence: largest number of tokens T that it is trained on.
        dropout: probability of dropping an element, after the embedding and in each residual
            branch.
        tie_embeddings: whether the output layer shares the token embedding's weights.
        rope_theta: the base of the rotations (`rotary.Rotary`).
        rope_factor: how much slower the slowest rotations are, as in Llama 3.1; 1 changes none.
        norm_eps: what norms add to the mean square.
    """

    KIND: ClassVar[str] = "llama"
    QKV_BIAS: ClassVar[bool] = False
    HEAD_NORMS: ClassVar[bool] = False
    NORM: ClassVar[int] = 1
    NOTE: ClassVar[str] = """\
numbers that a rank keeps per token of a micro-batch: in a block 4 x hidden
+ (head_width x (2 x heads + 2 x kv_heads) + 3 x mlp_width) / tp, with
dropout 2 x hidden more, and in the head 2 x hidden + vocab / tp. Norms of
queries and keys keep theirs besides. A block that is recomputed keeps
hidden, and one block at a time has the rest. With sequence_parallel, tp
divides all of it"""

    kv_heads: int
    head_width: int
    mlp_width: int
    rope_theta: float
    rope_factor: float = 1.0
    norm_eps: float
    tie_embeddings: bool = False

    def divided(self, division: Division) -> dict[str, int]:
        """The sizes that the ranks of a tensor group divide, by their keys in the configuration."""
        own = {"kv_heads": self.kv_heads, "mlp_width": self.mlp_width}
        return own | super().divided(division)

    @property
    def identity(self) -> dict[str, str | float]:
        """The sizes that tensors' shapes do not show, by their keys in the configuration."""
        keys = ("heads", "kv_heads", "rope_theta", "rope_factor", "norm_eps")
        return {"model.kind": self.KIND, **{f"model.{key}": getattr(self, key) for key in keys}}

    def at_most(self, tokens: int, width: int) -> Self:
        """This shape with at most `tokens` tokens and `width` channels. Heads keep their width."""
        hidden, heads = narrower(self.hidden, self.heads, width)
        return replace(
            self,
            hidden=hidden,
            heads=heads,
            kv_heads=math.gcd(self.kv_heads, heads),
            mlp_width=max(1, self.mlp_width * hidden // self.hidden),
            sequence=min(self.sequence, tokens),
        )

    def build(self) -> Llama:
        """The module with its initial weights, drawn from torch's generator; loads torch."""
        from hpc_train.models.llama.module import Llama

        return Llama(self)

    def build_unfilled(self, dtype: Any) -> Llama:
        """The module without values, which takes no memory yet; loads torch."""
        from hpc_train.models.initial import unfilled
        from hpc_train.models.llama.module import Llama

        return unfilled(Llama, dtype, shape=self)

    def block(self) -> LlamaBlock:
        """A block without dropout, to measure it; loads torch."""
        from hpc_train.models.llama.module import lone_block

        return lone_block(self)

    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size."""
        rows, wide = self._qkv_rows, self.heads * self.head_width
        edges = (self.hidden + rows) + (wide + self.hidden) + 3 * (self.hidden + self.mlp_width)
        edges -= self.hidden  # gate and up are one matrix, with the columns once
        return rank * edges / self._matrices

    @property
    def _qkv_rows(self) -> int:
        """The rows of the matrix for queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def _matrices(self) -> float:
        """The elements of a block's matrices."""
        wide = self.heads * self.head_width
        return float(self.hidden * (self._qkv_rows + wide + 3 * self.mlp_width))

    def _block(self, division: Division) -> PartCost:
        """The cost of a block's products, and of causal attention, which computes half of each.

        Each rank keeps the inputs of two norms and of two linear layers, and two dropout masks;
        with sequence parallelism only its part of them. The tensor group shares queries, keys and
        values as attention takes them, its result, and in the MLP the gate, the other factor, and
        their product. Selective recomputation keeps the block's input, the results of all linear
        layers, and what attention takes and gives.
        """
        T, C, tp = self.sequence, self.hidden, division.tp
        rows, wide, mlp = self._qkv_rows, self.heads * self.head_width, self.mlp_width
        normed = self.HEAD_NORMS * (self.heads + self.kv_heads) * self.head_width
        small = 2 * C + 2 * self.head_width * self.HEAD_NORMS
        biases = rows // tp * self.QKV_BIAS
        return PartCost(
            parameters=int(self._matrices) // tp + biases + small,
            weights=self._matrices,
            flops=2 * T * self._matrices + 2.0 * T * T * wide,
            activations=T
            * (C * (4 + 2 * self._masks) / division.cut + (rows + normed + wide + 3 * mlp) / tp),
            wide=2 * T * C / division.cut,
            sums=(2.0, 3.0) if division.sequence_parallel else (2.0, 2.0),
            overhead=1.0,
            recomputed={
                "selective": T * (3 * C / division.cut + (2 * rows + wide + 2 * mlp) / tp),
                "full": T * C / division.cut,
            },
            gradients=T * (C / division.cut + 2 * mlp / tp),
        )


class MistralShape(LlamaShape):
    """A Mistral computes what a Llama does."""

    KIND: ClassVar[str] = "mistral"


class Qwen2Shape(LlamaShape):
    """A Qwen2 is a Llama whose queries, keys and values have a bias."""

    KIND: ClassVar[str] = "qwen2"
    QKV_BIAS: ClassVar[bool] = True


class Qwen3Shape(LlamaShape):
    """A Qwen3 is a Llama that normalizes each head's queries and keys."""

    KIND: ClassVar[str] = "qwen3"
    HEAD_NORMS: ClassVar[bool] = True
