"""The leaves of samples and batches, whatever the containers around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import tree_leaves


def leaves(data: Any) -> list[Any]:
    """What lies in lists, tuples, dicts and other mappings, such as `BatchEncoding`, at any depth.

    torch's `tree_leaves` takes a mapping of another class than dict for a leaf.
    """
    found: list[Any] = []
    for leaf in tree_leaves(data):
        found += leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return found
