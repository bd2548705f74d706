"""Look into checkpoints in one process: verify one, compare two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint.fileformat import Entry, names_between
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
    if torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)):
        return ""
    wide = torch.complex128 if first.is_complex() else torch.float64
    one, other = first.to(wide), second.to(wide)
    unequal = int((one != other).sum())
    worst = float((one - other).abs().max())
    scale = float(one.abs().max())
    return (
        f"{unequal} of {first.numel()} elements, by {worst:.3g} at most "
        f"(the largest is {scale:.3g})"
    )


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    else:
        yield name, tree


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
