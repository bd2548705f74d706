"""`hpc-train checkpoint`: verify, compare and export checkpoints, in one process."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train import files
from hpc_train.checkpoint.fileformat import Entry, Form, names_between
from hpc_train.checkpoint.restore import Reader, Tensors
from hpc_train.checkpoint.state import MODEL
from hpc_train.errors import CheckpointError, CheckpointUnreadable, ConfigError

SUFFIXES = (".safetensors", ".pt")


def damaged(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Read every byte of a checkpoint.

    Yields:
        First byte, the byte behind the last, and the names of the tensors of what is not as it was
        saved.

    Raises:
        CheckpointUnreadable: the file system does not give it.
        CheckpointError: header or hash table are damaged, so that nothing else can be told.
    """
    reader = Reader.open(path)
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
    """How one name differs between two checkpoints.

    Args:
        name: of a tensor, or of a number of the state.
        what: in words.
    """

    name: str
    what: str


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """What two checkpoints do not have in common, in the order of names.

    Raises:
        CheckpointError: one of them is damaged.
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


def export(
    path: Path,
    target: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    convert: Callable[[str], tuple[str, Callable[[Tensor], Tensor]]] | None = None,
) -> dict[str, Form]:
    """Write the model's tensors alone, by the names that the module gives them.

    Args:
        path: a checkpoint.
        target: the file to make: .safetensors, or .pt for a state dict that
            `torch.load(weights_only=True)` reads.
        include: shell patterns of names; by default all.
        exclude: of those, which not.
        dtype: what floating-point tensors are turned into; by default they stay as they are.
        convert: for programs that name and arrange them in another way: of a name, the other one,
            and what makes their tensor of ours.

    Returns:
        The forms of what was written, by name.

    Raises:
        ConfigError: the target has another suffix, exists, or cannot be written; no tensor is left.
        CheckpointError: the checkpoint is damaged.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--out is {target}", f"end it with {' or '.join(SUFFIXES)}")
    if target.exists():
        raise ConfigError(f"{target} exists", "give another --out, or move it away")
    saved = Tensors(path)
    names = [name.removeprefix(MODEL) for name in saved.names if name.startswith(MODEL)]
    chosen = [name for name in names if selected(name, include, exclude)]
    if not chosen:
        raise ConfigError(
            f"no tensor of {path} is left to export", f"its first ones are {', '.join(names[:3])}"
        )
    tensors = {name: _as(saved[MODEL + name], dtype) for name in chosen}
    if convert is not None:
        changes = {name: convert(name) for name in tensors}
        tensors = {new: change(tensors[old]).contiguous() for old, (new, change) in changes.items()}
    _write(tensors, target)
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _write(tensors: dict[str, Tensor], target: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.suffix == ".pt":
            torch.save(tensors, partial)
        else:
            save_file(tensors, partial, {"format": "pt"})
        files.sync(partial)
        files.rename(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{target} could not be written ({error})", "give a folder that is there, with room"
        ) from None


def selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name fits one of the patterns to include, if there are any, and none to exclude."""
    fits = any(fnmatch.fnmatchcase(name, pattern) for pattern in include) or not include
    return fits and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
