"""What is checked before a checkpoint is written.

A checkpoint must be able to hold all of a model and its optimizer. That is checked when training
begins, once more after the first step, since optimizers make their state in it, and before each
save. What is found then would otherwise be found hours later.

The ranks of all replicas that should hold the same bits must hold them. A program that writes to
parameters on one rank, a processor that computes wrongly now and then, or memory that loses a bit
shows nowhere: training goes on, and the next checkpoint keeps what is wrong. Comparing hashes finds
it. Before each checkpoint a sample is compared; after enough checkpoints all bytes have been.

Trained parameters must be finite.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc_train.checkpoint.background import enough_memory
from hpc_train.checkpoint.fileformat import LocalTensor, format_dtypes, hash_of
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.state import TrainingState, module_extras, modules_with_extra
from hpc_train.errors import DivergenceError, UserError
from hpc_train.models.deferred import check_has_memory
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

COMPARED_BYTES = 16 << 20  # bytes that a rank compares for a checkpoint, in a few milliseconds
TOGETHER = 1 << 20  # bytes of small tensors that are checked in one call

Batch: TypeAlias = "tuple[torch.dtype, list[str]]"
"""The names of some tensors, and the real type as which their bytes are checked together."""


def check_savable(trained: TrainingState, *, cut: bool = False) -> None:
    """Check that a checkpoint can hold all of this rank's state that exists by now.

    Args:
        trained: this rank's.
        cut: whether ranks hold different parts of the model.

    Raises:
        UserError: it cannot. The message names the first thing that it cannot hold.
    """
    check_has_memory(
        trained.model,
        'call model.to_empty(device="cpu"), initialize its parameters and buffers, and make the '
        "optimizer after that",
    )
    _check_parameters(trained)
    _check_model(trained, cut=cut)
    for name, value in _slots(trained.optimizer):
        _check_slot(name, value)


def in_json(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a checkpoint gives them back: a tuple becomes a list.

    Raises:
        UserError: JSON cannot hold one of them.
    """
    try:
        return {key: json.loads(json.dumps(one, sort_keys=True)) for key, one in values.items()}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the {what} of a checkpoint cannot be saved ({error})",
            "keep strings, numbers, lists and dicts there",
        ) from None


def is_plain(value: Any) -> bool:
    """Whether JSON returns a value as it was given."""
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


def _check_model(trained: TrainingState, *, cut: bool) -> None:
    model = trained.model
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved = model.state_dict(keep_vars=True)
    extras = _check_extra(trained, cut=cut)
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


def _check_extra(trained: TrainingState, *, cut: bool) -> set[str]:
    """Check what modules keep beside tensors; returns its names in `state_dict`."""
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
        if cut:
            raise UserError(
                f"{what} cannot be saved of a model that is cut over ranks",
                "keep it in a buffer (register_buffer)",
            )
    return set(found)


def _slots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The values in the optimizer's state, each with a name for messages."""
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


def bytes_to_compare(sizes: Mapping[str, int], turn: int) -> list[tuple[str, int, int]]:
    """The bytes that are compared in a turn: name, first byte, byte behind the last.

    The turns go round through all bytes, COMPARED_BYTES at a time.

    Args:
        sizes: bytes of each tensor, by name.
        turn: counted from 0.
    """
    names, edges = [*sizes], np.cumsum([0, *sizes.values()])
    everything = int(edges[-1])
    if not everything:
        return []
    begin = turn * COMPARED_BYTES % everything
    end = begin + min(COMPARED_BYTES, everything)
    found = []
    # A turn that passes the end goes on at the start.
    for first, last in ((begin, min(end, everything)), (0, end - everything)):
        place = int(np.searchsorted(edges, first, side="right")) - 1
        while first < last:
            stop = min(last, int(edges[place + 1]))
            low = int(edges[place])
            if first < stop:
                found.append((names[place], first - low, stop - low))
            first, place = stop, place + 1
    return found


def compare_replicas(
    parts: Parts, sizes: Mapping[str, int], alike: Group, group: Group, turn: int
) -> None:
    """Compare a sample between ranks that should hold the same bits. Collective over both groups.

    Ranks that hold other tensors raise nothing here: the comparison of plans finds them.

    Args:
        parts: the tensors of this rank.
        sizes: bytes of the tensors to compare, by name, in the same order on all ranks of `alike`.
        alike: the ranks that should hold the same bits.
        group: all ranks of the job. Each is in one such group.
        turn: selects the sample.

    Raises:
        DivergenceError: they differ. All ranks raise it. The message names ranks, hosts and a
            tensor; only the ranks that differ, if most ranks agree.
    """
    failure: DivergenceError | None = None
    if alike.size > 1:
        pieces = bytes_to_compare(sizes, turn)
        hashed = xxhash.xxh3_128()
        for name, begin, end in pieces:
            hashed.update(parts.on_host(name, begin, end).data)
        names = hash_of(repr(pieces).encode())
        if not alike.same(hashed.digest() + names, "a sample of what replicas hold"):
            failure = _divergence(parts, pieces, names, alike, group)
    settle(group, failure)


def _divergence(
    parts: Parts, pieces: Sequence[tuple[str, int, int]], names: bytes, alike: Group, group: Group
) -> DivergenceError | None:
    """The error for the first tensor that differs. Collective over `alike`.

    It is None if the ranks hold other tensors.
    """
    found = alike.gathered((group.rank, alike.host, names))
    if len({names for *_, names in found}) > 1:
        return None
    by_rank = alike.gathered([hash_of(parts.on_host(*piece)) for piece in pieces])
    for (name, _, _), values in zip(pieces, zip(*by_rank, strict=True), strict=True):
        if len({*values}) > 1:
            return _divergence_error(name, values, [(rank, host) for rank, host, _ in found])
    return None


def _divergence_error(
    name: str, values: tuple[bytes, ...], ranks: list[tuple[int, str]]
) -> DivergenceError:
    several = len({host for _, host in ranks}) > 1
    again = "start again from the last checkpoint"
    remedy = (
        "take the same learning rate on all ranks, and write parameters and gradients on all "
        "alike; if the program does that, "
    )
    (usual, count), *_ = Counter(values).most_common()
    if 2 * count > len(values):
        odd = [f"rank {r} ({h})" for (r, h), v in zip(ranks, values, strict=True) if v != usual]
        return DivergenceError(
            f"{name} of {', '.join(odd)} is not what the other {count} replicas have",
            remedy + again + (", without that host if it happens again" if several else ""),
        )
    both = ", ".join(f"rank {rank} ({host})" for rank, host in ranks)
    return DivergenceError(
        f"{name} differs between {both}, which should have the same",
        remedy + ("one of these hosts computes wrongly: " if several else "") + again,
    )


def batches_to_check(held: Mapping[str, LocalTensor], names: Iterable[str]) -> list[Batch]:
    """Divide tensors of floating-point or complex numbers into batches of one type and device.

    Args:
        held: this rank's parts.
        names: the tensors to divide; those of integers are left out.
    """
    found: list[Batch] = []
    begun: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name in names:
        tensor = held[name].tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        kind = tensor.dtype, tensor.device
        some, size = begun.get(kind, ([], TOGETHER))
        if size + tensor.nbytes > TOGETHER:
            some, size = [], 0
            found.append((tensor.dtype.to_real(), some))
        some.append(name)
        begun[kind] = some, size + tensor.nbytes
    return found


def parts_are_finite(parts: Parts, mine: Iterable[Batch], group: Group) -> bool:
    """Whether the numbers of all ranks' batches are finite. Collective.

    Only trained parameters have to be checked: a mask in a buffer may well have infinities. A step
    that makes the optimizer's state infinite makes its parameter so, then or in the next step.

    Args:
        parts: the tensors of this rank.
        mine: the batches that this rank checks.
        group: all ranks of the job.

    Raises:
        CheckpointError: a rank has too little memory for that.
    """
    finite, failure = True, None
    try:
        with enough_memory("a check of the numbers", background=False):
            finite = are_finite([parts.flat(names).view(dtype) for dtype, names in mine])
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
        failure = error
    return not settle(group, failure, int(not finite), "whether the state is finite")


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers of some tensors are finite. If their sums are, each is read once."""
    sums = [t.sum(dtype=_wide(t.dtype)) for t in tensors if t.is_floating_point()]
    sums += [torch.view_as_real(t).sum() for t in tensors if t.is_complex()]
    if all(bool(torch.stack(some).isfinite().all()) for some in _by_kind(sums)):
        return True
    # A sum of finite numbers may be infinite, so now each number is checked. Numbers of 8 bits are
    # widened, because torch.isfinite does not take them.
    return all(bool(torch.isfinite(t.to(_wide(t.dtype))).all()) for t in tensors)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _by_kind(sums: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in sums:
        kinds.setdefault((one.device, one.dtype), []).append(one)
    return list(kinds.values())
