"""Finds the methods by which a data set gives many samples at once, or is told of later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset


def fetch_of(dataset: Any) -> Callable[[Any], Any] | None:
    """A data set's method `fetch`, which returns whole batches; None if it has none.

    It has none either if a class changes single samples below the one with `fetch`.
    """
    own = "fetch" in getattr(dataset, "__dict__", {})
    if not own and _changes_samples(dataset, "fetch"):
        return None
    found: Callable[[Any], Any] | None = getattr(dataset, "fetch", None)
    return found


def gives_several(dataset: Any) -> bool:
    """Whether `__getitems__` of a data set returns the samples that `__getitem__` does."""
    has = hasattr(type(dataset), "__getitems__")
    return has and not _changes_samples(dataset, "__getitems__")


def gives_single(dataset: Any) -> bool:
    """Whether a data set has a `__getitem__` that is not torch's own, which always fails."""
    own = getattr(type(dataset), "__getitem__", None)
    return own not in (None, Dataset.__getitem__)


def ahead_of(dataset: Any) -> Callable[[Any], None] | None:
    """A data set's method `ahead`; None if it has none, or no `samples_ahead` to go with it.

    Others call something else so, such as the time that they forecast.
    """
    found = getattr(dataset, "ahead", None)
    return found if callable(found) and hasattr(dataset, "samples_ahead") else None


def _changes_samples(dataset: Any, method: str) -> bool:
    """Whether a class has `__getitem__`, and only one above it, or a wrapped data set, a method.

    The method would leave out what such a class does.
    """
    for kind in type(dataset).__mro__:
        if method in vars(kind):
            return False
        if "__getitem__" in vars(kind) and kind is not Dataset:  # torch's own always fails
            return True
    return False
