"""What a rank holds of a checkpoint, looked for anew only where something has changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpc_train.checkpoint import savable, state
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.state import TrainingState

PLAIN = (bool, int, float, str, type(None))
Seen: TypeAlias = "tuple[tuple[list[Any], ...], list[Hashable]]"


class Holdings:
    """This rank's tensors of a model and its optimizer, as parts of a checkpoint.

    Args:
        trained: model and optimizer.
    """

    def __init__(self, trained: TrainingState) -> None:
        self.trained = trained
        self.parts = Parts({})
        self.values: dict[str, Any] = {}
        """What the optimizer remembers that is no tensor."""
        self.trained_names: list[str] = []
        """Of the parameters that require gradients."""
        self._seen: Seen | None = None
        self._tensors: list[Tensor] = []  # so that none of them is gone and its id another one's
        self._held: dict[str, LocalTensor] = {}
        self._odd: set[str] = set()  # not contiguous: a copy is saved
        self._buffers: set[str] = set()
        self._passing: set[str] = set()  # what `parts` has for one save only

    def look(self, more: Mapping[str, LocalTensor], *, copy_buffers: bool) -> bool:
        """Bring `parts` up to date.

        Args:
            more: what else is saved.
            copy_buffers: for a save that goes on while a forward pass may change them.

        Returns:
            Whether tensors, their forms, parts or owners, or `values` are others than last time.

        Raises:
            UserError: a checkpoint cannot hold all of it.
        """
        tensors, seen = self._walk(more)
        changed = seen is None or seen != self._seen
        if changed:
            self._seen = None
            savable.check_savable(self.trained)
            model, shards = self.trained.model, self.trained.shards
            self._held = state.model_tensors(model, shards) | state.optimizer_tensors(self.trained)
            self.values = state.optimizer_values(self.trained)
            self._odd = {n for n, part in self._held.items() if not part.tensor.is_contiguous()}
            self._buffers = state.buffer_names(model, shards)
            self.trained_names = state.names_with_gradients(model, shards)
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
        """Give back the memory of what `parts` has for one save only."""
        for name in self._passing:
            self.parts.drop(name)
        self._passing = set()

    def _walk(self, more: Mapping[str, LocalTensor]) -> tuple[list[Tensor], Seen | None]:
        """All tensors, and what stays the same while only their numbers change; None: nobody knows.

        Of a tensor that is the same object `.data` may still be another.
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
        # Of contiguous tensors these tell the shape as well, which takes ten times as long.
        forms = (
            [*map(id, tensors)],
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.stride, tensors)],
            [*map(Tensor.numel, tensors)],
            [tensor.dtype for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
        )
        return tensors, (forms, marks)
