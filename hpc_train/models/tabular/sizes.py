"""The sizes that a model takes from its table, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from hpc_train.errors import ConfigError

FREQUENCIES = 24  # of each number's periodic embedding
CONTRASTED = 64  # outputs of a model that learns to tell rows from each other
NumericKind = Literal["piecewise_linear", "periodic", "linear"]
"""How a model turns numeric features into vectors."""


@dataclass(frozen=True, kw_only=True)
class TableSizes:
    """What a model has to know of a table.

    Args:
        edges: for each numeric feature the edges of its bins, strictly rising, two or more.
        codes: for each categorical feature the number of its codes. Code 0 is a category that was
            not known when the table was prepared.
        outputs: number of predictions for a row: classes, labels, quantiles, or 1.

    Raises:
        ConfigError: the table has no feature, or a model would have no output.
    """

    edges: tuple[tuple[float, ...], ...]
    codes: tuple[int, ...]
    outputs: int

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigError("the table has no feature", "give it a column besides its target")
        if self.outputs < 1:
            raise ConfigError("the table has nothing to predict", "prepare it with a target")

    @property
    def features(self) -> int:
        """Number of features."""
        return len(self.edges) + len(self.codes)

    @property
    def bins(self) -> int:
        """The largest number of bins of a numeric feature, or 0."""
        return max((len(edges) - 1 for edges in self.edges), default=0)

    def first(self, features: int) -> Self:
        """The sizes of a table with the first of these features only, and at least one."""
        edges = self.edges[: max(1, features)]
        codes = self.codes[: max(0 if edges else 1, features - len(edges))]
        return replace(self, edges=edges, codes=codes)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """Make sizes from the plain values of `dataclasses.asdict`, or of JSON."""
        edges = tuple(tuple(float(edge) for edge in one) for one in tree["edges"])
        codes = tuple(int(code) for code in tree["codes"])
        return cls(edges=edges, codes=codes, outputs=int(tree["outputs"]))


def gated_width(hidden: int, groups: int) -> int:
    """The width inside a transformer's gated MLP: four thirds of `hidden`, a multiple of groups."""
    return groups * -(-4 * hidden // (3 * groups))
