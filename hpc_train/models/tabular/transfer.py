"""The weights of a model of one table, for a model of another table with other columns.

What a model has for each feature or category is taken by its name. What is new begins with its
initial values, and so does the head if the other model predicts something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.models.initial import HasInitial, initial_tensor

logger = logging.getLogger(__name__)

FIRST_CODE = 2  # of the known categories; before it are those of unknown and missing ones


@dataclass(frozen=True)
class _Matched:
    """Places of one thing after another in the new table, and in the old one.

    Args:
        size: number of places in the new table.
        before: number of places in the old table.
        new, old: the places of what both tables have, in pairs.
    """

    size: int
    before: int
    new: Sequence[int]
    old: Sequence[int]

    @classmethod
    def of(cls, new: Sequence[Any], old: Sequence[Any]) -> _Matched:
        """The places of equal things."""
        places = {one: place for place, one in enumerate(old)}
        pairs = [(n, places[one]) for n, one in enumerate(new) if one in places]
        return cls(len(new), len(old), [n for n, _ in pairs], [o for _, o in pairs])

    def taken(self, made: Tensor, tensor: Tensor, dim: int, width: int) -> None:
        """Copy what both have, `width` elements of a dimension each."""
        each = torch.arange(width)
        new, old = (
            (torch.tensor(places, dtype=torch.int64)[:, None] * width + each).flatten()
            for places in (self.new, self.old)
        )
        made.index_copy_(dim, new, tensor.index_select(dim, old))


class TableTransfer:
    """Converts the tensors of a model of another table, as `foreign_weights` does (`gpt2`).

    Args:
        model: the model that gets the weights.
        names: the names of its parameters.
        here: what its checkpoints tell of its table, with the keys `features`, `quantiles` and
            `pretraining`.
        there: the same of the other model.

    Attributes:
        fresh: names of parameters that may begin, at least in part, with their initial values. They
            have to be trained.
    """

    def __init__(
        self,
        model: HasInitial,
        names: Sequence[str],
        here: Mapping[str, Any],
        there: Mapping[str, Any],
    ) -> None:
        self.model = model
        ours, theirs = here["features"], there["features"]
        numbers = [[(one["name"], one["part"]) for one in of["numeric"]] for of in (ours, theirs)]
        named = [[one["name"] for one in of["categorical"]] for of in (ours, theirs)]
        self.numeric = _Matched.of(*numbers)
        self.all = _Matched.of(numbers[0] + named[0], numbers[1] + named[1])
        self.codes = _Matched.of(*(_codes(of["categorical"]) for of in (ours, theirs)))
        self.bins = max((len(one["edges"]) - 1 for one in ours["numeric"]), default=0)
        self.in_bins = any(name.endswith(".numeric.slope") for name in names)
        self.same_head = _predicted(here) == _predicted(there)
        fresh = {name for name in names if name.startswith("head.") and not self.same_head}
        fresh |= {
            name for name in names if (m := self._matched(name)) and len(m[0].new) < m[0].size
        }
        self.fresh = frozenset(fresh)
        logger.info(
            "the weights have %d of %d features, and %d of %d categories%s",
            len(self.all.new), self.all.size, len(self.codes.new), self.codes.size,
            "" if self.same_head else "; they predict something else, so the head begins anew",
        )  # fmt: skip

    def _matched(self, name: str) -> tuple[_Matched, int] | None:
        """What a parameter has of each feature or category, and in which dimension."""
        if ".features.numeric." in name:
            return self.numeric, 0
        if name.endswith(".features.categorical.table.weight"):
            return self.codes, 0
        if name.startswith("embedding.") and name.endswith((".project.weight", ".factors.weight")):
            return self.all, 1
        return None

    def __call__(self, name: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
        """The name of a tensor, and what converts it; None for one that is not taken."""
        if name.startswith("head.") and not self.same_head:
            return None
        found = self._matched(name)
        if found is None:
            return name, lambda tensor: tensor
        matched, dim = found
        bins = self.in_bins and name.endswith(".numeric.weight")

        def convert(tensor: Tensor) -> Tensor:
            width = tensor.shape[dim] // max(1, matched.before)
            shape = list(tensor.shape)
            shape[dim] = matched.size * width
            if bins:
                shape[1] = self.bins
            if tensor.is_meta:
                return tensor.new_empty(shape)
            made = initial_tensor(self.model, name, shape).to(tensor.dtype)
            if not bins:
                matched.taken(made, tensor, dim, width)
                return made
            few = min(self.bins, tensor.shape[1])  # a feature of both tables has no more
            matched.taken(made.narrow(1, 0, few), tensor.narrow(1, 0, few), dim, width)
            return made

        return name, convert


def _codes(features: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | int]]:
    """The rows of the table of categories: those of each feature, as the model has them."""
    return [
        (one["name"], code) for one in features for code in (*range(FIRST_CODE), *one["categories"])
    ]


def _predicted(of: Mapping[str, Any]) -> list[Any]:
    """What the head predicts: the target, or what pretraining has in its place."""
    pretraining, features = of.get("pretraining", "none"), of["features"]
    if pretraining == "masked_cells":
        numbers = [(one["name"], one["part"]) for one in features["numeric"]]
        return [pretraining, numbers, _codes(features["categorical"])]
    if pretraining != "none":
        return [pretraining]
    target = features["target"] or {}
    kept = [target.get("task"), *(list(target.get(key, ())) for key in ("names", "classes"))]
    return [*kept, list(of.get("quantiles") or ())]
