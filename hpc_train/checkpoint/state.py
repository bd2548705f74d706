"""Name the tensors of a model and its optimizer, and put named tensors back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.checkpoint.dtypes import TORCH_DTYPES
from hpc_train.checkpoint.fileformat import Entry, Form, Held
from hpc_train.errors import CheckpointMismatch
from hpc_train.sharding import Shard, ShardSpec

MODEL = "model."
OPTIMIZER = "optim."


Shards = Mapping[str, Shard]
"""What a rank holds, by the names of its own module's tensors; those not named it holds whole."""


def model_tensors(model: nn.Module, shards: Shards) -> dict[str, Held]:
    """A model's parameters and persistent buffers; a tensor with two names has the first.

    Args:
        model: this rank's.
        shards: which part of them this rank has.
    """
    return {
        MODEL + shard.name: Held(tensor.detach(), shard.spec, shard.owned)
        for shard, tensor in _saved(model, shards)
    }


def buffer_names(model: nn.Module, shards: Shards) -> set[str]:
    """Of `model_tensors`: the names of what a forward pass may change."""
    saved = _saved(model, shards)
    return {MODEL + shard.name for shard, t in saved if not isinstance(t, Parameter)}


def names_with_gradients(model: nn.Module, shards: Shards) -> list[str]:
    """Of `model_tensors`: the names of what is trained."""
    return [MODEL + shard.name for shard, t in _saved(model, shards) if t.requires_grad]


def _saved(model: nn.Module, shards: Shards) -> Iterator[tuple[Shard, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield shards.get(name) or _whole(name, tensor), tensor


def _whole(name: str, tensor: Tensor) -> Shard:
    return Shard(name, ShardSpec.whole(tuple(tensor.shape)))


@dataclass(frozen=True)
class Trained:
    """A model with its optimizer, and what of them this rank has.

    Args:
        model, optimizer: as they are on this rank.
        shards: of the model's tensors.
        pieces: of parameters that the optimizer has not whole: what it has in their place.
    """

    model: nn.Module
    optimizer: Optimizer
    shards: Shards
    pieces: Mapping[Parameter, Shard]

    def parameters(self) -> dict[Parameter, Shard]:
        """What the optimizer has."""
        named = self.model.named_parameters()
        known = {p: self.shards.get(name) or _whole(name, p) for name, p in named}
        known |= self.pieces
        groups = self.optimizer.param_groups
        return {p: known[p] for group in groups for p in group["params"] if p in known}


def _optimizer_state(trained: Trained) -> Iterator[tuple[str, Shard, Parameter, Any]]:
    optimizer, known = trained.optimizer, trained.parameters()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                shard = known[parameter]
                yield f"{OPTIMIZER}{shard.name}.{slot}", shard, parameter, value


def optimizer_tensors(trained: Trained) -> dict[str, Held]:
    """The optimizer's tensors, named by parameter and slot: optim.blocks.0.weight.exp_avg.

    What has a parameter's shape is cut as the parameter is; anything else each rank has whole.
    """
    found = {}
    for name, shard, parameter, value in _optimizer_state(trained):
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            found[name] = Held(value.detach(), shard.spec, shard.owned)
        elif isinstance(value, Tensor):
            found[name] = replace(
                Held.whole(value.detach()), owned=shard.owned and shard.spec.has_origin
            )
    return found


def optimizer_values(trained: Trained) -> dict[str, Any]:
    """What the optimizer remembers that is no tensor; must be plain JSON values."""
    return {
        name: value
        for name, _, _, value in _optimizer_state(trained)
        if not isinstance(value, Tensor)
    }


def trained_names(trained: Trained) -> dict[str, bool]:
    """The names of the parameters that this rank's optimizer has."""
    return {shard.name: True for shard in trained.parameters().values()}


def make_optimizer_state(
    trained: Trained, entries: Mapping[str, Entry], values: Mapping[str, Any]
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
    for name, parameter_name, slot in slots([*entries, *values]):
        parameter, shard = parameters.get(parameter_name, (None, None))
        if parameter is None or shard is None:
            continue  # another rank's
        if name in values:
            optimizer.state[parameter][slot] = values[name]
            continue
        entry = entries[name]
        # Step counters stay on the host, where plain optimizers expect them.
        alike = entry.shape == shard.spec.shape
        optimizer.state[parameter][slot] = torch.empty(
            shard.spec.local_shape if alike else entry.shape,
            dtype=TORCH_DTYPES[entry.dtype],
            device=parameter.device if alike or fused[parameter] else "cpu",
        )


def slots(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Of the names of the optimizer's state: the name, its parameter's name, its slot."""
    for name in names:
        if name.startswith(OPTIMIZER):
            yield name, parameter_of(name), name.rpartition(".")[2]


def parameter_of(name: str) -> str:
    """The parameter that a tensor of the optimizer's state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def check_optimizer(names: Iterable[str], trained: Container[str]) -> None:
    """Check that what a checkpoint remembers of parameters is of those that are trained.

    Raises:
        CheckpointMismatch: the checkpoint has slots of a parameter that the optimizer lacks.
    """
    for name, parameter, _ in slots(names):
        if parameter not in trained:
            raise CheckpointMismatch(f"the checkpoint has {name}, which this optimizer has not")


def check_model(entries: Mapping[str, Entry], forms: Mapping[str, Form], path: object) -> None:
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
        if have.shape != shape or TORCH_DTYPES.get(have.dtype) != dtype:
            raise CheckpointMismatch(
                f"{path} is of another model: its {name} is {have.dtype} {list(have.shape)}, "
                f"the model's is {str(dtype).removeprefix('torch.')} {list(shape)}",
                remedy,
            )
