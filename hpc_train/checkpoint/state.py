"""What a checkpoint holds: the tensors of a model and its optimizer by name, and all else."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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

MODEL = "model."
OPTIMIZER = "optim."
COMPLEX = "complex128"
EXTRA_SUFFIX = "_extra_state"

Shards = Mapping[str, ParameterSlice]
"""What a rank holds, by the names of its own module's tensors; those not named it holds whole."""


class Stateful(Protocol):
    """Has a few numbers that belong to a run's state."""

    def state_dict(self) -> dict[str, Any]:
        """The numbers: plain JSON values, the same on all ranks and layouts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such numbers."""


class ExtraState:
    """What else a checkpoint holds; this one nothing. All ranks call each method."""

    def unify(self) -> None:
        """Bring all ranks to the state that is saved; training goes on from it as well."""

    def collect(self) -> dict[str, LocalTensor]:
        """The tensors to save, after `unify`."""
        return {}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for those of a checkpoint's tensors that this rank wants."""
        return {}

    def values(self) -> dict[str, Any]:
        """Numbers to save: plain JSON values, the same on all ranks."""
        return {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Go on with the tensors of `expect`, which have been filled, and with saved `values`."""


class Together(ExtraState):
    """Several such things as one. Each has names of its own for tensors and values.

    Args:
        parts: of it, in the order in which they are brought to one state and restored.
    """

    def __init__(self, parts: Sequence[ExtraState]) -> None:
        self.parts = parts

    def unify(self) -> None:
        """Of all parts."""
        for part in self.parts:
            part.unify()

    def collect(self) -> dict[str, LocalTensor]:
        """Of all parts."""
        return {name: held for part in self.parts for name, held in part.collect().items()}

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Of all parts."""
        return {name: held for part in self.parts for name, held in part.expect(entries).items()}

    def values(self) -> dict[str, Any]:
        """Of all parts."""
        return {name: value for part in self.parts for name, value in part.values().items()}

    def take(self, values: Mapping[str, Any]) -> None:
        """Every part is given all values."""
        for part in self.parts:
            part.take(values)


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint saves and restores in place, and which part of it this rank has.

    Args:
        model, optimizer: as they are on this rank.
        scaler: the loss scaler, if there is one (`hpc_train.gradients.LossScaler`).
        shards: the slices of the model's tensors that this rank has; it has the others whole.
        pieces: what the optimizer has in place of whole parameters.
        replica: the ranks that hold the model together; by default this rank alone.
        alike: the ranks that hold the same as this one; None stands for all ranks.
        extra: what else is saved.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: Stateful | None = None
    shards: Shards = field(default_factory=dict)
    pieces: Mapping[Parameter, ParameterSlice] = field(default_factory=dict)
    replica: Group = field(default_factory=Group)
    alike: Collectives | None = None
    extra: ExtraState = field(default_factory=ExtraState)

    def parameters(self) -> dict[Parameter, ParameterSlice]:
        """What the optimizer has."""
        named = self.model.named_parameters()
        known = {p: self.shards.get(name) or _whole(name, p) for name, p in named}
        known |= self.pieces
        groups = self.optimizer.param_groups
        return {p: known[p] for group in groups for p in group["params"] if p in known}


def model_tensors(model: nn.Module, shards: Shards) -> dict[str, LocalTensor]:
    """A model's parameters and persistent buffers; a tensor with two names has the first.

    Args:
        model: this rank's.
        shards: which part of them this rank has.
    """
    return {
        MODEL + shard.name: _held(tensor.detach(), shard.spec, owned=shard.owned)
        for shard, tensor in _saved(model, shards)
    }


def buffer_names(model: nn.Module, shards: Shards) -> set[str]:
    """Of `model_tensors`: the names of what a forward pass may change."""
    saved = _saved(model, shards)
    return {MODEL + shard.name for shard, t in saved if not isinstance(t, Parameter)}


def names_with_gradients(model: nn.Module, shards: Shards) -> list[str]:
    """Of `model_tensors`: the names of what is trained."""
    return [MODEL + shard.name for shard, t in _saved(model, shards) if t.requires_grad]


def _saved(model: nn.Module, shards: Shards) -> Iterator[tuple[ParameterSlice, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield shards.get(name) or _whole(name, tensor), tensor


def _held(tensor: Tensor, spec: SliceSpec, *, owned: bool) -> LocalTensor:
    """A part as the format has it: complex128, which it lacks, as pairs of float64."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
        spec = replace(spec, shape=(*spec.shape, 2)) if spec.shape else SliceSpec.whole((2,))
    return LocalTensor(tensor, spec, owned)


def _whole(name: str, tensor: Tensor) -> ParameterSlice:
    return ParameterSlice(name, SliceSpec.whole(tuple(tensor.shape)))


def _optimizer_state(
    trained: TrainingState,
) -> Iterator[tuple[str, ParameterSlice, Parameter, Any]]:
    """What the optimizer remembers, by name; what is in a list is named LIST[0] and so on."""
    optimizer, known = trained.optimizer, trained.parameters()
    for parameter, shard in known.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{shard.name}.{slot}"
            if isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
                for number, one in enumerate(value):
                    if isinstance(one, Tensor):
                        yield f"{name}[{number}]", shard, parameter, one
                value = [None if isinstance(one, Tensor) else one for one in value]
            yield name, shard, parameter, value


def optimizer_tensors(trained: TrainingState) -> dict[str, LocalTensor]:
    """The optimizer's tensors, named by parameter and slot: optim.blocks.0.weight.exp_avg.

    What has a parameter's shape is cut as the parameter is; anything else each rank has whole.
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
    """What the optimizer remembers that is no tensor: plain JSON values.

    Of a list the tensors are None here; of a tensor that is saved as pairs it is the type.
    """
    values = {}
    for name, _, _, value in _optimizer_state(trained):
        if not isinstance(value, Tensor):
            values[name] = value
        elif value.dtype == torch.complex128:
            values[name] = COMPLEX
    return values


def trained_names(trained: TrainingState) -> dict[str, bool]:
    """The names of the parameters that this rank's optimizer has."""
    return {shard.name: True for shard in trained.parameters().values()}


def make_optimizer_state(
    trained: TrainingState, entries: Mapping[str, Entry], values: Mapping[str, Any]
) -> None:
    """Give a fresh optimizer the slots that a checkpoint has, their tensors yet to be filled."""
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
            continue  # another rank's
        if name not in entries:
            optimizer.state[parameter][slot] = values[name]
            continue
        dtype, shape = torch_dtypes()[entries[name].dtype], entries[name].shape
        if values.get(name) == COMPLEX:
            dtype, shape = torch.complex128, shape[:-1]
        # Step counters stay on the host, where plain optimizers expect them.
        alike = shape == shard.spec.shape
        made = torch.empty(
            shard.spec.local_shape if alike else shape,
            dtype=dtype,
            device=parameter.device if alike or shape or fused[parameter] else "cpu",
        )
        listed, _, number = slot.partition("[")
        if number:
            optimizer.state[parameter][listed][int(number[:-1])] = made
        else:
            optimizer.state[parameter][slot] = made


def optimizer_slots(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Of the names of the optimizer's state: the name, its parameter's name, its slot."""
    for name in names:
        if name.startswith(OPTIMIZER):
            yield name, parameter_of(name), name.rpartition(".")[2]


def parameter_of(name: str) -> str:
    """The parameter that a tensor of the optimizer's state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def check_slots(names: Iterable[str], trained: Container[str]) -> None:
    """Check that every optimizer slot in a checkpoint belongs to a parameter that is trained.

    Raises:
        CheckpointMismatch: the checkpoint has slots of a parameter that the optimizer lacks.
    """
    for name, parameter, _ in optimizer_slots(names):
        if parameter not in trained:
            raise CheckpointMismatch(f"the checkpoint has {name}, which this optimizer has not")


def check_model(
    entries: Mapping[str, Entry], forms: Mapping[str, TensorForm], path: object
) -> None:
    """Check that a checkpoint's model tensors are those of this model.

    Raises:
        CheckpointMismatch: naming the first tensor that is missing, superfluous or of another form.
    """
    remedy = "use the configuration it was made with, or another run.dir"
    saved = {name: entry for name, entry in entries.items() if name.startswith(MODEL)}
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


def modules_with_extra(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep something beside tensors, by its name in the model's `state_dict`."""
    return {
        f"{name}.{EXTRA_SUFFIX}" if name else EXTRA_SUFFIX: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def module_extras(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`) now; a checkpoint holds plain JSON."""
    return {name: module.get_extra_state() for name, module in modules_with_extra(model).items()}


def put_module_extras(model: nn.Module, saved: Mapping[str, Any], path: object) -> None:
    """Give modules what they kept when a checkpoint was made.

    Raises:
        CheckpointMismatch: the checkpoint has it of other modules.
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
