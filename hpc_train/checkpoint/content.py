"""The content of a run's checkpoints: collected and checked before a save, and restored."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hpc_train.checkpoint import checks, optimizer_state, restore, state
from hpc_train.checkpoint.background import enough_memory
from hpc_train.checkpoint.buffers import BufferForms, Buffers, check_forms, forms_of, make_late
from hpc_train.checkpoint.checks import Batch, batches_to_check, parts_are_finite
from hpc_train.checkpoint.fileformat import EXTENT_BYTES
from hpc_train.checkpoint.holdings import Holdings
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.routes import Plans
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import Collectives
from hpc_train.collectives.overwrite import overwrite
from hpc_train.errors import CheckpointMismatch, plural
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

_COPIES = "copies of the tensors"  # what needs memory


class Content:
    """A model with its optimizer, and the other state that is saved. All ranks call each method.

    Args:
        trained: is saved, and restored in place.
        collectives: of all ranks that train.
        identity: what a resumed run must have in common with a checkpoint, by configuration key.
        about: what a reader of the file needs to use the model, as plain JSON values.
        where: where the data of this run is, in words; "" if that is not known.

    Raises:
        UserError: a checkpoint cannot hold all of it.
    """

    def __init__(
        self,
        trained: TrainingState,
        collectives: Collectives,
        identity: Mapping[str, Any],
        about: Mapping[str, Any],
        where: str,
    ) -> None:
        self.trained, self.more = trained, trained.extra
        self.group = group = collectives.group
        self.replica, self.alike = trained.replica, trained.alike or collectives
        self.identity, self.about, self.where = identity, about, where
        self.plans = Plans(group, self.replica)
        self._holdings = Holdings(trained)
        self._values: dict[str, Any] = {}  # of all ranks of a replica: see `Holdings.values`
        self._compared: dict[str, int] = {}  # bytes of the tensors that all replicas hold, by name
        self._batches: list[Batch] = []  # the tensors whose numbers this rank checks
        self._forms: BufferForms = {}
        self.begin()
        self.check()
        has_extra = bool(state.modules_with_extra(trained.model))
        self._has_extra = bool(group.largest(int(has_extra), "whether modules keep more"))
        self._extra: dict[str, Any] = {}
        self.buffers = Buffers(trained.model, self.alike, group)

    @property
    def parts(self) -> Parts:
        """This rank's parts. They are complete from `look` until `release`."""
        return self._holdings.parts

    def begin(self) -> None:
        """Remember the buffers' forms, as each start of the program has them before training."""
        self._forms = forms_of(self.trained.model)

    def check(self) -> None:
        """Check that a checkpoint can hold all state that exists by now.

        Raises:
            UserError: it cannot.
        """
        cut = self.alike.group.size < self.group.size
        with agreed(self.group):
            checks.in_json("identity", self.identity)
            checks.in_json("description (about)", self.about)
            checks.check_savable(self.trained, cut=cut)
            whole = not self.trained.shards
            check_forms(self.trained.model, self._forms, whole=whole)

    def unify(self) -> None:
        """Bring all replicas to one state: running statistics in their buffers differ."""
        self.more.unify()
        self.buffers.unify()

    def look(self, *, copy_buffers: bool) -> None:
        """Bring `parts`, plans and values up to date. Call it after `unify`.

        Args:
            copy_buffers: whether buffers are copied, because a forward pass may change them before
                the save has ended. A save in the background needs that.

        Raises:
            CheckpointError: there is no memory for copies.
            UserError: a checkpoint cannot hold all of it.
        """
        try:
            more = self.more.collect()
            with agreed(self.group), enough_memory(_COPIES, background=copy_buffers):
                changed = self._holdings.look(more, copy_buffers=copy_buffers)
            if self.group.largest(int(changed)):
                self._plan_anew()
            if self._has_extra:
                self._look_at_extra()
        except Exception:  # raised on all ranks
            # What has changed since the last save is not planned yet. So the next look must not
            # take it for unchanged. The copies that were made are freed.
            self._holdings.forget()
            raise

    def _plan_anew(self) -> None:
        alike = self.alike.group
        self.plans.forget()
        values = self._holdings.values
        self._values = {key: self.replica.united(values[key]) for key in values}
        self._compared = self._whole_in_replicas()
        names, pieces = self._holdings.trained_names, self._holdings.pieces
        shared = [name for name in names if name not in pieces]
        own = [name for name in names if name in pieces]
        mine = [*own, *shared[alike.rank :: alike.size]]
        self._batches = batches_to_check(self.parts.held, mine)

    def _look_at_extra(self) -> None:
        self.check()  # modules may keep values of another type now
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
            if (name.startswith(state.MODEL) and name not in self._holdings.pieces)
            or (name.startswith(state.OPTIMIZER) and optimizer_state.parameter_of(name) not in cut)
        }

    def compare(self, step: int) -> None:
        """Compare a sample of the tensors that all replicas hold whole. Call it after `look`.

        Raises:
            DivergenceError: they differ. All ranks raise it.
        """
        # A random turn, because a count would begin again with each job.
        turn = Random(step).randrange(1 << 32)
        checks.compare_replicas(self.parts, self._compared, self.alike.group, self.group, turn)

    def is_finite(self) -> bool:
        """Whether all trained parameters are finite. Call it after `look`."""
        return parts_are_finite(self.parts, self._batches, self.group)

    def state(self, step: int, also: Mapping[str, Any]) -> bytes:
        """All values to save that are not tensors, as JSON. Call it after `look`.

        Args:
            step: the step that has ended.
            also: further values.
        """
        tree = {
            "step": step,
            "identity": self.identity,
            "about": self.about,
            "optimizer": self._values["optimizer"],
            **also,
        }
        if self.trained.scaler is not None:
            tree["scaler"] = self.trained.scaler.state_dict()
        if of_model := self._values["model"]:
            tree["model"] = of_model
        if more := self.more.values():
            tree["more"] = more
        if self._extra:
            tree["extra_state"] = self._extra
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    def bytes_to_write(self) -> int:
        """About how many bytes this rank writes in a save; 0 if other ranks hold a part of them."""
        trained = self.trained
        if self.replica.size > 1 or trained.pieces:
            return 0
        held = state.model_tensors(trained.model, trained.shards, trained.streamed)
        every = [*held.values(), *optimizer_state.optimizer_tensors(trained).values()]
        extents = sum(part.tensor.nbytes for part in every) // EXTENT_BYTES + 2
        return -(-extents // self.group.size) * EXTENT_BYTES

    def release(self) -> None:
        """Free the copies that were made for one save."""
        self._holdings.release()

    def restore(self, path: Path) -> dict[str, Any]:
        """Bring model, optimizer and all other state to that of a checkpoint.

        Returns:
            All values of the checkpoint that are not tensors.

        Raises:
            CheckpointError: the checkpoint is damaged.
            CheckpointUnreadable: a rank cannot read it.
            CheckpointMismatch: it is of another model or optimizer, or has another identity.
        """
        reader = restore.open_together(path, self.group)
        saved = restore.load_state(reader, self.group)
        trained = self.trained
        self._holdings.forget()
        self.plans.forget()
        with agreed(self.group):
            if not trained.shards:
                make_late(trained.model, reader.entries, saved.get("model", {}))
        of_model = state.model_tensors(trained.model, trained.shards, trained.streamed)
        forms = self.replica.united({name: part.form for name, part in of_model.items()})
        names = self.replica.united(optimizer_state.trained_names(trained))
        entries, values = reader.entries, saved["optimizer"]
        with agreed(self.group):
            state.check_model(entries, forms, path)
            self._check_identity(saved["identity"], path)
            optimizer_state.check_slots(entries, values, names)
            optimizer_state.make_optimizer_state(trained, entries, values)
        held = of_model | optimizer_state.optimizer_tensors(trained) | self.more.expect(entries)
        contiguous = {
            name: replace(part, tensor=part.tensor.contiguous()) for name, part in held.items()
        }
        restore.load_tensors(reader, contiguous, self.group, *self._grid())
        for name, part in held.items():
            if contiguous[name].tensor is not part.tensor:
                overwrite(part.tensor, contiguous[name].tensor)
        with agreed(self.group):
            state.put_module_extras(trained.model, saved.get("extra_state", {}), path)
        if trained.scaler is not None and "scaler" in saved:
            trained.scaler.load_state_dict(saved["scaler"])
        self.more.take(saved.get("more", {}))  # the residuals take the restored loss scale
        with agreed(self.group):  # now the options of the optimizer's groups are restored, too
            optimizer_state.check_slots_of_options(trained.optimizer, path)
        return saved

    def _grid(self) -> tuple[Group, Group] | tuple[()]:
        """The ranks that hold the model together, and those that hold what this rank does.

        It is empty unless each rank is in one such pair of groups.
        """
        fits = self.alike.group.size * self.replica.size == self.group.size
        return (self.replica, self.alike.group) if fits else ()

    def _check_identity(self, saved: Mapping[str, Any], path: Path) -> None:
        own = checks.in_json("identity", self.identity)
        for key in sorted(own.keys() | saved.keys()):
            if own.get(key) != saved.get(key):
                made = f"with {key} {saved[key]}" if key in saved else f"without {key}"
                mine = own.get(key, "no such thing")
                cause, back = f"{path} was made {made}, this run has {mine}", self._way_back(key)
                if key == "data" and isinstance(saved.get(key), str | list):
                    than = f" than {self.where}" if self.where else ""
                    cause = f"{path} was made from {_other_data(saved[key], mine, than)}"
                    back = "set data.path back"
                raise CheckpointMismatch(cause, f"{back}, {self._other_ways(path, key)}")

    def _way_back(self, key: str) -> str:
        if key == "shares of the mixture":
            named = " (weight in data.path)" if self.where else ""
            return f"set the weights of the mixture{named} back"
        return "give the same data again" if " " in key else f"set {key} back"  # or it is no key

    def _other_ways(self, path: Path, key: str) -> str:
        """What to do if the difference is wanted. Weights fit unless the model has changed."""
        anew = "start anew in another directory"
        if not self.where or key.startswith(("model.", "finetune.")):
            return f"or {anew}"
        own = f"give another run.dir and --checkpoint.weights {shlex.quote(str(path))}"
        return f"{anew}, or keep only its weights: {own}"


def _other_data(saved: str | list[Any], mine: Any, than: str) -> str:
    """How the data of a checkpoint differs from this run's, in words.

    Args:
        saved: the hash of the data set's manifest, or those of a mixture.
        mine: the same of this run; text of another kind if it has no data with a manifest.
        than: where the data of this run is, as in "than here"; "" if that is not known.
    """
    sets, own = (one if isinstance(one, list) else [one] for one in (saved, mine))
    if sorted(map(str, sets)) == sorted(map(str, own)):
        return f"the same data in another order{than}"
    if len(sets) != len(own):
        return f"other data{than}: from {plural(len(sets), 'data set')}, and here are {len(own)}"
    at = next(number for number, one in enumerate(sets) if one != own[number])
    which = f"data set {at + 1}" if len(sets) > 1 else "its data"
    return (
        f"other data{than}: the manifest of {which} had the hash {sets[at]}, here it is {own[at]}"
    )
