"""A rank's tensors of a model and its optimizer, looked at before each save."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpc_train.checkpoint import checks, optimizer_state, state
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.state import TrainingState

PLAIN = (bool, int, float, str, type(None))  # values that cannot change without being replaced
Seen: TypeAlias = "tuple[tuple[list[Any], ...], list[Hashable]]"
"""What tells one look at a rank's tensors from another: see `Holdings._walk`."""


class Holdings:
    """This rank's tensors of a model and its optimizer, as parts of a checkpoint.

    They are collected anew only if something other than their numbers has changed.

    Args:
        trained: model and optimizer.
    """

    def __init__(self, trained: TrainingState) -> None:
        self.trained = trained
        self.parts = Parts({})
        self.values: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        """What is saved of model and optimizer besides tensors, by key of the state."""
        self.trained_names: list[str] = []
        """The names of the parameters that require gradients."""
        self.pieces: set[str] = set()
        """The names of the divided parameters: each rank holds its own piece of them."""
        self._seen: Seen | None = None
        self._tensors: list[Tensor] = []  # keeps them alive: a freed tensor's id would come again
        self._held: dict[str, LocalTensor] = {}
        self._odd: set[str] = set()  # tensors that are not contiguous, which are saved as copies
        self._buffers: set[str] = set()
        self._passing: set[str] = set()  # what `parts` has for one save only

    def forget(self) -> None:
        """Drop all tensors, because others take their place."""
        self.parts, self._held, self._tensors, self._seen = Parts({}), {}, [], None
        self._odd, self._buffers, self._passing = set(), set(), set()

    def look(self, more: Mapping[str, LocalTensor], *, copy_buffers: bool) -> bool:
        """Bring `parts` up to date.

        Args:
            more: other tensors to save, by name.
            copy_buffers: whether buffers are copied, because a forward pass may change them before
                the save has ended.

        Returns:
            Whether tensors, their forms, parts or owners, or `values` are others than last time.

        Raises:
            UserError: a checkpoint cannot hold all of them.
        """
        tensors, seen = self._walk(more)
        changed = seen is None or seen != self._seen
        if changed:
            self._seen = None
            checks.check_savable(self.trained)
            trained = self.trained
            of_model = state.model_tensors(trained.model, trained.shards, trained.streamed)
            self._held = of_model | optimizer_state.optimizer_tensors(trained)
            self.values = {
                "model": state.model_values(self.trained),
                "optimizer": optimizer_state.optimizer_values(self.trained),
            }
            self._odd = {n for n, part in self._held.items() if not part.tensor.is_contiguous()}
            self._buffers = state.buffer_names(self.trained)
            self.trained_names = state.names_with_gradients(self.trained)
            self.pieces = state.names_of_pieces(self.trained)
            self.parts = Parts({n: p for n, p in self._held.items() if n not in self._odd})
            self._tensors, self._seen = tensors, seen
        for name in self._odd | self._buffers:
            part = self._held[name]
            if name in self._odd or copy_buffers:
                copied = part.tensor.clone(memory_format=torch.contiguous_format)
                part = replace(part, tensor=copied)
            self.parts.put(name, part)
        for name, part in more.items():
            self.parts.put(name, replace(part, tensor=part.tensor.contiguous()))
        self._passing = self._odd | self._buffers | more.keys()
        return changed

    def release(self) -> None:
        """Free the copies that `parts` has for one save only."""
        for name in self._passing:
            self.parts.drop(name)
        self._passing = set()

    def _walk(self, more: Mapping[str, LocalTensor]) -> tuple[list[Tensor], Seen | None]:
        """All tensors, and a value that stays equal as long as only their numbers change.

        It is None if that cannot be told. A tensor that is the same object may have got other
        `.data`, so the addresses are part of the value.
        """
        trained = self.trained
        saved = trained.model.state_dict(keep_vars=True)
        tensors = [value for value in saved.values() if isinstance(value, Tensor)]
        marks: list[Hashable] = [*saved]
        known = True
        for group in trained.optimizer.param_groups:
            for parameter in group["params"]:
                marks.append(id(parameter))
                for slot, value in trained.optimizer.state.get(parameter, {}).items():
                    marks.append(slot)
                    if isinstance(value, Tensor):
                        tensors.append(value)
                    elif isinstance(value, PLAIN):
                        marks.append(value)
                    else:
                        known = False  # a list may have changed inside
        marks += [(name, part.form, part.spec, part.owned) for name, part in more.items()]
        if not known or any(tensor.layout is not torch.strided for tensor in tensors):
            return tensors, None
        # The strides and the size of a contiguous tensor tell its shape. Asking for the shape takes
        # ten times as long.
        forms = (
            [*map(id, tensors)],
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.stride, tensors)],
            [*map(Tensor.numel, tensors)],
            [tensor.dtype for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
        )
        return tensors, (forms, marks)
