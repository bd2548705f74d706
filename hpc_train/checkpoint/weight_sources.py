"""The files that a model's weights are in: checkpoints, safetensors files, Hugging Face folders.

Only headers are read until a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpc_train.checkpoint.catalogue import checkpoints_in, newest
from hpc_train.checkpoint.fileformat import MAX_HEADER_BYTES
from hpc_train.checkpoint.merged import MergedTensors
from hpc_train.errors import CheckpointMismatch, DataError, some_of
from hpc_train.files import parsed_object

ABOUT_KEY = "model"  # the key of a safetensors file's metadata that has a part of `about` as JSON
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
GIVE = "give a checkpoint, a run directory, a safetensors file, or a folder with model.safetensors"


@dataclass(frozen=True)
class WeightSource:
    """Tensors in files. Only the files' headers have been read.

    Args:
        path: as given by the user.
        forms: safetensors' name of the type, and the shape, by the tensors' names. A checkpoint's
            are in the file's order, so that no extent is read twice.
        read: reads the tensor of a name.
        about: the checkpoint's `about`, or the folder's `config.json`.
        lacking: foreign names of tensors that are missing, by the name of ours that needs them.
        further: further names of tensors, each with the name in `forms`.
    """

    path: Path
    forms: Mapping[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, str] = field(default_factory=dict)


def open_source(path: Path) -> WeightSource:
    """Read the headers of the files at a path.

    Args:
        path: as for `hpc_train.checkpoint.weights.start_from`.

    Raises:
        HpcTrainError: the path is no such file or folder, or a file is damaged.
    """
    try:
        if not path.is_dir():
            return _checkpoint(path) if _is_checkpoint(path) else _plain(path, [path])
        if checkpoints_in(path):  # first, because a run may have been exported into its directory
            return _checkpoint(newest(path))
        if (path / ONE_FILE).is_file():
            paths = [path / ONE_FILE]
        elif (path / INDEX).is_file():
            paths = [path / name for name in _names_in(path / INDEX)]
        else:
            raise DataError(f"{path} has neither {ONE_FILE} nor checkpoints", GIVE)
        config = path / "config.json"
        return _plain(path, paths, _tree(config) if config.is_file() else {})
    except OSError as error:
        name = error.filename or path
        raise DataError(f"{name} cannot be read ({error.strerror})", GIVE) from None


def about_of(path: Path) -> Mapping[str, Any]:
    """What is told beside weights: the checkpoint's `about`, or the folder's `config.json`.

    Args:
        path: as for `open_source`.

    Raises:
        HpcTrainError: as `open_source`.
    """
    return open_source(path).about


def _names_in(index: Path) -> list[str]:
    """The names of the files that an index has."""
    homes = _tree(index).get("weight_map")
    names: list[Any] = list(homes.values()) if isinstance(homes, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise DataError(f"weight_map in {index} does not name files", "get it again")
    return sorted(set(names))


def _tree(path: Path) -> dict[str, Any]:
    tree = parsed_object(path.read_bytes())
    if tree is None:
        raise DataError(f"{path} is no JSON object", "get it again")
    return tree


def _is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint of hpc_train, sound or not."""
    with path.open("rb") as file:
        first = file.read(8)
        if first == bytes(8):  # of a checkpoint that was never completed
            return True
        length = int.from_bytes(first, "little")
        return b"hpc_train" in file.read(min(length, MAX_HEADER_BYTES))


def _checkpoint(path: Path) -> WeightSource:
    saved = MergedTensors(path)
    forms = {name: (entry.dtype, entry.shape) for name, entry in saved.entries.items()}
    return WeightSource(path, forms, saved.__getitem__, saved.about, further=saved.further)


def _plain(
    path: Path, paths: Sequence[Path], about: Mapping[str, Any] | None = None
) -> WeightSource:
    forms, homes = {}, {}
    told: dict[str, Any] = {}
    names: dict[str, str] = {}
    for file in paths:
        try:
            opened = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is no sound safetensors file ({error})", GIVE) from None
        told |= _told(opened.metadata())
        names |= opened.metadata() or {}
        for name in opened.keys():  # noqa: SIM118  # safe_open's object is not a mapping
            part = opened.get_slice(name)
            forms[name] = part.get_dtype(), tuple(part.get_shape())
            homes[name] = opened
    # safetensors' own `save_model` tells so of further names of a tensor.
    further = {name: first for name, first in names.items() if first in forms}
    read = lambda name: homes[name].get_tensor(name)  # noqa: E731
    return WeightSource(path, forms, read, about or told, further=further)


def _told(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What `hpc-train checkpoint export` has told of a model in a file; nothing by others."""
    about = parsed_object((metadata or {}).get(ABOUT_KEY, "")) or {}
    return about if isinstance(about.get("shape"), dict) else {}


def with_our_names(
    source: WeightSource, convert: Callable[[str], tuple[str, Callable[[Tensor], Tensor]] | None]
) -> WeightSource:
    """The same tensors with our names and in our arrangement.

    Args:
        source: of tensors with foreign names.
        convert: returns for a foreign name our name, and the function that makes our tensor of the
            foreign one; None for a tensor that is not needed.
    """
    reads: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {}
    for theirs in source.forms:
        if (known := convert(theirs)) is not None:
            reads.setdefault(known[0], {})[theirs] = known[1]
    joins = getattr(convert, "join", None)

    def converted(name: str, read: Callable[[str], Tensor]) -> Tensor:
        made = {theirs: change(read(theirs)) for theirs, change in reads[name].items()}
        joined: Tensor = joins(name, made) if joins else next(iter(made.values()))
        return joined

    def empty(theirs: str) -> Tensor:  # a tensor without content tells the shape
        return torch.empty(source.forms[theirs][1], device="meta")

    forms, lacking = {}, {}
    for name, parts in reads.items():
        words = {source.forms[theirs][0] for theirs in parts}
        try:
            forms[name] = max(words), tuple(converted(name, empty).shape)
        except KeyError as error:
            lacking[name] = some_of(error.args)
        except (RuntimeError, IndexError, TypeError) as error:
            shapes = [f"{theirs} has the shape {[*source.forms[theirs][1]]}" for theirs in parts]
            cause = f"{source.path}: {', '.join(shapes)} ({error})"
            raise CheckpointMismatch(cause, GIVE) from None
    read = partial(converted, read=source.read)
    return replace(source, forms=forms, read=read, lacking=lacking, further={})


def with_other_names(
    source: WeightSource, wanted: Iterable[str], further: Mapping[str, str]
) -> WeightSource:
    """The same tensors, under the names that the model has for them where it shares a tensor.

    Of a tensor with several names, files have one: safetensors' own `save_model` the first in the
    alphabet, checkpoints the first of the model.

    Args:
        source: of the tensors.
        wanted: the names of the tensors to fill.
        further: further names of the model's tensors, each with the first name.
    """
    theirs = {name: source.further.get(name, name) for name in (*source.further, *source.forms)}
    first = {further.get(name, name): their for name, their in reversed(theirs.items())}
    found = {
        name: their
        for name in wanted
        if name not in source.forms
        and (their := theirs.get(name, first.get(name, ""))) in source.forms
    }
    left = {*found.values()} - {*wanted}
    forms = {name: form for name, form in source.forms.items() if name not in left}
    forms |= {name: source.forms[their] for name, their in found.items()}
    return replace(source, forms=forms, read=lambda name: source.read(found.get(name, name)))
