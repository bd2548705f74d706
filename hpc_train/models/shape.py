"""What planning, measuring and training ask of an architecture; without torch.

An architecture is a folder beside this file. It has a `Shape` and the module that the shape builds;
`kinds.py` has one line for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from hpc_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the ranks of one replica divide a model.

    Args:
        tp: number of ranks that share each layer.
        pp: number of ranks that the layers are divided over.
        chunks: runs of layers that each of these has.
        sequence_parallel: whether ranks that share layers divide the tokens between them.
    """

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sequence_parallel: bool = False


UNDIVIDED = Division()


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """What the embedding, a block or the head costs.

    Args:
        parameters: number of parameters on a rank that has the part.
        weights: number of elements in the matrices of its products, on all ranks that share them.
        flops: floating-point operations of a sample's forward pass, on all those ranks.
        activations: numbers that a rank keeps for the backward pass of a sample.
        sums: how often the tensor group sums a micro-batch's activations, in the forward and in the
            backward pass. A gather, or a sum of which each rank keeps a part, is half of one.
        overhead: the time that the part takes however small the micro-batch is, as a share of a
            block's.
    """

    parameters: int
    weights: float
    flops: float
    activations: float
    sums: tuple[float, float]
    overhead: float


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The sizes of a language model: equal blocks between an embedding and a head.

    Args:
        layers: number of blocks.
        hidden: width of what a block hands on to the next one.
        heads: number of attention heads; they divide `hidden`.
        vocab: vocabulary size.
        sequence: largest number of tokens of a sample.
    """

    NOTE: ClassVar[str]
    """How activations are counted, in words."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int

    @abstractmethod
    def build(self) -> Any:
        """The module with its initial weights, drawn from torch's generator; loads torch."""

    @abstractmethod
    def block(self) -> Any:
        """A block without dropout, to measure it; loads torch."""

    @abstractmethod
    def parts(self, division: Division = UNDIVIDED) -> list[PartCost]:
        """What the embedding, each block and the head cost, in this order.

        Args:
            division: one that passes `check`.
        """

    @property
    @abstractmethod
    def tied(self) -> int:
        """Elements of the matrix that the embedding and the head share; 0 if they share none."""

    @abstractmethod
    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices as products of this rank, as a share of their own."""

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that one replica can be divided over."""
        return self.heads * (self.layers + 2)

    @property
    def identity(self) -> dict[str, int]:
        """The sizes that no tensor's shape tells, by their keys in the configuration."""
        return {"model.heads": self.heads}

    def at_most(self, tokens: int, width: int) -> Self:
        """The same shape with at most these tokens and channels; heads keep their width."""
        head = self.hidden // self.heads
        heads = max(1, min(self.heads, width // head))
        return replace(self, sequence=min(self.sequence, tokens), hidden=heads * head, heads=heads)

    def check(self, division: Division) -> None:
        """Check that ranks can divide the model so.

        Raises:
            ConfigError: they cannot; the message has the nearest sizes that can.
        """
        self._check_tensor_parallel(division)
        if division.pp > 1:
            self._check_pipeline(division)

    def _check_tensor_parallel(self, division: Division) -> None:
        divided = {"heads": self.heads, "vocab": self.vocab}
        if division.sequence_parallel:
            divided["sequence"] = self.sequence
        for key, size in divided.items():
            if size % division.tp:
                raise ConfigError(
                    f"parallel.tp {division.tp} does not divide model.{key} {size}",
                    f"nearest that it divides: model.{key} {_multiples(key, size, division.tp)}",
                )

    def _check_pipeline(self, division: Division) -> None:
        pp, chunks, parts = division.pp, division.chunks, self.layers + 2
        if pp * chunks <= parts:
            return
        virtual = f" x parallel.virtual_stages {chunks}" if chunks > 1 else ""
        near = [f"model.layers {pp * chunks - 2}"]
        if chunks <= parts:
            near.append(f"parallel.pp {parts // chunks}")
        raise ConfigError(
            f"parallel.pp {pp}{virtual} is more than the {parts} parts of the model "
            f"(embedding, {self.layers} layers, head)",
            f"nearest that fits: {', or '.join(near)}",
        )


def _multiples(key: str, size: int, tp: int) -> str:
    """The multiples of tp next to a size; a vocabulary cannot be smaller than the data's."""
    below, above = size // tp * tp, -(-size // tp) * tp
    return str(above) if key == "vocab" or not below else f"{below} or {above}"
