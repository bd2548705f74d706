"""Whether a checkpoint can hold all of a model and its optimizer.

It is looked at when training begins, once more after the first step, since optimizers make their
state in it, and before each save. What is found then would otherwise be found hours later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.checkpoint.fileformat import format_dtypes
from hpc_train.checkpoint.state import TrainingState, module_extras, modules_with_extra
from hpc_train.errors import UserError


def check_savable(trained: TrainingState) -> None:
    """Check that a checkpoint can hold all of this rank's state, as far as it is there.

    Raises:
        UserError: it cannot; the message names the first thing that it cannot hold.
    """
    _check_parameters(trained)
    _check_model(trained)
    for name, value in _slots(trained.optimizer):
        _check_slot(name, value)


def is_plain(value: Any) -> bool:
    """Whether a value comes back from JSON as it went there."""
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, int, float))  # bool is an int


def _check_parameters(trained: TrainingState) -> None:
    known = trained.parameters()
    for number, group in enumerate(trained.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise UserError(
                    f"parameter {place} of the optimizer's group {number}, "
                    f"{_form(parameter)}, is none of the model's, so it would not be saved",
                    "give as the model one module that has all that is trained, such as "
                    "torch.nn.ModuleList([model, criterion])",
                )


def _check_model(trained: TrainingState) -> None:
    model = trained.model
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved = model.state_dict(keep_vars=True)
    extras = _check_extra(trained)
    for name, value in saved.items():
        if name in extras:
            continue
        if not isinstance(value, Tensor) or id(value) not in own:
            raise UserError(
                f"{name} of the model's state_dict is none of its parameters and buffers, "
                "so it would not be restored",
                "keep it in a buffer (register_buffer)",
            )
        _check_tensor(name, value, "another type, or do not save it: persistent=False")
    there = {id(value) for value in saved.values()}
    for name, parameter in model.named_parameters():
        if parameter in trained.parameters() and id(parameter) not in there:
            raise UserError(
                f"{name} is trained, but the model's state_dict has nothing of it",
                "let state_dict have all that is trained",
            )


def _check_extra(trained: TrainingState) -> set[str]:
    """Check what modules keep beside tensors; returns its names."""
    found = module_extras(trained.model)
    for name, value in found.items():
        what = f"{name} of the model's state_dict (get_extra_state)"
        if not is_plain(value):
            raise UserError(
                f"{what} is of type {type(value).__name__}, which checkpoints cannot hold",
                "keep numbers, strings, lists and dicts there, and tensors in buffers "
                "(register_buffer)",
            )
        if (
            type(modules_with_extra(trained.model)[name]).set_extra_state
            is nn.Module.set_extra_state
        ):
            raise UserError(f"{what} could not be restored", "give the module set_extra_state")
        if trained.shards:
            raise UserError(
                f"{what} cannot be saved of a model that is cut over ranks",
                "keep it in a buffer (register_buffer)",
            )
    return set(found)


def _slots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What the optimizer remembers of parameters, with a name for messages."""
    kind = type(optimizer).__name__
    for parameter, slots in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise UserError(
                f"{kind} keeps {parameter!r} in its state, which is no parameter's: "
                "checkpoints cannot hold it",
                "use another optimizer, or keep it with a parameter",
            )
        for slot, value in slots.items():
            name = f"{slot!r} in the state of {kind}"
            if not isinstance(slot, str) or "." in slot or "[" in slot:
                raise UserError(
                    f"{name} is a name that checkpoints cannot hold",
                    "use another optimizer, or a string without '.' and '['",
                )
            yield name, value


def _check_slot(name: str, value: Any) -> None:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Tensor):
            _check_tensor(name, one, "another type, or use another optimizer")
        elif not is_plain(one):
            raise UserError(
                f"{name} is of type {type(one).__name__}, which checkpoints cannot hold",
                "use another optimizer, or keep tensors, numbers and strings there",
            )


def _check_tensor(name: str, tensor: Tensor, other: str) -> None:
    if tensor.layout is not torch.strided:
        what = f"{str(tensor.layout).removeprefix('torch.')} tensor"
    elif tensor.is_conj() or tensor.is_neg():
        what = "view that is conjugated or negated when it is read"
    elif tensor.dtype not in format_dtypes() and tensor.dtype != torch.complex128:
        what = f"tensor of type {str(tensor.dtype).removeprefix('torch.')}"
    else:
        return
    raise UserError(f"{name} is a {what}, which checkpoints cannot hold", f"keep it as {other}")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
