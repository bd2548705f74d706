"""What a checkpoint holds: the tensors of a model by name, and what else is saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.checkpoint.fileformat import Entry, LocalTensor, TensorForm, torch_dtypes
from hpc_train.collectives import Collectives
from hpc_train.errors import CheckpointMismatch
from hpc_train.mpi.group import Group
from hpc_train.sharding import ParameterSlice, SliceSpec

MODEL = "model."  # begins the names of a model's tensors
OPTIMIZER = "optim."  # begins the names of an optimizer's tensors and values
COMPLEX = "complex128"  # the value of a tensor that is saved as pairs of float64
COMPILED = "_orig_mod."  # torch.compile puts it before the names of the module that it wraps
EXTRA_SUFFIX = "_extra_state"  # ends the name under which torch keeps a module's extra state

Shards = Mapping[str, ParameterSlice]
"""The slices that a rank holds, by the names of its module's tensors. It holds all others whole."""


Streamed = Mapping[Parameter, tuple[ParameterSlice, Tensor] | None]
"""The model's parameters that are there only while the model computes. Each has the piece of it
that this rank keeps, with its slice; None: the rank keeps nothing of it."""


class Stateful(Protocol):
    """An object with a few numbers that belong to a run's state."""

    def state_dict(self) -> dict[str, Any]:
        """The numbers, as plain JSON values. They are the same on all ranks and layouts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the numbers that `state_dict` returned."""


class ExtraState:
    """State that a checkpoint holds besides model and optimizer. This base class holds nothing.

    All ranks must call each method.
    """

    def unify(self) -> None:
        """Give all ranks the state that is saved. Training goes on from that state, too."""

    def collect(self) -> dict[str, LocalTensor]:
        """The tensors to save, by name. It is called after `unify`."""
        return {}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for the tensors of a checkpoint that this rank wants, by name.

        Args:
            entries: all tensors of the checkpoint, by name.
        """
        return {}

    def values(self) -> dict[str, Any]:
        """The numbers to save, as plain JSON values. They are the same on all ranks."""
        return {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. The tensors that `expect` returned have been filled.

        Args:
            values: the saved numbers of all extra states.
        """


class Together(ExtraState):
    """Several extra states as one. No two of them may use the same name.

    Args:
        parts: the extra states, in the order in which they are unified and restored.
    """

    def __init__(self, parts: Sequence[ExtraState]) -> None:
        self.parts = parts

    def unify(self) -> None:
        """Unify each part."""
        for part in self.parts:
            part.unify()

    def collect(self) -> dict[str, LocalTensor]:
        """The tensors of all parts."""
        return {name: held for part in self.parts for name, held in part.collect().items()}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """The memory of all parts."""
        return {name: held for part in self.parts for name, held in part.expect(entries).items()}

    def values(self) -> dict[str, Any]:
        """The numbers of all parts."""
        return {name: value for part in self.parts for name, value in part.values().items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Give each part all saved numbers."""
        for part in self.parts:
            part.take(values)


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint saves and restores in place, and which part of it this rank has.

    Args:
        model, optimizer: this rank's.
        scaler: the loss scaler, if there is one (`hpc_train.gradients.LossScaler`).
        shards: the slices of the model's tensors that this rank has. It has all others whole.
        pieces: the optimizer's parameters that stand for a part of a model's parameter, each with
            the slice that it is.
        replica: the ranks that hold the model together; by default this rank alone.
        alike: collectives of the ranks that hold the same as this one; by default of all ranks.
        extra: state that is saved besides.
        streamed: see `Streamed`.
        place: gives memory for a tensor of the optimizer's state, by parameter and slot; None: the
            tensor needs no special memory.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: Stateful | None = None
    shards: Shards = field(default_factory=dict)
    pieces: Mapping[Parameter, ParameterSlice] = field(default_factory=dict)
    replica: Group = field(default_factory=Group)
    alike: Collectives | None = None
    extra: ExtraState = field(default_factory=ExtraState)
    streamed: Streamed = field(default_factory=dict)
    place: Callable[[Parameter, str], Tensor | None] = lambda parameter, slot: None

    def parameters(self) -> dict[Parameter, ParameterSlice]:
        """The parameters of the optimizer, each with the slice that it is."""
        named = self.model.named_parameters()
        known = {p: self.shards.get(name) or _whole(name, p) for name, p in named}
        known |= self.pieces
        groups = self.optimizer.param_groups
        return {p: known[p] for group in groups for p in group["params"] if p in known}


def model_tensors(
    model: nn.Module, shards: Shards, streamed: Streamed | None = None
) -> dict[str, LocalTensor]:
    """A model's parameters and persistent buffers, by name. A tensor with two names has the first.

    Args:
        model: this rank's.
        shards: the slices of the model's tensors that this rank has.
        streamed: see `Streamed`.
    """
    return {
        MODEL + shard.name: local_part(tensor.detach(), shard.spec, owned=shard.owned)
        for shard, tensor in _saved(model, shards, streamed)
    }


def buffer_names(trained: TrainingState) -> set[str]:
    """The names in `model_tensors` of the buffers, which a forward pass may change."""
    saved = _saved(trained.model, trained.shards, trained.streamed)
    return {MODEL + shard.name for shard, t in saved if not isinstance(t, Parameter)}


def names_with_gradients(trained: TrainingState) -> list[str]:
    """The names in `model_tensors` of the tensors that require gradients."""
    saved = _saved(trained.model, trained.shards, trained.streamed)
    return [MODEL + shard.name for shard, t in saved if t.requires_grad]


def names_of_pieces(trained: TrainingState) -> set[str]:
    """The names in `model_tensors` of the divided parameters: each rank holds its own piece."""
    return {MODEL + kept[0].name for kept in trained.streamed.values() if kept is not None}


def _saved(
    model: nn.Module, shards: Shards, streamed: Streamed | None
) -> Iterator[tuple[ParameterSlice, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if not streamed or tensor not in streamed:
            yield shards.get(name) or _whole(name, tensor), tensor
        elif (kept := streamed[tensor]) is not None:  # type: ignore[index]
            yield kept


def local_part(tensor: Tensor, spec: SliceSpec, *, owned: bool) -> LocalTensor:
    """A part as the file holds it. The format lacks complex128, so it becomes pairs of float64."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
        spec = replace(spec, shape=(*spec.shape, 2)) if spec.shape else SliceSpec.whole((2,))
    return LocalTensor(tensor, spec, owned)


def _whole(name: str, tensor: Tensor) -> ParameterSlice:
    return ParameterSlice(name, SliceSpec.whole(tuple(tensor.shape)))


def model_values(trained: TrainingState) -> dict[str, str]:
    """What the tensors of a model alone do not show, by name in `model_tensors`.

    That is `COMPLEX` for a tensor that is saved as pairs. For each further name of a tensor it is
    the first name.
    """
    values = {}
    further = further_names(trained.model, trained.shards)
    for name, tensor in _tensors_of(trained.model):
        if name in further:
            values[MODEL + name] = MODEL + further[name]
        elif tensor.dtype == torch.complex128:
            values[MODEL + name] = COMPLEX
    return values


def further_names(model: nn.Module, shards: Shards) -> dict[str, str]:
    """The further names of tensors that a model has under several, each with the first name."""
    found, firsts = {}, dict[int, str]()
    for name, tensor in _tensors_of(model):
        shard = shards.get(name)
        first = firsts.setdefault(id(tensor), shard.name if shard else name)
        if first != name:
            found[name] = first
    return found


def _tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    held = model.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in held.items() if isinstance(tensor, Tensor)]


def check_model(
    entries: Mapping[str, Entry], forms: Mapping[str, TensorForm], path: object
) -> None:
    """Check that a checkpoint's model tensors are those of this model.

    Args:
        entries: the checkpoint's tensors, by name.
        forms: type and shape of each whole tensor of the model, by name.
        path: of the checkpoint, for the message.

    Raises:
        CheckpointMismatch: they are not. The message names the first tensor that is missing,
            superfluous, or of another type or shape.
    """
    remedy = "use the configuration it was made with, or another run.dir"
    saved = {name: entry for name, entry in entries.items() if name.startswith(MODEL)}
    _check_compiled(saved.keys(), forms.keys(), path)
    for name in sorted(saved.keys() | forms.keys()):
        if name not in saved or name not in forms:
            where = "the model" if name in forms else "the checkpoint"
            raise CheckpointMismatch(f"{path} is of another model: only {where} has {name}", remedy)
        have, (dtype, shape) = saved[name], forms[name]
        if have.shape != shape or torch_dtypes().get(have.dtype) != dtype:
            raise CheckpointMismatch(
                f"{path} is of another model: its {name} is {have.dtype} {list(have.shape)}, "
                f"the model's is {str(dtype).removeprefix('torch.')} {list(shape)}",
                remedy,
            )


def _check_compiled(saved: Collection[str], own: Collection[str], path: object) -> None:
    """Check that not only what torch.compile has added to names makes two models differ."""
    before, now = ({n.replace(COMPILED, "") for n in names} for names in (saved, own))
    if before != now or set(saved) == set(own):
        return
    raise CheckpointMismatch(
        f"{path} is of this model, but torch.compile has wrapped other modules there: that changes "
        f"the names of their parameters ({COMPILED.rstrip('.')})",
        "give the loop the model as it was when the checkpoint was made, wrapped or not; "
        "`model.compile()` compiles without a change of names",
    )


def modules_with_extra(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with `get_extra_state`, by the names of the extra state in `state_dict`."""
    return {
        f"{name}.{EXTRA_SUFFIX}" if name else EXTRA_SUFFIX: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def module_extras(model: nn.Module) -> dict[str, Any]:
    """What the modules keep beside tensors now (`get_extra_state`), by name in `state_dict`."""
    return {name: module.get_extra_state() for name, module in modules_with_extra(model).items()}


def put_module_extras(model: nn.Module, saved: Mapping[str, Any], path: object) -> None:
    """Give the modules the extra state that a checkpoint has (`set_extra_state`).

    Args:
        model: this rank's.
        saved: the extra state, by its name in `state_dict`.
        path: of the checkpoint, for the message.

    Raises:
        CheckpointMismatch: other modules than this model's kept the extra state.
    """
    keep = modules_with_extra(model)
    for name in sorted(keep.keys() ^ saved.keys()):
        where = "the model" if name in keep else "the checkpoint"
        raise CheckpointMismatch(
            f"{path} is of another model: only {where} has {name}",
            "use the model that it was made with",
        )
    for name, module in keep.items():
        module.set_extra_state(saved[name])
