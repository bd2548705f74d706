"""The optimizer's state in a checkpoint: its slots by name, made again and checked at a resume."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer, RMSprop

from hpc_train.checkpoint.fileformat import Entry, LocalTensor, torch_dtypes
from hpc_train.checkpoint.state import COMPLEX, MODEL, OPTIMIZER, TrainingState, local_part
from hpc_train.errors import CheckpointMismatch
from hpc_train.sharding import ParameterSlice, SliceSpec

SLOTS_OF_OPTIONS = (
    ((Adam, AdamW), "amsgrad", "max_exp_avg_sq"),
    (RMSprop, "centered", "grad_avg"),
    (RMSprop, "momentum", "momentum_buffer"),
)
"""Options with which these optimizers need a further slot, made in the first step only."""


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
            found[name] = local_part(value.detach(), shard.spec, owned=shard.owned)
        elif isinstance(value, Tensor):
            whole = SliceSpec.whole(tuple(value.shape))
            owned = shard.owned and shard.spec.has_origin
            found[name] = local_part(value.detach(), whole, owned=owned)
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


def check_slots_of_options(optimizer: Optimizer, path: Path) -> None:
    """Check that the state of a checkpoint has the slots that the optimizer's options need."""
    for kind, option, slot in SLOTS_OF_OPTIONS:
        for group in optimizer.param_groups if isinstance(optimizer, kind) else ():
            states = [optimizer.state.get(parameter) for parameter in group["params"]]
            if group.get(option) and any(state and slot not in state for state in states):
                raise CheckpointMismatch(
                    f"{path} was made without the optimizer's option {option}, so it has no {slot}",
                    f"leave {option} out, or start anew in another directory",
                )
