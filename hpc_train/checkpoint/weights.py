"""A model's weights alone: a training starts from them.

They come from a checkpoint, a safetensors file or a Hugging Face folder. Rank 0 reads one
tensor at a time, all ranks receive the whole tensor, and each keeps its part. So each byte is read
once, and a rank has one tensor in memory beside the model.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hpc_train.checkpoint import state
from hpc_train.checkpoint.catalogue import checkpoints_in, newest
from hpc_train.checkpoint.fileformat import (
    MAX_HEADER_BYTES,
    LocalTensor,
    TensorForm,
    format_dtypes,
)
from hpc_train.checkpoint.merged import MergedTensors
from hpc_train.checkpoint.state import MODEL
from hpc_train.collectives import connect
from hpc_train.collectives.overwrite import overwrite
from hpc_train.errors import CheckpointMismatch, ConfigError, DataError, some_of
from hpc_train.files import parsed_object
from hpc_train.models.lora import is_adapter
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

logger = logging.getLogger(__name__)

ABOUT_KEY = "model"  # the key of a safetensors file's metadata that has a part of `about` as JSON
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
GIVE = "give a checkpoint, a run directory, a safetensors file, or a folder with model.safetensors"


def start_from(
    path: Path,
    model: nn.Module,
    shards: state.Shards,
    group: Group,
    *,
    streamed: state.Streamed | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    finetuned: bool = False,
) -> None:
    """Fill a model with weights. Floating-point types are converted. Collective.

    A checkpoint's adapters (`hpc_train.models.lora`) are merged into its weights. The model's own
    ones keep their initial values.

    A model may have a method `foreign_weights(about, *, whole)` for weights with other names or
    another arrangement: see `hpc_train.models.gpt.gpt2.foreign_weights`. What it returns may have
    an attribute `fresh`, the names of parameters that the source may lack, in all or in part. It
    may have a method `join(name, tensors)`, which makes one tensor of several converted ones that
    it gives the same name. They come by their foreign names, and a KeyError names one that lacks.

    Args:
        path: a checkpoint, a run directory (for its newest checkpoint), a safetensors file, or a
            folder with `model.safetensors`, in one piece or with an index. Only rank 0 reads it.
        model: this rank's part of the model. It is filled in place.
        shards: the slices of the model's tensors that this rank has. It has all others whole.
        group: all ranks that train.
        streamed: see `hpc_train.checkpoint.state.Streamed`.
        include: shell patterns of the names of the model's tensors to fill; by default all.
        exclude: shell patterns of the names of tensors that keep their values.
        finetuned: whether only some parameters are trained, so that all others must be filled.

    Raises:
        CheckpointMismatch: the source lacks a tensor, or has it with another shape or type.
        CheckpointError: the checkpoint is damaged. Some tensors may have been filled.
        DataError: the path is no such file or folder.
        ConfigError: the patterns leave no tensor, or leave out one that has to be filled, or the
            model has to be configured otherwise.
    """
    named = state.model_tensors(model, shards, streamed).items()
    held = {name.removeprefix(MODEL): part for name, part in named}
    forms = group.united({name: part.form for name, part in held.items()})
    named_parameters = model.named_parameters()
    mine = {shards[n].name if n in shards else n: p.requires_grad for n, p in named_parameters}
    trained = group.united(mine)
    further = group.united(state.further_names(model, shards))
    frozen = [name for name in forms if finetuned and not trained.get(name, True)]
    left = [name for name in frozen if not selected(name, include, exclude)]
    random = _random_ones(left, held, group)
    sources: list[_Source] = []  # of rank 0

    def choose() -> list[str]:
        for key, patterns in (("include", include), ("exclude", exclude)):
            check_patterns(f"checkpoint.{key}", patterns, list(forms))
        wanted = {name: f for name, f in forms.items() if selected(name, include, exclude)}
        whole = len(wanted) == len(forms)
        source = _open(path)
        foreign = getattr(model, "foreign_weights", None)
        fresh: Collection[str] = ()
        if foreign and (convert := foreign(source.about, whole=whole)):
            source, fresh = _converted(source, convert), getattr(convert, "fresh", ())
        source = _with_names(source, wanted, further)
        _check_left(left, {*random, *source.forms})
        if wrong := [name for name in wanted if name in fresh and not trained[name]]:
            raise ConfigError(
                f"the weights lack all or a part of {some_of(wrong)}, which would stay random, as "
                "section finetune does not train it",
                "name it in finetune.patterns, or set finetune.head true for the head",
            )
        # The model's adapters are new. Those of a checkpoint are part of its weights.
        for name in [name for name in wanted if name not in source.forms]:
            if is_adapter(name) or name in fresh:
                del wanted[name]
        sources.append(source)
        _check(source, wanted, forms)
        _tell(source, wanted, forms)
        # In the order of the source, because a checkpoint is read fastest in its own order.
        return [name for name in source.forms if name in wanted]

    collectives = connect(group)
    for name in from_first(group, choose):
        dtype, shape = forms[name]
        with agreed(group):
            if sources:
                tensor = sources[0].read(name).to(dtype).contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype)
        collectives.broadcast_(tensor)
        if name in held:
            _take(held[name], tensor)


def _check_left(left: Sequence[str], refused: Collection[str]) -> None:
    """Check that frozen tensors which are not taken from the weights may be left as they are."""
    if wrong := [name for name in left if name in refused]:
        raise ConfigError(
            f"checkpoint.include and exclude leave out {some_of(wrong)}, which would keep initial "
            "values, as section finetune does not train it",
            "take it from the weights, or name it in finetune.patterns",
        )


def _random_ones(names: Sequence[str], held: Mapping[str, LocalTensor], group: Group) -> list[str]:
    """Those of some tensors whose elements are not all equal. Collective.

    The others, such as biases that begin as zeros, are right as they are for weights that were
    trained without them.
    """
    values: dict[tuple[str, Any], None] = {}  # of each part: its only value, or None
    for name in names:
        if name in held and held[name].tensor.numel():
            flat = held[name].tensor.flatten()
            values[name, flat[0].item() if bool((flat == flat[0]).all()) else None] = None
    found = group.united(values)
    counts = Counter(name for name, _ in found)
    return [name for name in names if counts[name] > 1 or (name, None) in found]


def _take(held: LocalTensor, tensor: Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    overwrite(held.tensor, _part(tensor, held.spec))


def _part(tensor: Tensor, spec: SliceSpec) -> Tensor:
    """A part of a whole tensor, in the same memory."""
    if spec.shape:
        tensor = tensor.narrow(spec.dim, spec.start, spec.stop - spec.start)
    return tensor[spec.first : spec.last] if spec.last else tensor


def whole_tensors(trained: state.TrainingState) -> dict[str, Tensor]:
    """A model's whole parameters and persistent buffers, by name: copies on the CPU. Collective.

    Only the ranks that hold the model together need to call it, and they get the same. Each has all
    tensors in memory, besides the model.
    """
    held = state.model_tensors(trained.model, trained.shards, trained.streamed)
    if trained.replica.comm is None:
        return {name.removeprefix(MODEL): part.tensor.cpu().clone() for name, part in held.items()}
    mine = [
        (name.removeprefix(MODEL), part.form, part.spec, part.tensor.cpu())
        for name, part in held.items()
        if part.owned
    ]
    found: dict[str, Tensor] = {}
    for parts in trained.replica.gathered(mine, "the parts of the model"):
        for name, (dtype, shape), spec, tensor in parts:
            if name not in found:
                found[name] = torch.empty(shape, dtype=dtype)
            _part(found[name], spec).copy_(tensor)
    return found


@dataclass(frozen=True)
class _Source:
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


def _open(path: Path) -> _Source:
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
        path: as for `start_from`.

    Raises:
        HpcTrainError: as `start_from`.
    """
    return _open(path).about


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


def _checkpoint(path: Path) -> _Source:
    saved = MergedTensors(path)
    forms = {name: (entry.dtype, entry.shape) for name, entry in saved.entries.items()}
    return _Source(path, forms, saved.__getitem__, saved.about, further=saved.further)


def _plain(path: Path, paths: Sequence[Path], about: Mapping[str, Any] | None = None) -> _Source:
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
    return _Source(path, forms, read, about or told, further=further)


def _told(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What `hpc-train checkpoint export` has told of a model in a file; nothing by others."""
    about = parsed_object((metadata or {}).get(ABOUT_KEY, "")) or {}
    return about if isinstance(about.get("shape"), dict) else {}


def _converted(
    source: _Source, convert: Callable[[str], tuple[str, Callable[[Tensor], Tensor]] | None]
) -> _Source:
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


def _with_names(source: _Source, wanted: Iterable[str], further: Mapping[str, str]) -> _Source:
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
        if name not in source.forms and (their := theirs.get(name, first.get(name))) is not None
    }
    left = {*found.values()} - {*wanted}
    forms = {name: form for name, form in source.forms.items() if name not in left}
    forms |= {name: source.forms[their] for name, their in found.items()}
    return replace(source, forms=forms, read=lambda name: source.read(found.get(name, name)))


def check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Check that each pattern of a key, or of an option, matches a name.

    Raises:
        ConfigError: one matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"{key}: the model has no tensor {pattern}; the first ones are {some_of(names)}",
                "name it as there",
            )


def _check(
    source: _Source, wanted: Mapping[str, TensorForm], all_forms: Mapping[str, TensorForm]
) -> None:
    """Check that the source has each wanted tensor, with the model's shape and a type that fits.

    Args:
        source: of the tensors.
        wanted: type and shape of the tensors to fill, by name.
        all_forms: type and shape of all tensors of the model, by name.
    """
    if not wanted:
        raise ConfigError(
            "checkpoint.include and exclude leave no tensor of the model",
            f"its first ones are {some_of(list(all_forms))}",
        )
    for name, (dtype, shape) in wanted.items():
        remedy = (
            f"give other weights; to keep its initial values, name {name} in checkpoint.exclude"
        )
        if name not in source.forms:
            there = f"; it has {some_of(list(source.forms))}" if source.forms else ""
            if any("layers.0." in one or "h.0." in one for one in source.forms):
                remedy = "give the folder with its config.json, if these names are Hugging Face's"
            if name in source.lacking:
                there = f", which {name} needs"
            lacks = source.lacking.get(name, name)
            raise CheckpointMismatch(f"{source.path} has no {lacks}{there}", remedy)
        word, have = source.forms[name]
        if word.startswith("F8_") and word != format_dtypes().get(dtype):
            raise CheckpointMismatch(
                f"{source.path}: its {name} is {word}, numbers of 8 bits that stand for others "
                "only together with their scales, which are not read",
                "give weights of 16 or 32 bits",
            )
        floating = dtype.is_floating_point and word.startswith(("F", "BF"))
        if have != shape or not (floating or word == format_dtypes().get(dtype)):
            raise CheckpointMismatch(
                f"{source.path}: its {name} is {word} {list(have)}, "
                f"the model's is {str(dtype).removeprefix('torch.')} {list(shape)}",
                remedy,
            )


def _tell(
    source: _Source, wanted: Mapping[str, TensorForm], forms: Mapping[str, TensorForm]
) -> None:
    left = [name for name in forms if name not in wanted]
    unknown = [name for name in source.forms if name not in forms]
    kept = f"; initial values in {some_of(left)}" if left else ""
    more = f"; not of this model: {some_of(unknown)}" if unknown else ""
    counts = f"{len(wanted)} of {len(forms)} tensors"
    logger.info("starting from the weights of %s: %s%s%s", source.path, counts, kept, more)


def selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name matches a pattern of `include`, or there is none, and none of `exclude`."""
    fits = any(fnmatch.fnmatchcase(name, pattern) for pattern in include) or not include
    return fits and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
