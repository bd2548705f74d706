"""The buffers of a model, which all replicas get from rank 0. Each rank keeps its sparse ones.

A module may make a buffer in its first forward pass: one that came as None or without elements. Or
it makes it larger, and takes the saved shape when it is loaded, as observers of quantization do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpc_train.checkpoint.fileformat import Entry, torch_dtypes
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.state import COMPLEX, MODEL
from hpc_train.collectives import Collectives
from hpc_train.errors import UserError
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

COMPARED = 1 << 20  # elements of each buffer
Form: TypeAlias = "tuple[torch.dtype, torch.Size]"
BufferForms: TypeAlias = "dict[str, Form | None]"
"""Type and shape of each buffer that is saved, by name; None: the buffer is None."""


class Buffers:
    """Gives all replicas the same buffers, but for sparse ones.

    Args:
        model: this rank's part of the model.
        alike: connects the ranks whose buffers should be the same.
        group: all ranks.
    """

    def __init__(self, model: nn.Module, alike: Collectives, group: Group) -> None:
        self.model, self.alike, self.group = model, alike, group
        self._warned = False
        # Running statistics differ on purpose, or are those of all ranks already.
        self._statistics = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in model.named_modules()
            if isinstance(module, _NormBase)
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }

    def unify(self) -> None:
        """Give all replicas rank 0's buffers, but for sparse ones. Collective.

        Rank 0 warns once of a buffer that differed and is no running statistic of torch's layers.
        """
        compared = self.alike.group.size > 1 and not self._warned
        found = ""
        for name, buffer in self.model.named_buffers():
            if buffer.layout is not torch.strided:
                continue
            if not compared or found or name in self._statistics:
                self.alike.broadcast_(buffer)
            elif _changed_by(self.alike.broadcast_, buffer):
                found = name
        if compared and (names := [name for name in self.group.gathered(found) if name]):
            self._warned = True
            if self.group.rank == 0:
                logger.warning(
                    "the buffer %s differs between ranks, and all get rank 0's at a checkpoint or "
                    "an evaluation, which changes the training: update it from means over the "
                    "ranks (docs/how-to/parallel.md)",
                    names[0],
                )


def _changed_by(change: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> bool:
    """Change a tensor in place. Returns whether its first elements have other bits."""

    def some() -> torch.Tensor:  # it may be a view with strides, or stand for conjugate numbers
        first = tensor.detach().flatten()[:COMPARED].resolve_conj().resolve_neg()
        return as_bytes(first.clone(memory_format=torch.contiguous_format))

    before = some()
    change(tensor)
    return not torch.equal(before, some())


def _saved(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor | None]]:
    """The buffers that are saved, also those that are None: module, name there, name, buffer."""
    saved = model.state_dict(keep_vars=True)  # modules and hooks may leave some out
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}".removeprefix(".")
            if key not in module._non_persistent_buffers_set and (buffer is None or name in saved):
                yield module, key, name, buffer


def forms_of(model: nn.Module) -> BufferForms:
    """The present forms of a model's buffers."""
    return {name: _form(buffer) for *_, name, buffer in _saved(model)}


def make_late(model: nn.Module, entries: Mapping[str, Entry], values: Mapping[str, str]) -> None:
    """Make the buffers that a model makes in its first forward pass, with a checkpoint's shapes.

    Their numbers are not filled yet.

    Args:
        model: has all tensors whole.
        entries: the checkpoint's tensors, by name.
        values: what it tells of the model's tensors, by name (see `state.COMPLEX`).
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    for module, key, name, buffer in [*_saved(model)]:
        if (saved := entries.get(MODEL + name)) is None:
            continue
        form = torch_dtypes()[saved.dtype], torch.Size(saved.shape)
        if values.get(MODEL + name) == COMPLEX:
            form = torch.complex128, form[1][:-1]
        own = _form(buffer)
        if form == own or not _may_change(module, own, form):
            continue
        made = torch.empty(
            form[1], dtype=form[0], device=device if buffer is None else buffer.device
        )
        if buffer is None or not buffer.numel():
            module._buffers[key] = made
        else:
            prefix = name.removesuffix(key)
            held = {prefix + k: t for k, t in module.state_dict(keep_vars=True).items()}
            module._load_from_state_dict(held | {name: made}, prefix, {}, False, [], [], [])


def _form(buffer: Tensor | None) -> Form | None:
    return None if buffer is None else (buffer.dtype, buffer.shape)


def _may_change(module: nn.Module, first: Form | None, now: Form | None) -> bool:
    """Whether a buffer that had one form gets the other one when it is restored."""
    if isinstance(module, _NormBase) or now is None:  # its options say which statistics are None
        return False
    loads = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return first is None or not first[1].numel() or (loads and first[0] == now[0])


def check_forms(model: nn.Module, first: BufferForms, *, whole: bool) -> None:
    """Check that a run that starts anew can take the buffers as they are now.

    Args:
        model: this rank's.
        first: their forms before the first step.
        whole: whether each rank has all tensors whole, so that `make_late` makes buffers.

    Raises:
        UserError: it cannot.
    """
    remedy = "keep what is saved as it is from the start on, or register it with persistent=False"
    if whole:
        remedy += "; a buffer may also be None where it is registered"
    now = forms_of(model)
    modules = {name: module for module, _, name, _ in _saved(model)}
    for name in sorted(now.keys() | first.keys()):
        was, later = (
            _told(forms[name]) if name in forms else "not there" for forms in (first, now)
        )
        known = whole and name in now and name in first
        if was != later and not (known and _may_change(modules[name], first[name], now[name])):
            raise UserError(
                f"the model's buffer {name} was {was} before the first step and is {later} now, so "
                "no other start could restore it",
                remedy,
            )


def _told(form: Form | None) -> str:
    return f"{str(form[0]).removeprefix('torch.')} {list(form[1])}" if form else "None"
