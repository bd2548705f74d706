"""The checkpoints of a run: saved, restored from the newest that is sound, and dropped."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpc_train import files
from hpc_train.checkpoint import divergence, extra, restore, savable, state
from hpc_train.checkpoint.claim import Claim
from hpc_train.checkpoint.directory import LATEST, SECONDS, find, name_of, step_of
from hpc_train.checkpoint.engines import Engine, Way, Ways
from hpc_train.checkpoint.fileformat import Held
from hpc_train.checkpoint.finite import Batch, batches, parts_are_finite
from hpc_train.checkpoint.holdings import Holdings
from hpc_train.checkpoint.more import More, Stateful
from hpc_train.checkpoint.phases import Flight, Phases, agree, run
from hpc_train.checkpoint.plan import Plans
from hpc_train.checkpoint.retention import Retention
from hpc_train.checkpoint.save import saving
from hpc_train.checkpoint.snapshot import Snapshot, enough_memory
from hpc_train.collectives import Collectives
from hpc_train.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointUnreadable,
    DivergenceError,
    NotFiniteError,
)
from hpc_train.mpi.agreement import agreed, from_first, same
from hpc_train.mpi.group import Group
from hpc_train.sharding import Shard

logger = logging.getLogger(__name__)

Replicas = Literal["stop", "warn", "off"]
Nonfinite = Literal["stop", "warn"]


class Checkpoints:
    """Saves and restores a model with its optimizer in a folder.

    All ranks must call each method, with the same arguments.

    Args:
        directory: the folder, made with the first checkpoint.
        collectives: of all ranks that train.
        model, optimizer: what is saved; restored in place.
        keep: how many of the newest ones are kept, 0: all; or by which rule.
        engine: how ranks write.
        background: whether `save` will be asked to write in the background.
        verify: whether what was written by POSIX calls is read back, as it is through MPI-IO.
        replicas: what is done if ranks that should hold the same bits do not, of which each
            checkpoint compares a sample: "stop", "warn", or "off" for no comparison.
        nonfinite: what is done if trained parameters are infinite or not numbers: "stop", before
            anything is written, or "warn", and the checkpoint says so.
        identity: what a checkpoint must have been made with to be continued, by configuration key.
        about: what a reader of the file needs to use the model, as plain JSON values.
        shards: which part of the model's tensors this rank has; by default all.
        replica: the ranks that hold the model together; by default each holds all of it.
        alike: the ranks that hold the same as this one; by default all.
        pieces: what the optimizer has in place of whole parameters.
        more: what else is saved.
        scaler: that of the loss, if there is one (`hpc_train.gradients.LossScaler`).

    Raises:
        ConfigError: engine mpiio in a process that runs without MPI, or in the background.
        UserError: a checkpoint cannot hold all of the model or the optimizer; also by `poll`, for
            what the optimizer makes in its first step, and by `save`.
    """

    def __init__(
        self,
        directory: Path,
        collectives: Collectives,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep: int | Retention = 3,
        engine: Engine = "auto",
        background: bool = False,
        verify: bool = True,
        replicas: Replicas = "stop",
        nonfinite: Nonfinite = "stop",
        identity: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        shards: Mapping[str, Shard] | None = None,
        replica: Group | None = None,
        alike: Collectives | None = None,
        pieces: Mapping[Parameter, Shard] | None = None,
        more: More | None = None,
        scaler: Stateful | None = None,
    ) -> None:
        self._ways = Ways(engine, collectives.group, background=background)
        self.directory = directory
        self.group = collectives.group
        self.shards = shards or {}
        self.replica = replica or Group()
        self.alike = alike or collectives
        self.more = more or More()
        self.scaler = scaler
        self.model = model
        self.trained = state.Trained(model, optimizer, self.shards, pieces or {})
        self.optimizer = optimizer
        self.keep = Retention(keep) if isinstance(keep, int) else keep
        self.verify = verify
        self.replicas, self.nonfinite = replicas, nonfinite
        self.identity = {**(identity or {}), "optimizer.name": type(optimizer).__name__.lower()}
        self.about = dict(about or {})
        self.saved_step = 0
        self.save_seconds = 0.0
        """What the last one took; 0: this process has written none."""
        self.longest_save = 0.0
        """What the longest one of this process has taken, failures and one under way included."""
        self.earlier_save = 0.0
        """What the longest one of an earlier process took; 0: nobody knows. Set by `resume`."""
        self._flight: tuple[int, Flight] | None = None
        self._holdings = Holdings(self.trained)
        self._plans = Plans(self.group, self.replica)
        self._values: dict[str, Any] = {}  # of the optimizers of a replica, all together
        self._compared: dict[str, int] = {}  # bytes by name, of what replicas have alike
        self._batches: list[Batch] = []  # of which this rank looks whether they are finite
        self._snapshot: Snapshot | None = None
        self._hook: RemovableHandle | None = None
        self.claim: Claim | None = None
        """Of the directory, while one is held; without one, nobody else may write there."""
        self._token = ""
        self.scores: dict[int, float | None] = {}
        """By step: how good the model was, lower is better, where known; the same on all ranks."""
        self._finite: dict[int, bool] = {}  # by step, where known
        self._looked = False  # whether what the first step has made can be saved
        self._check_savable()
        self._has_extra = bool(self.group.largest(int(bool(extra.modules(model)))))

    def save(self, step: int, *, background: bool = False) -> Path:
        """Write the checkpoint of a finished step, unless it is there, and drop the oldest.

        One that is still being written is finished first.

        Args:
            step: that has just ended.
            background: return as soon as training may go on: a thread writes, and `poll` at the end
                of later steps and `finish` see to the rest. The model's parameters and the
                optimizer's state must change in nothing but the optimizer's step.

        Raises:
            CheckpointError: it, or the one before it, could not be written; older ones are
                untouched.
            DivergenceError: replicas differ.
            NotFiniteError: trained parameters are infinite or not numbers.
            ClaimError: another job has taken the directory.
        """
        self.finish()
        path = self.directory / name_of(step)
        if step == self.saved_step:
            return path
        phases = self._saving(path, step, background=background)
        if background:
            self._flight = step, Flight(phases, self.group)
        else:
            begin = time.monotonic()
            try:
                run(phases)
            finally:
                seconds = time.monotonic() - begin
                self.longest_save = max(self.longest_save, seconds)
            self._saved(step, seconds)
        return path

    @property
    def saving(self) -> bool:
        """Whether one is being written in the background."""
        return self._flight is not None

    def poll(self) -> None:
        """Go on with a checkpoint that is being written in the background. Call it after each step.

        Raises:
            CheckpointError: it could not be written.
        """
        if not self._looked:
            self._looked = True
            self._check_savable()
        if self._flight is not None:
            self._land(wait=False)

    def _check_savable(self) -> None:
        with agreed(self.group):
            savable.check(self.trained)

    def finish(self) -> None:
        """Wait for a checkpoint that is being written in the background.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._flight is not None:
            self._land(wait=True)

    def close(self) -> None:
        """Let the optimizer go, after what is being written in the background. Collective.

        Raises:
            CheckpointError: that could not be written.
        """
        try:
            self.finish()
        finally:
            if self._hook is not None:
                self._hook.remove()
            self._hook = self._snapshot = None

    def _land(self, *, wait: bool) -> None:
        under_way, self._flight = self._flight, None
        assert under_way is not None
        step, flight = under_way
        try:
            ended = flight.poll(wait=wait)
        finally:
            self.longest_save = max(self.longest_save, flight.seconds)
        if ended:
            self._saved(step, flight.seconds)
        else:
            self._flight = under_way

    def _saved(self, step: int, seconds: float) -> None:
        self.saved_step, self.save_seconds = step, seconds
        logger.info(
            "step %d: checkpoint %s (%.1f s)", step, self.directory / name_of(step), seconds
        )
        if self.group.rank == 0 and (self.claim is None or self.claim.lost() is None):
            with suppress(OSError):  # the next start would only know less
                (self.directory / SECONDS).write_text(f"{self.longest_save:.3f}\n")

    def _saving(self, path: Path, step: int, *, background: bool) -> Phases[None]:
        self.unify()
        more = self.more.collect()
        with agreed(self.group), enough_memory("copies of the tensors"):
            changed = self._holdings.look(more, copy_buffers=background)
        if self.group.largest(int(changed)):
            self._plans.forget()
            self._values = self.replica.united(self._holdings.values)
            self._compared = self._whole_in_replicas()
            mine = self._holdings.trained_names[self.alike.group.rank :: self.alike.group.size]
            self._batches = batches(self._holdings.parts.held, mine)
        self._compare(step)
        self._check_finite(step)
        self._compare_extra()
        if background and self._snapshot is None:
            self._snapshot = Snapshot()
            self._hook = self.optimizer.register_step_pre_hook(lambda *_: self._wait())
        content, snapshot = self._state(step), self._snapshot if background else None
        token = self._own_token()

        def written(way: Way) -> Phases[float]:
            try:
                return (
                    yield from saving(
                        path,
                        self._holdings.parts,
                        content,
                        self.group,
                        way,
                        self.replica,
                        snapshot,
                        plans=self._plans,
                        verify=self.verify or way != "posix",
                        token=token,
                        check=self._check,
                    )
                )
            except CheckpointError:  # the same one on all ranks
                yield from agree(self.group, self._check)  # another job has removed the file?
                raise

        way: Way = "posix" if background else self._ways.next()  # the thread makes no MPI calls
        try:
            try:
                seconds = yield from written(way)
            except CheckpointError as error:  # the same one on all ranks
                if not self._ways.give_up(way):
                    raise
                logger.warning("through MPI-IO: %s; from now on by POSIX calls", error)
                way = "posix"
                seconds = yield from written(way)
        finally:
            self._holdings.release()
        self._ways.note(way, seconds)
        yield from agree(self.group, lambda: self._publish(path, step))

    def _own_token(self) -> str:
        """What tells this job's unfinished files from those of others. Collective at first."""
        if self.claim is not None:
            return self.claim.token
        self._token = self._token or self.group.from_first(lambda: secrets.token_hex(8))
        return self._token

    def _check(self) -> None:
        """Make sure, on rank 0, that the directory is still this job's."""
        if self.claim is not None:
            self.claim.check()

    def _wait(self) -> None:
        if self._snapshot is not None:
            self._snapshot.wait()

    def _whole_in_replicas(self) -> dict[str, int]:
        """Bytes of the tensors that all replicas hold whole, by name."""
        cut = {self.trained.parameters()[p].name for p in self.trained.pieces}
        parts = self._holdings.parts
        return {
            name: parts.size(name)
            for name in parts.held
            if name.startswith(state.MODEL)
            or (name.startswith(state.OPTIMIZER) and state.parameter_of(name) not in cut)
        }

    def _compare(self, step: int) -> None:
        """Compare a sample of what all replicas hold whole."""
        if self.replicas == "off":
            return
        turn = Random(step).randrange(1 << 32)  # by chance: a count would begin anew with each job
        try:
            divergence.compare(
                self._holdings.parts, self._compared, self.alike.group, self.group, turn
            )
        except DivergenceError as error:  # the same one on all ranks
            if self.replicas == "stop":
                raise
            if self.group.rank == 0:
                logger.warning("%s", error)

    def _compare_extra(self) -> None:
        """Check that all ranks' modules keep the same beside tensors: one of them is saved."""
        if not self._has_extra:
            return
        with agreed(self.group):
            savable.check(self.trained)  # what they keep may have changed
            kept = json.dumps(extra.values(self.model), sort_keys=True)
        what = "what the model's modules keep beside tensors (get_extra_state)"
        same(self.group, what, kept, "keep there what all ranks have alike")

    def _check_finite(self, step: int) -> None:
        self._finite[step] = parts_are_finite(self._holdings.parts, self._batches, self.group)
        if self._finite[step]:
            return
        if self.nonfinite == "stop":
            error = NotFiniteError(
                f"after step {step} trained parameters are infinite or not numbers",
                "go on from the last checkpoint with a smaller learning rate, or clip gradients",
            )
            error.agreed = True  # all ranks raise it
            raise error
        if self.group.rank == 0:
            logger.warning("step %d: trained parameters are infinite or not numbers", step)

    def _publish(self, path: Path, step: int) -> None:
        """Name the newest one, and remove what is not to be kept."""
        if self.group.rank > 0:
            return
        self._check()
        try:
            files.write_text(self.directory / LATEST, path.name + "\n")
            self._drop_old(step)
        except (
            OSError,
            CheckpointUnreadable,
        ) as error:  # the checkpoint is complete, so nobody has to stop for this
            logger.warning("%s is complete; bringing its folder up to date: %s", path, error)

    def resume(self, source: str = "auto") -> int:
        """Restore the state, and return the step after which training goes on; 0: none was found.

        Args:
            source: "auto", the newest sound checkpoint of the folder; "none"; or a file to start
                from while the folder is empty, so that the same call goes on after a stop.

        Raises:
            CheckpointError: the given file, or every one in the folder, is damaged.
            CheckpointUnreadable: a rank cannot read the newest one that is not damaged.
            CheckpointMismatch: it is of another model, optimizer, data set or sample order; or the
                folder has newer checkpoints than the start that was asked for.
        """
        found, self.earlier_save = from_first(
            self.group, lambda: (self._candidates(source), _seconds(self.directory / SECONDS))
        )
        for number, path in enumerate(found):
            try:
                step = self._restore(path)
                if number:
                    lost = step_of(found[0]) - step
                    logger.warning("%d steps are lost, up to step %d", lost, step_of(found[0]))
                return step
            except CheckpointUnreadable:
                raise  # it need not be damaged: going back would lose work, and overwrite it
            except CheckpointError as error:  # the same one on all ranks
                if number == len(found) - 1:
                    raise
                logger.warning("%s; trying the one before", error)
        return 0

    def unify(self) -> None:
        """Bring all replicas to one state: running statistics in buffers differ. Collective."""
        self._wait()
        self.more.unify()
        for buffer in self.model.buffers():
            self.alike.broadcast_(buffer)

    def _candidates(self, source: str) -> list[Path]:
        """Where to resume from, in the order to try; unfinished files of dead jobs are removed."""
        if self.directory.is_dir():
            self._check()
            for partial in self.directory.glob(".step-*.partial"):
                files.remove(partial)
            for partial in self.directory.glob(f".{LATEST}.*.partial"):
                files.remove(partial)
        own = find(self.directory, "auto")
        if source == "auto":
            return own
        given = [] if source == "none" else find(self.directory, source)
        inside = any(path.resolve().parent == self.directory.resolve() for path in given)
        if own and (source == "none" or (inside and not own[0].samefile(given[0]))):
            raise CheckpointMismatch(
                f"{self.directory} has checkpoints beyond this start, up to {own[0].name}",
                "give another run.dir, or move them away",
            )
        return own or given

    def _restore(self, path: Path) -> int:
        reader = restore.open_together(path, self.group)
        saved = restore.load_state(reader, self.group)
        of_model = state.model_tensors(self.model, self.shards)
        forms = self.replica.united({name: part.form for name, part in of_model.items()})
        trained = self.replica.united(state.trained_names(self.trained))
        entries, values = reader.entries, saved["optimizer"]
        with agreed(self.group):
            state.check_model(entries, forms, path)
            self._check_identity(saved["identity"], path)
            state.check_optimizer([*entries, *values], trained)
            state.make_optimizer_state(self.trained, entries, values)
        held = of_model | state.optimizer_tensors(self.trained) | self.more.expect(entries)
        contiguous = _contiguous(held)
        restore.load(reader, contiguous, self.group, *self._grid())
        for name, part in held.items():
            if contiguous[name].tensor is not part.tensor:
                part.tensor.copy_(contiguous[name].tensor)
        if self.scaler is not None and "scaler" in saved:
            self.scaler.load_state_dict(saved["scaler"])
        self.more.take(saved.get("more", {}))
        with agreed(self.group):
            extra.put(self.model, saved.get("extra_state", {}), path)
        step = int(saved["step"])
        if not saved.get("finite", True):
            logger.warning("%s has parameters that are infinite or not numbers", path)
        self.saved_step = step if path.parent == self.directory else 0
        logger.info("resumed from %s, after step %d", path, step)
        return step

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
                    f"set {key} back, or start anew with another run.dir",
                )

    def _state(self, step: int) -> bytes:
        tree = {
            "step": step,
            "identity": self.identity,
            "about": self.about,
            "optimizer": self._values,
        }
        score = self.scores.get(step)
        if score is not None and math.isfinite(score):  # JSON has no other numbers
            tree["score"] = score
        if not self._finite.get(step, True):
            tree["finite"] = False
        if self.scaler is not None:
            tree["scaler"] = self.scaler.state_dict()
        if more := self.more.values():
            tree["more"] = more
        if self._has_extra:
            tree["extra_state"] = extra.values(self.model)
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    def _drop_old(self, step: int) -> None:
        """Retention; a later checkpoint, which was damaged, counts for nothing."""
        there = {step_of(path): path for path in find(self.directory, "auto")}
        done = {number: path for number, path in there.items() if number <= step}
        if self.keep.best:
            for number in done.keys() - self.scores.keys():
                self.scores[number] = _state_of(done[number]).get("score")
        scores = dict(self.scores)  # to which the main thread may add
        known = {number: score for number, score in scores.items() if score is not None}

        def is_finite(number: int) -> bool:
            if number not in self._finite:
                self._finite[number] = _state_of(done[number]).get("finite", True)
            return self._finite[number]

        for number in self.keep.superfluous(done, known, is_finite):
            self._check()
            files.remove(done[number])


def _contiguous(held: Mapping[str, Held]) -> dict[str, Held]:
    return {name: replace(part, tensor=part.tensor.contiguous()) for name, part in held.items()}


def _seconds(path: Path) -> float:
    """What an earlier process wrote; 0: nothing."""
    with suppress(OSError, ValueError):
        seconds = float(path.read_text())
        return seconds if 0 < seconds < math.inf else 0.0
    return 0.0


def _state_of(path: Path) -> dict[str, Any]:
    """What is no tensor in a checkpoint of this job, or of an earlier start of it."""
    try:
        return restore.Tensors(path).state()
    except CheckpointUnreadable:
        raise
    except (CheckpointError, CheckpointMismatch):
        return {"finite": False}  # it is damaged, and none to rely on
