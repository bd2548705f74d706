"""The costs that all language models share, without torch. T tokens, C channels, V vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from hpc_train.models.shape import UNDIVIDED, Division, PartCost, Shape


@dataclass(frozen=True, kw_only=True)
class LanguageShape(Shape):
    """The sizes of a language model.

    Args:
        heads: number of attention heads.
        vocab: vocabulary size V.
        sequence: the largest number of tokens T of a sample.
        dropout: probability of dropping an element.
        tie_embeddings: whether the output layer shares the token embedding's weights.
    """

    NORM: ClassVar[int]
    """Number of parameters of a norm per channel."""

    heads: int
    vocab: int
    sequence: int
    dropout: float = 0.0
    tie_embeddings: bool = True

    @property
    def tokens(self) -> int:
        """The largest number of tokens of a sample."""
        return self.sequence

    @property
    def described(self) -> str:
        """The sizes that follow from the data, in words."""
        return f"vocabulary: {self.vocab}"

    def divided(self, division: Division) -> dict[str, int]:
        """The sizes that the ranks of a tensor group divide, by their keys in the configuration."""
        sequence = {"sequence": self.sequence} if division.sequence_parallel else {}
        return {"heads": self.heads, "vocab": self.vocab, **sequence}

    def parts(self, division: Division = UNDIVIDED) -> list[PartCost]:
        """The costs of the embedding, each block and the head, in this order."""
        blocks = [self._block(division)] * self.layers
        return [self._embedding(division), *blocks, self._head(division)]

    @property
    def tied(self) -> int:
        """Elements of the matrix that the embedding and the head share; 0 if they share none."""
        return self.vocab * self.hidden if self.tie_embeddings else 0

    @abstractmethod
    def _block(self, division: Division) -> PartCost:
        """The cost of a block."""

    def _embedding(self, division: Division) -> PartCost:
        """The cost of the table of tokens. Activations are the dropout's mask."""
        T, C = self.sequence, self.hidden
        masks = T * C * self._masks / division.cut
        return PartCost(
            parameters=self.vocab * C // division.tp,
            weights=0.0,
            flops=0.0,
            activations=masks,
            wide=masks,
            sums=(0.5, 0.5) if division.sequence_parallel else (1.0, 0.0),
            overhead=0.5,
        )

    def _head(self, division: Division) -> PartCost:
        """The cost of a norm and of the product with the output matrix.

        A tied output matrix is stored twice if head and embedding are on different ranks.
        Activations are the inputs of norm and product, and the logarithms of the softmax.
        """
        T, C, V = self.sequence, self.hidden, self.vocab
        stored = 0 if self.tie_embeddings and division.pp == 1 else V * C // division.tp
        return PartCost(
            parameters=self.NORM * C + stored,
            weights=float(V * C),
            flops=2 * T * float(V * C),
            activations=T * (2 * C / division.cut + V / division.tp),
            wide=T * (C / division.cut + V / division.tp),
            sums=(0.5, 1.0) if division.sequence_parallel else (0.0, 1.0),
            overhead=0.5,
        )

    @property
    def _masks(self) -> int:
        """1 if dropout has masks to keep, else 0."""
        return int(self.dropout > 0)
