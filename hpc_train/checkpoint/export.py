"""Writes a model's weights alone, for other programs, from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpc_train import files
from hpc_train.checkpoint.fileformat import Contents, Entry, TensorForm, torch_dtypes
from hpc_train.checkpoint.merged import MergedTensors
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.weight_sources import ABOUT_KEY
from hpc_train.checkpoint.weights import check_patterns, selected
from hpc_train.errors import ConfigError, some_of

SUFFIXES = (".safetensors", ".pt")
TOLD = ("kind", "shape")  # of `about`, in .safetensors: what `weights` compares with a new model
_Change: TypeAlias = Callable[[Tensor], Tensor]
Conversion: TypeAlias = Callable[[str], Sequence[tuple[str, _Change]]]
"""Maps the name of one of our tensors to other programs' names for it, or for its parts. With each
comes the function that makes their tensor of ours."""


def export_model(
    path: Path,
    target: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    convert: Conversion | None = None,
) -> dict[str, TensorForm]:
    """Write the model's tensors alone, with the names that the module gives them.

    Adapters (`hpc_train.models.lora`) are merged into the weights. One tensor at a time is in
    memory. For .pt the folder needs room for the tensors twice. It has a tensor with several names
    under each of them, in one memory, and what modules keep beside tensors (`get_extra_state`). In
    .safetensors such a tensor has its first chosen name only, and numbers of complex128 are pairs
    of float64.

    Args:
        path: a checkpoint.
        target: the file to make: .safetensors, or .pt for a state dict that
            `torch.load(weights_only=True)` reads.
        include: shell patterns of the names to write; by default all.
        exclude: shell patterns of the names to leave out.
        dtype: the type that floating-point tensors are converted to; by default they keep theirs.
        convert: for programs with other names or another arrangement.

    Returns:
        Type and shape of each tensor that was written, by name, as .safetensors has it.

    Raises:
        ConfigError: the target has another suffix, exists, or cannot be written. Or a pattern
            matches no name, or the patterns leave no tensor.
        CheckpointError: the checkpoint is damaged.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError(f"--out is {target}", f"end it with {' or '.join(SUFFIXES)}")
    check_absent(target)
    saved = MergedTensors(path)
    extra = saved.extra if target.suffix == ".pt" and convert is None else {}
    own = _names_to_write(saved, extra, include, exclude)
    kinds = {name: None if name in saved.pairs else dtype for name in own}
    sources: dict[str, tuple[str, _Change]] = {}
    for name, (first, *_) in own.items():
        made = [(first, _same)] if convert is None else convert(first)
        sources |= {new: (name, change) for new, change in made}
    forms = {
        new: _form(change(_as(_empty(saved.entries[name]), kinds[name])))
        for new, (name, change) in sources.items()
    }

    def complete(written: dict[str, Any]) -> None:
        """Give a state dict its complex numbers, further names, and what is beside tensors."""
        for new, (name, _) in sources.items():
            if name in saved.pairs:
                written[new] = torch.view_as_complex(written[new].clone())  # which is aligned
            if convert is None:
                written.update(dict.fromkeys(own[name], written[new]))
        written.update({n: value for n, value in extra.items() if selected(n, include, exclude)})

    told = {key: saved.about[key] for key in TOLD if key in saved.about and convert is None}
    write_tensors(forms, _converted(saved, sources, kinds), target, complete, told)
    return forms


def check_absent(*targets: Path) -> None:
    """Check that no file would be replaced.

    Raises:
        ConfigError: one would.
    """
    for target in targets:
        if target.exists():
            raise ConfigError(f"{target} exists", "give another --out, or move it away")


def _converted(
    saved: MergedTensors,
    sources: Mapping[str, tuple[str, _Change]],
    kinds: Mapping[str, torch.dtype | None],
) -> Iterator[tuple[str, Tensor]]:
    """Read each tensor once, and yield what is made of it.

    Args:
        saved: the tensors.
        sources: by the name of what is made, the tensor's name and the function that makes it.
        kinds: the types that floating-point tensors are converted to, by their names.
    """
    for name, made in groupby(sources.items(), lambda item: item[1][0]):
        tensor = _as(saved[name], kinds[name])
        for new, (_, change) in made:
            yield new, change(tensor)
        del tensor  # before the next one is read


def _empty(entry: Entry) -> Tensor:
    """A tensor without content, which tells type and shape."""
    return torch.empty(entry.shape, dtype=torch_dtypes()[entry.dtype], device="meta")


def _form(tensor: Tensor) -> TensorForm:
    return tensor.dtype, tuple(tensor.shape)


def _names_to_write(
    saved: MergedTensors, extra: Collection[str], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, list[str]]:
    """The chosen names of each tensor, by its first name, in the file's order, to read it once.

    Args:
        saved: the tensors.
        extra: the names of what is written beside tensors.
        include: as for `export_model`.
        exclude: as for `export_model`.

    Raises:
        ConfigError: a pattern matches no name, or no tensor is left.
    """
    names = {name: [name] for name in saved.entries}
    for name, first in saved.further.items():
        if first in names:
            names[first].append(name)
    every = [name for own in names.values() for name in own]
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        check_patterns(option, patterns, [*every, *extra])
    chosen = {
        first: kept
        for first, own in names.items()
        if (kept := [name for name in own if selected(name, include, exclude)])
    }
    if not chosen:
        raise ConfigError(
            f"no tensor of {saved.saved.path} is left to export",
            f"its first ones are {some_of(every)}",
        )
    return chosen


def write_tensors(
    forms: Mapping[str, TensorForm],
    tensors: Iterator[tuple[str, Tensor]],
    target: Path,
    complete: Callable[[dict[str, Any]], None] = lambda written: None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors to a file that is complete or does not exist. One at a time is in memory.

    Args:
        forms: type and shape of each tensor, by name.
        tensors: the tensors with their names.
        target: the file to make: .safetensors or .pt.
        complete: brings the state dict of a .pt to its last form.
        about: what a .safetensors tells of the model, as plain JSON values.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = files.partial_name(target)
    pickled = partial.with_suffix(".pickled")
    try:
        _write_safetensors(forms, tensors, partial, about or {})
        if target.suffix == ".pt":
            from safetensors.torch import load_file

            written = load_file(partial)  # it maps the file: the tensors are not in memory
            complete(written)
            torch.save(written, pickled)
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
    forms: Mapping[str, TensorForm],
    tensors: Iterator[tuple[str, Tensor]],
    path: Path,
    about: Mapping[str, Any],
) -> None:
    contents = Contents.of(forms)
    metadata = {"format": "pt"} | ({ABOUT_KEY: json.dumps(about)} if about else {})
    header = b'{"__metadata__":' + json.dumps(metadata).encode() + b"," + contents.description[1:]
    header = header.ljust(-(-len(header) // 8) * 8)
    begins = {entry.name: 8 + len(header) + entry.begin for entry in contents.entries}
    with path.open("wb") as file:
        files.write_at(file.fileno(), len(header).to_bytes(8, "little") + header, 0)
        for name, tensor in tensors:
            files.write_at(file.fileno(), as_bytes(tensor.contiguous()).numpy().data, begins[name])
            del tensor  # frees it before the next one is read


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
