"""`hpc-train checkpoint`: verify, compare and export checkpoints, in one process."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpc_train import files
from hpc_train.checkpoint.fileformat import Contents, Entry, TensorForm, names_between, torch_dtypes
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.restore import CheckpointReader, Tensors
from hpc_train.checkpoint.state import MODEL
from hpc_train.errors import CheckpointError, CheckpointUnreadable, ConfigError

SUFFIXES = (".safetensors", ".pt")
_Change: TypeAlias = Callable[[Tensor], Tensor]


def damaged(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Read every byte of a checkpoint.

    Yields:
        First byte, the byte behind the last, and the names of the tensors of what is not as it was
        saved.

    Raises:
        CheckpointUnreadable: the file system does not give it.
        CheckpointError: header or hash table are damaged, so that nothing else can be told.
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


def export_model(
    path: Path,
    target: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    convert: Callable[[str], tuple[str, Callable[[Tensor], Tensor]]] | None = None,
) -> dict[str, TensorForm]:
    """Write the model's tensors alone, by the names that the module gives them.

    One tensor at a time is in memory. For .pt the folder needs room for the tensors twice.

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
    sources: dict[str, tuple[str, _Change]] = {}
    forms: dict[str, TensorForm] = {}
    for name in chosen:
        new, change = (name, _same) if convert is None else convert(name)
        entry = saved.entries[MODEL + name]
        empty = torch.empty(entry.shape, dtype=torch_dtypes()[entry.dtype], device="meta")
        empty = change(_as(empty, dtype))
        forms[new], sources[new] = (empty.dtype, tuple(empty.shape)), (MODEL + name, change)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for new, (name, change) in sources.items():  # in the file's order
            yield new, change(_as(saved[name], dtype))

    _write(forms, tensors(), target)
    return forms


def _write(
    forms: Mapping[str, TensorForm], tensors: Iterator[tuple[str, Tensor]], target: Path
) -> None:
    """Write tensors, of which one at a time is in memory."""
    partial = target.with_name(f".{target.name}.partial")
    pickled = target.with_name(f".{target.name}.pickled")
    try:
        _write_safetensors(forms, tensors, partial)
        if target.suffix == ".pt":
            from safetensors.torch import load_file

            torch.save(load_file(partial), pickled)  # which are still in the file, not in memory
            pickled.replace(partial)
        files.sync(partial)
        files.rename(partial, target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{target} could not be written ({error})", "give a folder that is there, with room"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
        pickled.unlink(missing_ok=True)


def _write_safetensors(
    forms: Mapping[str, TensorForm], tensors: Iterator[tuple[str, Tensor]], path: Path
) -> None:
    contents = Contents.of(forms)
    header = b'{"__metadata__":{"format":"pt"},' + contents.description[1:]
    header = header.ljust(-(-len(header) // 8) * 8)
    begins = {entry.name: 8 + len(header) + entry.begin for entry in contents.entries}
    with path.open("wb") as file:
        files.write_at(file.fileno(), len(header).to_bytes(8, "little") + header, 0)
        for name, tensor in tensors:
            files.write_at(file.fileno(), as_bytes(tensor.contiguous()).numpy().data, begins[name])
            del tensor  # before the next one is read


def _same(tensor: Tensor) -> Tensor:
    return tensor


def selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name fits one of the patterns to include, if there are any, and none to exclude."""
    fits = any(fnmatch.fnmatchcase(name, pattern) for pattern in include) or not include
    return fits and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
