"""The interface that planning, measuring and training use of an architecture, without torch.

An architecture is a folder beside this file. It has a `Shape` and the module that the shape builds.
`kinds.py` has one line for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from hpc_train.errors import ConfigError, plural


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the ranks of one replica divide a model.

    Args:
        tp: number of ranks that share each layer.
        pp: number of ranks that the layers are divided over.
        virtual_stages: number of runs of layers that each of these `pp` ranks has.
        sequence_parallel: whether ranks that share layers divide the tokens between them.
    """

    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False

    @property
    def cut(self) -> int:
        """The number of parts that the tokens are cut into between layers."""
        return self.tp if self.sequence_parallel else 1


UNDIVIDED = Division()
WIDE_BYTES = 4  # of a number that is not in 16 bits while products are


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """The cost of the embedding, of a block or of the head.

    Args:
        parameters: number of parameters on a rank that has the part.
        weights: number of elements in the matrices of its products, on all ranks that share them.
        flops: floating-point operations of a sample's forward pass, on all those ranks.
        activations: numbers that a rank keeps for the backward pass of a sample.
        wide: those of them that stay in 32 bits where products have 16: the inputs of norms, which
            are the sums that go from block to block, and what a softmax of the head has.
        recomputed: the same number if the part is recomputed, by the value of memory.recompute,
            selective or full; empty for a part that never is.
        gradients: numbers that the backward pass of a recomputed part has besides, at its peak: the
            gradients of its result and of its widest tensor.
        sums: how many times the tensor group sums a micro-batch's activations in the forward and in
            the backward pass. A gather or a reduce-scatter counts as half a sum.
        overhead: the fixed time that the part takes even for the smallest micro-batch, as a share
            of the fixed time of a block.
    """

    parameters: int
    weights: float
    flops: float
    activations: float
    sums: tuple[float, float]
    overhead: float
    wide: float = 0.0
    recomputed: Mapping[str, float] = field(default_factory=dict)
    gradients: float = 0.0

    def in_bytes(self, item: int, samples: float, tp: int) -> PartCost:
        """The part with bytes in place of numbers, in `activations`, `recomputed` and `gradients`.

        A 16-bit format has a copy of each weight, too, which is kept from a forward pass to its
        backward pass. A part that is recomputed keeps no copies, and of the wide numbers its input.

        Args:
            item: bytes of a number in the format that products are computed in.
            samples: samples of a micro-batch.
            tp: number of ranks that share the weights.
        """
        more = max(0, WIDE_BYTES - item)
        copies = item * self.weights / tp if more else 0.0
        own = more * min(self.wide, self.recomputed.get("full", 0.0))  # its input and its result
        return replace(
            self,
            activations=samples * (item * self.activations + more * self.wide) + copies,
            recomputed={
                way: samples * (item * kept + own) for way, kept in self.recomputed.items()
            },
            gradients=samples * (item * self.gradients + own),
        )


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    """The sizes of a model: blocks of one kind between an embedding and a head.

    Args:
        layers: number of blocks.
        hidden: width of the activations between blocks.
    """

    NOTE: ClassVar[str]
    """How activations are counted, in words."""

    layers: int
    hidden: int

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Make a shape from the plain values of `dataclasses.asdict`, or of JSON."""
        return cls(**tree)

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The largest number of vectors of width `hidden` that a sample has between blocks."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The sizes that follow from the data, in words."""

    @abstractmethod
    def divided(self, division: Division) -> dict[str, int]:
        """The sizes that the ranks of a tensor group divide, by their keys in the configuration.

        Raises:
            ConfigError: the model cannot be divided in this way, whatever its sizes are.
        """

    @abstractmethod
    def build(self) -> Any:
        """The module with its initial weights, drawn from torch's generator; loads torch."""

    @abstractmethod
    def build_unfilled(self, dtype: Any) -> Any:
        """The module without values, which takes no memory yet: see `models.initial`; loads torch.

        Its seed is drawn from torch's generator, as in `build`.

        Args:
            dtype: torch's type of its parameters.
        """

    @abstractmethod
    def block(self) -> Any:
        """A block without dropout, to measure it; loads torch."""

    @abstractmethod
    def parts(self, division: Division = UNDIVIDED) -> list[PartCost]:
        """The costs of the embedding, each block and the head, in this order.

        Args:
            division: a division for which `check` raises nothing.
        """

    @property
    @abstractmethod
    def tied(self) -> int:
        """Elements of the matrix that the embedding and the head share; 0 if they share none."""

    @abstractmethod
    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size."""

    def kept(self, parts: Sequence[PartCost], recompute: str | int) -> list[float]:
        """Numbers, or bytes, that each part keeps for its backward pass.

        Args:
            parts: the costs of the parts, from `parts`, or the same `in_bytes`.
            recompute: the value of memory.recompute.
        """
        every = recompute if isinstance(recompute, int) else 1
        way = "full" if isinstance(recompute, int) else recompute
        return [
            part.recomputed.get(way, part.activations)
            if (number - 1) % every == 0
            else part.activations
            for number, part in enumerate(parts)
        ]

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that one replica can be divided over."""
        return min(self.divided(UNDIVIDED).values()) * (self.layers + 2)

    @property
    def identity(self) -> dict[str, str | float]:
        """The sizes that tensors' shapes do not show, by their keys in the configuration."""
        return {}

    @abstractmethod
    def at_most(self, tokens: int, width: int) -> Self:
        """This shape with at most `tokens` tokens and `width` channels. Heads keep their width."""

    def check(self, division: Division) -> None:
        """Check that the model's sizes allow a division.

        Raises:
            ConfigError: they do not. The message has the nearest sizes that would.
        """
        self._check_tensor_parallel(division)
        if division.pp > 1:
            self._check_pipeline(division)

    def _check_tensor_parallel(self, division: Division) -> None:
        for key, size in self.divided(division).items():
            if size % division.tp:
                raise ConfigError(
                    f"parallel.tp {division.tp} does not divide model.{key} {size}",
                    f"nearest that it divides: model.{key} {_multiples(key, size, division.tp)}",
                )

    def _check_pipeline(self, division: Division) -> None:
        pp, virtual_stages, parts = division.pp, division.virtual_stages, self.layers + 2
        if pp * virtual_stages <= parts:
            return
        virtual = f" x parallel.virtual_stages {virtual_stages}" if virtual_stages > 1 else ""
        near = [f"model.layers {pp * virtual_stages - 2}"]
        if virtual_stages <= parts:
            near.append(f"parallel.pp {parts // virtual_stages}")
        raise ConfigError(
            f"parallel.pp {pp}{virtual} is more than the {parts} parts of the model "
            f"(embedding, {plural(self.layers, 'layer')}, head)",
            f"nearest that fits: {', or '.join(near)}",
        )


def narrower(hidden: int, heads: int, width: int) -> tuple[int, int]:
    """The sizes `hidden` and `heads` for at most `width` channels. Heads keep their width."""
    head = hidden // heads
    kept = max(1, min(heads, width // head))
    return kept * head, kept


def _multiples(key: str, size: int, tp: int) -> str:
    """The multiples of tp next to a size. A vocabulary must not shrink, so it has only one."""
    below, above = size // tp * tp, -(-size // tp) * tp
    return str(above) if key == "vocab" or not below else f"{below} or {above}"
