"""The costs of the models of tables, without torch. The letters are those of module.py.

Activations are counted as for a GPT (see `models.gpt.shape`). Only the products of linear layers
and of attention count as operations. A part's weights are those of its `Linear` layers, by which
`parallel.stages` divides a model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hpc_train.errors import ConfigError
from hpc_train.models.shape import UNDIVIDED, Division, PartCost, Shape, narrower
from hpc_train.models.tabular.sizes import FREQUENCIES, NumericKind, TableSizes, gated_width

if TYPE_CHECKING:
    from hpc_train.models.tabular.module import MlpBlock, ResnetBlock, TabularModel
    from hpc_train.models.tabular.transformer import TransformerBlock


@dataclass(frozen=True, kw_only=True)
class OfTables(Shape):
    """What the shapes of all models of tables share.

    Args:
        sizes: the sizes of the table.
        dropout: share of activations that training drops.
        numeric: how numbers become vectors.
    """

    sizes: TableSizes
    dropout: float = 0.0
    numeric: NumericKind = "piecewise_linear"

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Make a shape from the plain values of `dataclasses.asdict`, or of JSON."""
        return cls(**{**tree, "sizes": TableSizes.from_tree(tree["sizes"])})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the module."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    @abstractmethod
    def module(self) -> type[TabularModel]:
        """The class of the module; loads torch."""

    def build(self) -> TabularModel:
        """The module with its initial weights, drawn from torch's generator; loads torch."""
        return self.module(**self.arguments)

    def build_unfilled(self, dtype: Any) -> TabularModel:
        """The module without values, which takes no memory yet; loads torch."""
        from hpc_train.models.initial import unfilled

        return unfilled(self.module, dtype, **self.arguments)

    @property
    def described(self) -> str:
        """The sizes that follow from the data, in words."""
        return f"features: {self.sizes.features}; outputs: {self.sizes.outputs}"

    @property
    def tied(self) -> int:
        """The embedding and the head share no matrix."""
        return 0

    def divided(self, division: Division) -> dict[str, int]:
        """The sizes that the ranks of a tensor group divide, by their keys in the configuration.

        Raises:
            ConfigError: tokens would be divided. A row has few, and their number is the table's.
        """
        if division.sequence_parallel:
            raise ConfigError(
                "parallel.sequence_parallel is on, but the model is one of tables, whose rows have "
                "few tokens",
                "leave parallel.sequence_parallel out",
            )
        return self._divided

    @property
    def _divided(self) -> dict[str, int]:
        return {"hidden": self.hidden}

    def parts(self, division: Division = UNDIVIDED) -> list[PartCost]:
        """The costs of the embedding, each block and the head, in this order."""
        blocks = [self._block(division, number) for number in range(self.layers)]
        return [self._embedding(), *blocks, self._head()]

    @abstractmethod
    def _embedding(self) -> PartCost: ...

    @abstractmethod
    def _block(self, division: Division, number: int) -> PartCost: ...

    @abstractmethod
    def _head(self) -> PartCost: ...

    @property
    def _masks(self) -> int:
        """1 if dropout has masks to keep, else 0."""
        return int(self.dropout > 0)

    def _features(self, width: int) -> tuple[int, float, int]:
        """Parameters, operations and kept numbers of the features' vectors of this width."""
        n, bins, categories = len(self.sizes.edges), self.sizes.bins, len(self.sizes.codes)
        if self.numeric == "piecewise_linear":
            own, inputs, kept = (bins + 1) * width, bins, bins
        elif self.numeric == "periodic":
            waves = 2 * FREQUENCIES
            own, inputs = FREQUENCIES + waves * width, waves
            kept = 1 + FREQUENCIES + waves + width
        else:
            own, inputs, kept = width, 0, 1
        # A bias and a vector for missing numbers; a truth value as a number; codes of 64 bits.
        parameters = n * (own + 2 * width) + sum(self.sizes.codes) * width
        return parameters, 2.0 * n * inputs * width, n * (kept + 1) + 2 * categories


@dataclass(frozen=True, kw_only=True)
class OfRows(OfTables):
    """What the shapes share whose embedding makes one vector of a row, or one for each member.

    Args:
        embedding_width: width E of the features' vectors.
    """

    embedding_width: int = 16

    def at_most(self, tokens: int, width: int) -> Self:
        """This shape with at most `width` channels."""
        return replace(self, hidden=min(self.hidden, width))

    def _rows(self, members: int, more: int) -> PartCost:
        """The embedding's cost, with what follows its product.

        Args:
            members: number of members K.
            more: numbers that are kept besides.
        """
        F, E, C, K = self.sizes.features, self.embedding_width, self.hidden, members
        parameters, flops, kept = self._features(E)
        several = K > 1
        return PartCost(
            parameters=parameters + F * E * C + (K * (F + 2 * C) if several else C),
            weights=float(F * E * C),
            flops=flops + 2.0 * F * E * C + (2.0 * K * F * C if several else 0.0),
            activations=kept + F * E + (F * C if several else 0) + more,
            sums=(0.0, 0.0),
            overhead=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class TabularMlpShape(OfRows):
    """The arguments of `TabularMlp`, and what it costs.

    Args:
        members: number of members K.
    """

    NOTE: ClassVar[str] = """\
numbers that a rank keeps per row of a micro-batch: each of the two
layers of a block keeps members x hidden for its result, as much for the
product if there are several members. With one member, dropout keeps
twice as much besides. tp divides those of the first layer"""

    members: int = 1

    @property
    def module(self) -> type[TabularModel]:
        """The class of the module; loads torch."""
        from hpc_train.models.tabular.module import TabularMlp

        return TabularMlp

    def block(self) -> MlpBlock:
        """A block without dropout, to measure it; loads torch."""
        from hpc_train.models.tabular.module import MlpBlock

        return MlpBlock(self.hidden, self.members, 0.0, 0)

    @property
    def tokens(self) -> int:
        """A row has a vector for each member."""
        return self.members

    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size."""
        return 2 * rank / self.hidden

    @property
    def _layer(self) -> int:
        """Numbers that a layer keeps: its product and its result if there are several members.

        One member keeps the result, and for dropout its mask and its input.
        """
        return self.members * self.hidden * (2 if self.members > 1 else 1 + 2 * self._masks)

    def _embedding(self) -> PartCost:
        return self._rows(self.members, self._layer)

    def _block(self, division: Division, number: int) -> PartCost:
        C, K, tp = self.hidden, self.members, division.tp
        each = (2 if K > 1 else 1) * K * C  # factors and biases, or biases alone
        return PartCost(
            parameters=(C * C + each) // tp + C * C // tp + each,
            weights=2.0 * C * C,
            flops=4.0 * K * C * C,
            activations=self._layer * (1 + 1 / tp),
            sums=(1.0, 1.0),
            overhead=1.0,
            recomputed={"selective": K * C * (2 + 1 / tp), "full": float(K * C)},
            gradients=K * C * (1 + 1 / tp),
        )

    def _head(self) -> PartCost:
        C, K, outputs = self.hidden, self.members, self.sizes.outputs
        return PartCost(
            parameters=K * (C + 1) * outputs,
            weights=0.0 if K > 1 else float(C * outputs),
            flops=2.0 * K * C * outputs,
            activations=0.0,
            sums=(0.0, 0.0),
            overhead=0.5,
        )


@dataclass(frozen=True, kw_only=True)
class TabularResnetShape(OfRows):
    """The arguments of `TabularResnet`, and what it costs."""

    NOTE: ClassVar[str] = """\
numbers that a rank keeps per row of a micro-batch: in a block
hidden x (2 + 2 / tp), with dropout hidden x (3 + 6 / tp), and in the
head 2 x hidden"""

    @property
    def module(self) -> type[TabularModel]:
        """The class of the module; loads torch."""
        from hpc_train.models.tabular.module import TabularResnet

        return TabularResnet

    def block(self) -> ResnetBlock:
        """A block without dropout, to measure it; loads torch."""
        from hpc_train.models.tabular.module import ResnetBlock

        return ResnetBlock(self.hidden, 0.0, 0)

    @property
    def tokens(self) -> int:
        """A row has one vector."""
        return 1

    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size."""
        return 1.5 * rank / self.hidden

    def _embedding(self) -> PartCost:
        return self._rows(1, 0)

    def _block(self, division: Division, number: int) -> PartCost:
        C, tp, masks = self.hidden, division.tp, self._masks
        return PartCost(
            parameters=(4 * C * C + 2 * C) // tp + 3 * C,
            weights=4.0 * C * C,
            flops=8.0 * C * C,
            activations=C * (2 + masks + (2 + 4 * masks) / tp),
            sums=(1.0, 1.0),
            overhead=1.0,
            recomputed={"selective": C * (2 + 2 / tp), "full": float(C)},
            gradients=C * (1 + 2 / tp),
        )

    def _head(self) -> PartCost:
        return head_cost(self.hidden, self.sizes.outputs)


@dataclass(frozen=True, kw_only=True)
class TabularShape(OfTables):
    """The arguments of `TabularTransformer`, and what it costs.

    Args:
        heads: number of attention heads, which divide `hidden`.
    """

    NOTE: ClassVar[str] = """\
numbers that a rank keeps per token of a micro-batch: in a block
hidden x (4 + 4 / tp), with dropout hidden x (5 + 4 / tp), and 4 / tp
times the width of the gated MLP, with dropout 5 / tp times. A row has a
token for each feature and one more"""

    heads: int

    @property
    def module(self) -> type[TabularModel]:
        """The class of the module; loads torch."""
        from hpc_train.models.tabular.transformer import TabularTransformer

        return TabularTransformer

    def block(self) -> TransformerBlock:
        """A block without dropout, to measure it; loads torch."""
        from hpc_train.models.tabular.transformer import TransformerBlock

        return TransformerBlock(self.hidden, self.heads, 0.0, 1)

    @property
    def tokens(self) -> int:
        """A row has a token for each feature, and one more."""
        return self.sizes.features + 1

    @property
    def identity(self) -> dict[str, str | float]:
        """The sizes that tensors' shapes do not show, by their keys in the configuration."""
        return {"model.heads": self.heads}

    def at_most(self, tokens: int, width: int) -> Self:
        """This shape with at most `tokens` tokens and `width` channels. Heads keep their width."""
        hidden, heads = narrower(self.hidden, self.heads, width)
        return replace(self, hidden=hidden, heads=heads, sizes=self.sizes.first(tokens - 1))

    def low_rank(self, rank: float) -> float:
        """The size of a block's matrices factored at this rank, as a share of their full size.

        The matrices are C x 3C, C x C, C x 2W and W x C, where W is the width of the gated MLP.
        """
        C, W = self.hidden, gated_width(self.hidden, self.heads)
        return rank * (8 * C + 3 * W) / (4 * C * C + 3 * C * W)

    @property
    def _divided(self) -> dict[str, int]:
        return {"heads": self.heads}

    def _embedding(self) -> PartCost:
        parameters, flops, kept = self._features(self.hidden)
        return PartCost(
            parameters=parameters + self.hidden,
            weights=0.0,
            flops=flops,
            activations=float(kept),
            sums=(0.0, 0.0),
            overhead=0.5,
        )

    def _block(self, division: Division, number: int) -> PartCost:
        """The cost of a block. The first block has no norm before its attention."""
        T, C, tp = self.tokens, self.hidden, division.tp
        W, masks, norms = gated_width(C, self.heads), self._masks, 2 if number else 1
        weights = 4.0 * C * C + 3.0 * C * W
        return PartCost(
            parameters=(3 * C * C + 3 * C + C * C + 3 * C * W + 2 * W) // tp + 2 * C * (1 + norms),
            weights=weights,
            flops=2 * T * weights + 4.0 * T * T * C,
            activations=T * (C * (2 + norms + masks + 4 / tp) + W * (4 + masks) / tp),
            wide=float(T * C * norms),
            sums=(2.0, 2.0),
            overhead=1.0,
            recomputed={
                "selective": T * (C * (3 + 4 / tp) + 2 * W / tp),
                "full": float(T * C),
            },
            gradients=T * (C + max(3 * C, 2 * W) / tp),
        )

    def _head(self) -> PartCost:
        return head_cost(self.hidden, self.sizes.outputs)


def head_cost(hidden: int, outputs: int) -> PartCost:
    """The cost of a norm, a ReLU and a linear layer of one vector of a row."""
    return PartCost(
        parameters=2 * hidden + (hidden + 1) * outputs,
        weights=float(hidden * outputs),
        flops=2.0 * hidden * outputs,
        activations=2.0 * hidden,
        sums=(0.0, 0.0),
        overhead=0.5,
    )
