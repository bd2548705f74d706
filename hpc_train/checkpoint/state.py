"""Name the tensors of a model and its optimizer, and put named tensors back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.checkpoint.fileformat import TORCH_DTYPES, Entry
from hpc_train.errors import CheckpointMismatch

MODEL = "model."
OPTIMIZER = "optim."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers; a tensor with two names has the first."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            named[MODEL + name] = tensor.detach()
    return named


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                yield f"{OPTIMIZER}{names[parameter]}.{slot}", value


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors, named by parameter and slot: optim.blocks.0.weight.exp_avg."""
    return {
        name: value.detach()
        for name, value in _optimizer_state(model, optimizer)
        if isinstance(value, Tensor)
    }


def optimizer_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer remembers that is no tensor; must be plain JSON values."""
    return {
        name: value
        for name, value in _optimizer_state(model, optimizer)
        if not isinstance(value, Tensor)
    }


def make_optimizer_state(
    model: nn.Module, optimizer: Optimizer, entries: Mapping[str, Entry], values: Mapping[str, Any]
) -> None:
    """Give a fresh optimizer the slots that a checkpoint has, their tensors yet to be filled.

    Raises:
        CheckpointMismatch: the checkpoint has slots of a parameter that the optimizer lacks.
    """
    parameters = dict(model.named_parameters())
    fused = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for name in [name for name in entries if name.startswith(OPTIMIZER)] + list(values):
        parameter_name, _, slot = name.removeprefix(OPTIMIZER).rpartition(".")
        parameter = parameters.get(parameter_name)
        if parameter is None or parameter not in fused:
            raise CheckpointMismatch(f"the checkpoint has {name}, which this optimizer has not")
        if name in values:
            optimizer.state[parameter][slot] = values[name]
            continue
        entry = entries[name]
        # Step counters stay on the host, where plain optimizers expect them.
        on_device = entry.shape == tuple(parameter.shape) or fused[parameter]
        optimizer.state[parameter][slot] = torch.empty(
            entry.shape,
            dtype=TORCH_DTYPES[entry.dtype],
            device=parameter.device if on_device else "cpu",
        )


def check_model(entries: Mapping[str, Entry], tensors: Mapping[str, Tensor], path: object) -> None:
    """Check that a checkpoint's model tensors are those of this model.

    Raises:
        CheckpointMismatch: naming the first tensor that is missing, superfluous or of another form.
    """
    remedy = "use the configuration it was made with, or another run.dir"
    saved = {name: entry for name, entry in entries.items() if name.startswith(MODEL)}
    for name in sorted(saved.keys() | tensors.keys()):
        if name not in saved or name not in tensors:
            where = "the model" if name in tensors else "the checkpoint"
            raise CheckpointMismatch(f"{path} is of another model: only {where} has {name}", remedy)
        have, want = saved[name], tensors[name]
        if have.shape != tuple(want.shape) or TORCH_DTYPES.get(have.dtype) != want.dtype:
            raise CheckpointMismatch(
                f"{path} is of another model: its {name} is {have.dtype} {list(have.shape)}, "
                f"the model's is {str(want.dtype).removeprefix('torch.')} {list(want.shape)}",
                remedy,
            )
