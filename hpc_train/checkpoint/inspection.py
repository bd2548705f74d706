"""Look into checkpoints in one process: verify one, compare two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.checkpoint.fileformat import Entry, names_between
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.restore import CheckpointReader, Tensors
from hpc_train.errors import CheckpointError, CheckpointUnreadable


def damaged(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Read every byte of a checkpoint and find the ranges that are not as they were saved.

    Yields:
        The range's first byte in the file, the byte behind its last, and the names of its tensors.

    Raises:
        CheckpointMismatch: another program wrote the file, or its format has another version.
        CheckpointUnreadable: the file system cannot read it.
        CheckpointError: header or hash table are damaged, so the rest cannot be checked.
    """
    reader = CheckpointReader.open(path)
    for number in range(reader.layout.extents):
        try:
            reader.extent(number)
        except CheckpointUnreadable:
            raise
        except CheckpointError:
            begin, end = reader.layout.extent(number)
            names = [entry.name for entry in names_between(reader.layout, begin, end)]
            yield reader.layout.data_start + begin, reader.layout.data_start + end, names


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Args:
        name: of a tensor, or of a value of the state.
        what: the difference in words.
    """

    name: str
    what: str


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """The differences between two checkpoints: first of tensors, then of other values, by name.

    Raises:
        CheckpointError: one of them is damaged.
        CheckpointUnreadable: the file system cannot read one of them.
        CheckpointMismatch: another program wrote one of them, or its format has another version.
    """
    one, other = Tensors(first), Tensors(second)
    for name in sorted({*one.names, *other.names}):
        if name not in one.entries or name not in other.entries:
            yield Difference(name, f"only in {first if name in one.entries else second}")
        elif text := _unlike(one.entries[name], other.entries[name]) or _apart(
            one[name], other[name]
        ):
            yield Difference(name, text)
    states = dict(_flat(one.state())), dict(_flat(other.state()))
    for name in sorted(states[0].keys() | states[1].keys()):
        values = [state.get(name, "nothing") for state in states]
        if values[0] != values[1]:
            yield Difference(name, f"{_short(values[0])} and {_short(values[1])}")


def _unlike(first: Entry, second: Entry) -> str:
    if (first.dtype, first.shape) == (second.dtype, second.shape):
        return ""
    return f"{_form(first)} and {_form(second)}"


def _form(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _apart(first: Tensor, second: Tensor) -> str:
    """How two tensors of one type and shape differ: "" if they have the same bytes."""
    rows = [as_bytes(one).view(first.numel(), first.element_size()) for one in (first, second)]
    unlike = (rows[0] != rows[1]).any(1)
    count = int(unlike.sum())
    if not count:
        return ""
    wide = first.dtype if first.is_complex() else torch.float64
    one, other = (tensor.reshape(-1).to(wide) for tensor in (first, second))
    finite = unlike & one.isfinite() & other.isfinite()
    text = f"{count} of {first.numel()} elements"
    if finite.any():
        if first.is_floating_point() or first.is_complex():
            worst = float((one - other)[finite].abs().max())
        else:
            worst = _integers_apart(first, second)
        scale = float(one[one.isfinite()].abs().max())
        text += f", by {worst:.3g} at most (the largest is {scale:.3g})"
    odd = count - int(finite.sum())
    return text + (f"; {odd} of them not finite in one of the two" if odd else "")


def _integers_apart(first: Tensor, second: Tensor) -> int:
    """The largest difference, without rounding: wrapped round as unsigned, it always fits."""
    one, other = (tensor.numpy() for tensor in (first, second))
    unsigned = f"u{one.itemsize}"
    high, low = np.maximum(one, other), np.minimum(one, other)
    return int((high.view(unsigned) - low.view(unsigned)).max())


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    else:
        yield name, tree


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
