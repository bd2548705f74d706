"""A model's weights alone: a training starts from them.

They come from a checkpoint, a safetensors file or a Hugging Face folder. Rank 0 reads one
tensor at a time, all ranks receive the whole tensor, and each keeps its part. So each byte is read
once, and a rank has one tensor in memory beside the model.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint import state
from hpc_train.checkpoint.fileformat import (
    LocalTensor,
    TensorForm,
    format_dtypes,
)
from hpc_train.checkpoint.state import MODEL
from hpc_train.checkpoint.weight_sources import (
    WeightSource,
    open_source,
    with_other_names,
    with_our_names,
)
from hpc_train.collectives import connect
from hpc_train.collectives.overwrite import overwrite
from hpc_train.errors import CheckpointMismatch, ConfigError, some_of
from hpc_train.models.lora import is_adapter
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

logger = logging.getLogger(__name__)


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
    sources: list[WeightSource] = []  # of rank 0

    def choose() -> list[str]:
        for key, patterns in (("include", include), ("exclude", exclude)):
            check_patterns(f"checkpoint.{key}", patterns, list(forms))
        wanted = {name: f for name, f in forms.items() if selected(name, include, exclude)}
        whole = len(wanted) == len(forms)
        source = open_source(path)
        foreign = getattr(model, "foreign_weights", None)
        fresh: Collection[str] = ()
        if foreign and (convert := foreign(source.about, whole=whole)):
            source, fresh = with_our_names(source, convert), getattr(convert, "fresh", ())
        source = with_other_names(source, wanted, further)
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
    source: WeightSource, wanted: Mapping[str, TensorForm], all_forms: Mapping[str, TensorForm]
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
    source: WeightSource, wanted: Mapping[str, TensorForm], forms: Mapping[str, TensorForm]
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
