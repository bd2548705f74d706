"""The leaves of samples and batches, whatever the containers around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def leaves(data: Any) -> list[Any]:
    """What lies in lists, tuples, dicts and other mappings, such as `BatchEncoding`, at any depth.

    torch's `tree_leaves` takes a mapping of another class than dict for a leaf.
    """
    found: list[Any] = []
    for leaf in tree_leaves(data):
        found += leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf]
    return found


def fewer_rows(batch: Any, count: int) -> int:
    """The rows of a batch that seems to lack some of its samples; 0 if it does not seem so.

    All of its tensors then have as many rows, and none has a dimension of the number of samples.
    One row may be a text that is packed of all samples. A list may have a tensor for each sample.
    """
    shapes = [leaf.shape for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = {shape[0] for shape in shapes}
    if len(rows) != 1 or len(shapes) >= count or any(count in shape for shape in shapes):
        return 0
    return rows.pop() if 1 < min(rows) < count and not _has_list(batch, count) else 0


def _has_list(data: Any, count: int) -> bool:
    """Whether a list or a tuple of some number of items lies in a batch, at any depth."""
    if isinstance(data, Mapping):
        return any(_has_list(one, count) for one in data.values())
    listed = isinstance(data, list | tuple)
    return listed and (len(data) == count or any(_has_list(one, count) for one in data))
