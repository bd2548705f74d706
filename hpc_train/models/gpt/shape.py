"""The costs of a GPT, without torch. T tokens, C channels, V vocabulary, as in module.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hpc_train.models.language_shape import LanguageShape
from hpc_train.models.shape import Division, PartCost, narrower

if TYPE_CHECKING:
    from hpc_train.models.gpt.module import GPT, Block


@dataclass(frozen=True, kw_only=True)
class GptShape(LanguageShape):
    """The arguments of `GPT`, and what a GPT with these sizes costs.

    `heads` is the number of attention heads, which divide `hidden`, `vocab` the vocabulary size,
    and `sequence` the largest number of tokens of a sample.

    The ranks of a tensor group share the matrices, the biases of colwise layers and the vocabulary.
    Only products of matrices, including those of attention, count as operations. A product of T x K
    and K x N takes 2 T K N.

    Activations are those of Korthikanti et al., "Reducing activation recomputation in large
    transformer models", https://arxiv.org/abs/2205.05198, counted for our block. The fused
    attention does not keep the matrix of T x T.
    """

    NORM: ClassVar[int] = 2
    NOTE: ClassVar[str] = """\
numbers that a rank keeps per token of a micro-batch: in a block
hidden x (4 + 12 / tp), with dropout hidden x (6 + 12 / tp), and in the
head 2 x hidden + vocab / tp. A block that is recomputed keeps hidden,
with selective hidden x (3 + 8 / tp), and one block at a time has the
rest. With sequence_parallel, tp divides all of it. From Korthikanti et
al. 2022, https://arxiv.org/abs/2205.05198, without an attention matrix"""

    @property
    def identity(self) -> dict[str, str | float]:
        """The sizes that tensors' shapes do not show, by their keys in the configuration."""
        return {"model.heads": self.heads}

    def at_most(self, tokens: int, width: int) -> Self:
        """This shape with at most `tokens` tokens and `width` channels. Heads keep their width."""
        hidden, heads = narrower(self.hidden, self.heads, width)
        return replace(self, hidden=hidden, heads=heads, sequence=min(self.sequence, tokens))

    def build(self) -> GPT:
        """The module with its initial weights, drawn from torch's generator; loads torch."""
        from hpc_train.models.gpt.module import GPT

        return GPT(**asdict(self))

    def build_unfilled(self, dtype: Any) -> GPT:
        """The module without values, which takes no memory yet; loads torch."""
        from hpc_train.models.gpt.module import GPT
        from hpc_train.models.initial import unfilled

        return unfilled(GPT, dtype, **asdict(self))

    def block(self) -> Block:
        """A block without dropout, to measure it; loads torch."""
        from hpc_train.models.gpt.module import Block

        return Block(self.hidden, self.heads, 0.0, 0)

    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size.

        The matrices are C x 3C, C x C, C x 4C and 4C x C. Their rows and columns add up to 16 C,
        their elements to 12 C^2.
        """
        return 4 * rank / (3 * self.hidden)

    def _embedding(self, division: Division) -> PartCost:
        """The cost of the tables of tokens and positions."""
        tokens = super()._embedding(division)
        return replace(tokens, parameters=tokens.parameters + self.sequence * self.hidden)

    def _block(self, division: Division) -> PartCost:
        """The cost of four products with 12 C^2 weights in all, and of causal attention.

        Attention has two products of T x T x C and computes half of each. Activations are counted
        in units of T x C. Each rank keeps the inputs of two norms and two linear layers, and two
        dropout masks; with sequence parallelism only its part of them. The tensor group shares the
        rest: 3 for query, key and value, 1 for attention's result, 8 for the MLP. Recomputed, each
        keeps the block's input. Selective recomputation also keeps two linear layers' results that
        are summed, and of those that the group shares 3, 1 and 4.
        """
        T, C, tp = self.sequence, self.hidden, division.tp
        weights = 12.0 * C**2
        return PartCost(
            parameters=(12 * C * C + 7 * C) // tp + 6 * C,
            weights=weights,
            flops=2 * T * weights + 2.0 * T * T * C,
            activations=T * C * ((4 + 2 * self._masks) / division.cut + 12 / tp),
            wide=2 * T * C / division.cut,
            sums=(2.0, 3.0) if division.sequence_parallel else (2.0, 2.0),
            overhead=1.0,
            recomputed={
                "selective": T * C * (3 / division.cut + 8 / tp),
                "full": T * C / division.cut,
            },
            gradients=T * C * (1 / division.cut + 4 / tp),
        )
