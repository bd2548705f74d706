"""What goes into the checkpoints of a run, and comes back: looked at before it is saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpc_train.checkpoint import checks, restore, state
from hpc_train.checkpoint.background import enough_memory
from hpc_train.checkpoint.checks import Batch, batches_to_check, parts_are_finite
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.routes import Plans
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import Collectives
from hpc_train.errors import CheckpointMismatch
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

PLAIN = (bool, int, float, str, type(None))
Seen: TypeAlias = "tuple[tuple[list[Any], ...], list[Hashable]]"


class Holdings:
    """This rank's tensors of a model and its optimizer, as parts of a checkpoint.

    They are looked for anew only where something has changed.

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
            checks.check_savable(self.trained)
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


class Content:
    """A model with its optimizer, and what else is saved. All ranks call each method.

    Args:
        trained: what is saved, and restored in place.
        collectives: of all ranks that train.
        identity: what a checkpoint must have been made with to be continued, by configuration key.
        about: what a reader of the file needs to use the model, as plain JSON values.

    Raises:
        UserError: a checkpoint cannot hold all of it.
    """

    def __init__(
        self,
        trained: TrainingState,
        collectives: Collectives,
        identity: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        self.trained, self.more = trained, trained.extra
        self.group = group = collectives.group
        self.replica, self.alike = trained.replica, trained.alike or collectives
        self.identity, self.about = identity, about
        self.plans = Plans(group, self.replica)
        self._holdings = Holdings(trained)
        self._values: dict[str, Any] = {}  # of the optimizers of a replica, all together
        self._compared: dict[str, int] = {}  # bytes by name, of what replicas have alike
        self._batches: list[Batch] = []  # of which this rank looks whether they are finite
        self.check()
        has_extra = bool(state.modules_with_extra(trained.model))
        self._has_extra = bool(group.largest(int(has_extra), "whether modules keep more"))
        self._extra: dict[str, Any] = {}

    @property
    def parts(self) -> Parts:
        """This rank's parts, from `look` to `release`."""
        return self._holdings.parts

    def check(self) -> None:
        """Check that a checkpoint can hold all of it, as far as it is there.

        Raises:
            UserError: it cannot.
        """
        with agreed(self.group):
            checks.check_savable(self.trained)

    def unify(self) -> None:
        """Bring all replicas to one state: running statistics in buffers differ."""
        self.more.unify()
        for buffer in self.trained.model.buffers():
            self.alike.broadcast_(buffer)

    def look(self, *, copy_buffers: bool) -> None:
        """Bring `parts`, plans and values up to date, after `unify`.

        Args:
            copy_buffers: for a save that goes on while a forward pass may change them.

        Raises:
            CheckpointError: there is no memory for copies.
            UserError: a checkpoint cannot hold all of it.
        """
        more, alike = self.more.collect(), self.alike.group
        with agreed(self.group), enough_memory("copies of the tensors"):
            changed = self._holdings.look(more, copy_buffers=copy_buffers)
        if self.group.largest(int(changed)):
            self.plans.forget()
            self._values = self.replica.united(self._holdings.values)
            self._compared = self._whole_in_replicas()
            mine = self._holdings.trained_names[alike.rank :: alike.size]
            self._batches = batches_to_check(self.parts.held, mine)
        if self._has_extra:
            self._look_at_extra()

    def _look_at_extra(self) -> None:
        self.check()  # what modules keep may be of another type now
        with agreed(self.group):
            self._extra = state.module_extras(self.trained.model)
            kept = json.dumps(self._extra, sort_keys=True)
        what = "what the model's modules keep beside tensors (get_extra_state)"
        same(self.group, what, kept, "keep there what all ranks have alike")

    def _whole_in_replicas(self) -> dict[str, int]:
        """Bytes of the tensors that all replicas hold whole, by name."""
        known = self.trained.parameters()
        cut = {known[piece].name for piece in self.trained.pieces}
        return {
            name: self.parts.size(name)
            for name in self.parts.held
            if name.startswith(state.MODEL)
            or (name.startswith(state.OPTIMIZER) and state.parameter_of(name) not in cut)
        }

    def compare(self, step: int) -> None:
        """Compare a sample of what all replicas hold whole, after `look`.

        Raises:
            DivergenceError: it differs; on all ranks.
        """
        turn = Random(step).randrange(1 << 32)  # by chance: a count would begin anew with each job
        checks.compare_replicas(self.parts, self._compared, self.alike.group, self.group, turn)

    def is_finite(self) -> bool:
        """Whether all trained parameters are finite, after `look`."""
        return parts_are_finite(self.parts, self._batches, self.group)

    def state(self, step: int, also: Mapping[str, Any]) -> bytes:
        """What is no tensor, as JSON, after `look`.

        Args:
            step: that has ended.
            also: what else is to be in it.
        """
        tree = {
            "step": step,
            "identity": self.identity,
            "about": self.about,
            "optimizer": self._values,
            **also,
        }
        if more := self.more.values():
            tree["more"] = more
        if self._extra:
            tree["extra_state"] = self._extra
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    def release(self) -> None:
        """Give back the memory of what was copied for one save."""
        self._holdings.release()

    def restore(self, path: Path) -> dict[str, Any]:
        """Bring model, optimizer and all else to what a checkpoint has.

        Returns:
            What is no tensor in it.

        Raises:
            CheckpointError: it is damaged.
            CheckpointUnreadable: a rank cannot read it.
            CheckpointMismatch: it is of another model or optimizer, or of another identity.
        """
        reader = restore.open_together(path, self.group)
        saved = restore.load_state(reader, self.group)
        trained = self.trained
        of_model = state.model_tensors(trained.model, trained.shards)
        forms = self.replica.united({name: part.form for name, part in of_model.items()})
        names = self.replica.united(state.trained_names(trained))
        entries, values = reader.entries, saved["optimizer"]
        with agreed(self.group):
            state.check_model(entries, forms, path)
            self._check_identity(saved["identity"], path)
            state.check_slots([*entries, *values], names)
            state.make_optimizer_state(trained, entries, values)
        held = of_model | state.optimizer_tensors(trained) | self.more.expect(entries)
        contiguous = {
            name: replace(part, tensor=part.tensor.contiguous()) for name, part in held.items()
        }
        restore.load_tensors(reader, contiguous, self.group, *self._grid())
        for name, part in held.items():
            if contiguous[name].tensor is not part.tensor:
                part.tensor.copy_(contiguous[name].tensor)
        with agreed(self.group):
            state.put_module_extras(trained.model, saved.get("extra_state", {}), path)
        self.more.take(saved.get("more", {}))
        return saved

    def _grid(self) -> tuple[Group, Group] | tuple[()]:
        """The ranks that hold the whole, and those that hold what this one does, if they fit."""
        fits = self.alike.group.size * self.replica.size == self.group.size
        return (self.replica, self.alike.group) if fits else ()

    def _check_identity(self, saved: Mapping[str, Any], path: Path) -> None:
        for key in sorted(self.identity.keys() | saved.keys()):
            if self.identity.get(key) != saved.get(key):
                raise CheckpointMismatch(
                    f"{path} was made with {key} {saved.get(key)}, this run has "
                    f"{self.identity.get(key)}",
                    f"set {key} back, or start anew in another directory",
                )
