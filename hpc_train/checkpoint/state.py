"""What a checkpoint holds: the tensors of a model and its optimizer by name, and all else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
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
        MODEL + shard.name: _held(tensor.detach(), shard.spec, owned=shard.owned)
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


def _held(tensor: Tensor, spec: SliceSpec, *, owned: bool) -> LocalTensor:
    """A part as the file holds it. The format lacks complex128, so it becomes pairs of float64."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
        spec = replace(spec, shape=(*spec.shape, 2)) if spec.shape else SliceSpec.whole((2,))
    return LocalTensor(tensor, spec, owned)


def _whole(name: str, tensor: Tensor) -> ParameterSlice:
    return ParameterSlice(name, SliceSpec.whole(tuple(tensor.shape)))


def _optimizer_state(
    trained: TrainingState,
) -> Iterator[tuple[str, ParameterSlice, Parameter, Any]]:
    """The slots of the optimizer's state: name, slice of the parameter, parameter and value.

    The tensors in a list are slots of their own, with the names LIST[0] and so on. The list itself
    comes after them, with None in their places. A parameter without elements has no slots, because
    with `memory.zero` no rank's optimizer has it.
    """
    optimizer, known = trained.optimizer, trained.parameters()
    for parameter, shard in known.items():
        slots = optimizer.state.get(parameter, {})
        # LBFGS keeps all its state, with lists in it, with its first parameter.
        if 0 in shard.spec.shape and not any(isinstance(value, list) for value in slots.values()):
            continue
        for slot, value in slots.items():
            name = f"{OPTIMIZER}{shard.name}.{slot}"
            if isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
                for number, one in enumerate(value):
                    if isinstance(one, Tensor):
                        yield f"{name}[{number}]", shard, parameter, one
                value = [None if isinstance(one, Tensor) else one for one in value]
            yield name, shard, parameter, value


def optimizer_tensors(trained: TrainingState) -> dict[str, LocalTensor]:
    """The optimizer's tensors, named by parameter and slot: optim.blocks.0.weight.exp_avg.

    A tensor of the parameter's shape is cut as the parameter is. Each rank has any other one whole.
    """
    found = {}
    for name, shard, parameter, value in _optimizer_state(trained):
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            found[name] = _held(value.detach(), shard.spec, owned=shard.owned)
        elif isinstance(value, Tensor):
            whole = SliceSpec.whole(tuple(value.shape))
            owned = shard.owned and shard.spec.has_origin
            found[name] = _held(value.detach(), whole, owned=owned)
    return found


def optimizer_values(trained: TrainingState) -> dict[str, Any]:
    """The values in the optimizer's state that are not tensors, by name: plain JSON values.

    A list has None in the place of a tensor. A tensor that is saved as pairs has its type here.
    """
    values = {}
    for name, _, _, value in _optimizer_state(trained):
        if not isinstance(value, Tensor):
            values[name] = value
        elif value.dtype == torch.complex128:
            values[name] = COMPLEX
    return values


def model_values(trained: TrainingState) -> dict[str, str]:
    """What the tensors of a model alone do not show, by name in `model_tensors`.

    That is `COMPLEX` for a tensor that is saved as pairs. For each further name of a tensor it is
    the first name.
    """
    values, firsts = {}, dict[int, str]()
    for name, tensor in trained.model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        shard = trained.shards.get(name)
        first = firsts.setdefault(id(tensor), shard.name if shard else name)
        if first != name:
            values[MODEL + name] = MODEL + first
        elif tensor.dtype == torch.complex128:
            values[MODEL + name] = COMPLEX
    return values


def trained_names(trained: TrainingState) -> dict[str, bool]:
    """The names of the parameters that this rank's optimizer has, each with True."""
    return {shard.name: True for shard in trained.parameters().values()}


def make_optimizer_state(
    trained: TrainingState, entries: Mapping[str, Entry], values: Mapping[str, Any]
) -> None:
    """Give a fresh optimizer the slots that a checkpoint has. Their tensors are not filled yet.

    Args:
        trained: its optimizer is changed.
        entries: the checkpoint's tensors, by name.
        values: the checkpoint's values of the optimizer that are not tensors, by name.
    """
    optimizer = trained.optimizer
    parameters = {shard.name: (p, shard) for p, shard in trained.parameters().items()}
    fused = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for name, parameter_name, slot in optimizer_slots(
        [*(n for n in values if n not in entries), *entries]
    ):
        parameter, shard = parameters.get(parameter_name, (None, None))
        if parameter is None or shard is None:
            continue  # another rank has this parameter
        if name not in entries:
            optimizer.state[parameter][slot] = values[name]
            continue
        dtype, shape = torch_dtypes()[entries[name].dtype], entries[name].shape
        if values.get(name) == COMPLEX:
            dtype, shape = torch.complex128, shape[:-1]
        # Step counters stay on the host, where plain optimizers expect them.
        alike = shape == shard.spec.shape
        kept = trained.place(parameter, slot) if alike else None
        local = torch.Size(shard.spec.local_shape if alike else shape)
        if kept is not None:
            made = kept
        elif alike and local == parameter.shape:
            # With the parameter's strides: fused optimizers go through the memory of both at once.
            made = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            on_host = not (alike or shape or fused[parameter])
            made = torch.empty(local, dtype=dtype, device="cpu" if on_host else parameter.device)
        listed, _, number = slot.partition("[")
        if number:
            optimizer.state[parameter][listed][int(number[:-1])] = made
        else:
            optimizer.state[parameter][slot] = made


def optimizer_slots(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each of these names that is of the optimizer's state, with its parameter and its slot."""
    for name in names:
        if name.startswith(OPTIMIZER):
            yield name, parameter_of(name), name.rpartition(".")[2]


def parameter_of(name: str) -> str:
    """The name of the parameter that a name of the optimizer's state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def check_slots(
    entries: Mapping[str, Entry], values: Iterable[str], trained: Container[str]
) -> None:
    """Check that every optimizer slot in a checkpoint belongs to a parameter that is trained.

    Args:
        entries: the checkpoint's tensors, by name.
        values: the names of the checkpoint's values of the optimizer that are not tensors.
        trained: the names of the parameters of all ranks' optimizers.

    Raises:
        CheckpointMismatch: the checkpoint has slots of a parameter that no optimizer has.
    """
    # Older files have slots of parameters without elements, which not all optimizers have.
    empty = {name for name, entry in entries.items() if 0 in entry.shape}
    for name, parameter, _ in optimizer_slots([*entries, *values]):
        if parameter not in trained and MODEL + parameter not in empty:
            raise CheckpointMismatch(
                f"the checkpoint has {name}, but this run's optimizer does not have {parameter}",
                "train that parameter, too, as when the checkpoint was made (requires_grad; a loop "
                "of your own gives it to the optimizer before training resumes); or start from the "
                "weights alone in another run.dir (checkpoint.weights, or "
                "hpc_train.checkpoint.weights.start_from)",
            )


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
