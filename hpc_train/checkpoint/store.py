"""The checkpoints of a run: save one, resume from the newest sound one, remove old ones."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpc_train import files
from hpc_train.checkpoint.background import BackgroundSave, Phases, Snapshot, agree, carry_out
from hpc_train.checkpoint.catalogue import (
    LATEST,
    earlier_save_seconds,
    latest_in,
    name_of,
    note_save_seconds,
    start_candidates,
    step_of,
    unfinished_in,
)
from hpc_train.checkpoint.claim import Claim
from hpc_train.checkpoint.content import Content
from hpc_train.checkpoint.engines import EngineChoice, WriteEngine
from hpc_train.checkpoint.known import Known
from hpc_train.checkpoint.policy import DEFAULT_POLICY, SavePolicy
from hpc_train.checkpoint.save import saving
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import Collectives
from hpc_train.errors import (
    CheckpointError,
    CheckpointUnreadable,
    DivergenceError,
    NotFiniteError,
    UserError,
    plural,
)
from hpc_train.mpi.agreement import from_first

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores a model with its optimizer in a folder.

    All ranks must call each method, with the same arguments.

    Args:
        directory: the folder. The first checkpoint makes it.
        collectives: of all ranks that train.
        state: is saved, and restored in place.
        policy: how it is saved, and which checkpoints are kept.
        identity: what a resumed run must have in common with a checkpoint, by configuration key.
        about: what a reader of the file needs to use the model, as plain JSON values.
        where: where the data of this run is, in words, for errors.

    Raises:
        ConfigError: the engine writes through MPI-IO, and the process runs without MPI or saves in
            the background.
        UserError: a checkpoint cannot hold all of the model or the optimizer. `poll` raises it for
            the state that the optimizer makes in its first step, and `save` raises it, too.
    """

    def __init__(
        self,
        directory: Path | str,
        collectives: Collectives,
        state: TrainingState,
        policy: SavePolicy = DEFAULT_POLICY,
        *,
        identity: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> None:
        self._engines = EngineChoice(policy.engine, collectives.group, background=policy.background)
        self.directory = Path(directory)
        self.group = collectives.group
        self.state, self.policy = state, policy
        name = type(state.optimizer).__name__.lower()
        self.identity = {**(identity or {}), "optimizer.name": name}
        self._content = Content(state, collectives, self.identity, about or {}, where)
        self.saved_step = 0
        self.save_seconds = 0.0
        """Seconds that the last save took; 0 before the first one of this process."""
        self.longest_save = 0.0
        """Seconds of this process's longest save so far, also if it failed or has not ended."""
        self.earlier_save = 0.0
        """Seconds of an earlier process's longest save; 0 if unknown. `resume` sets it."""
        self._background: tuple[int, BackgroundSave] | None = None
        self._snapshot: Snapshot | None = None
        self._hooks: list[RemovableHandle] = []
        self.claim: Claim | None = None
        """Of the directory, if the job holds one. Without one, no other job may write there."""
        self._unclaimed: Claim | None = None
        self._known = Known()
        self.scores = self._known.scores
        """The model's score by step, where known; lower is better. It is the same on all ranks."""
        self._looked = False  # whether the state that the first step has made was checked
        self._refused = False  # whether no other start could restore that state

    def save(self, step: int, *, background: bool = False) -> Path:
        """Write the checkpoint of a step, if there is none yet, and remove old ones. Collective.

        A save in the background that has not ended is finished first.

        Args:
            step: the step that has just ended; the first one is 1.
            background: whether to return as soon as training may go on. A thread writes, and `poll`
                at the end of later steps and `finish` do the rest. Until then nothing but the
                optimizer's step, and those of optimizers that `hold_back` was given, may change the
                model's parameters and the optimizers' state.

        Returns:
            The file.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written. Older ones
                are untouched.
            DivergenceError: replicas differ.
            NotFiniteError: trained parameters are infinite or not numbers.
            ClaimError: another job has taken the directory.
            UserError: the step is below 1, or no other start could restore the state, as `poll` has
                found.
        """
        if step < 1:  # `resume` returns 0 if there is no checkpoint
            raise UserError(f"a checkpoint of step {step} was asked for", "count steps from 1")
        self.finish()
        path = self.directory / name_of(step)
        if step == self.saved_step:
            return path
        if self._refused:  # the error of `poll` may be about to end the training
            self._content.check()
        phases = self._saving(path, step, background=background)
        begin = time.monotonic()
        try:
            if background:
                self._background = step, BackgroundSave(phases, self.group)
            else:
                carry_out(phases)
        finally:
            seconds = time.monotonic() - begin
            self.longest_save = max(self.longest_save, seconds)
        if not background:
            self._saved(step, seconds)
        return path

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._background is not None

    def get_ready(self) -> None:
        """Begin to get the memory of saves in the background. Call it after the first step.

        Without it the first of these saves takes longer to begin.
        """
        if self._snapshot is None:
            snapshot = self._make_snapshot()
            if nbytes := self._content.bytes_to_write():
                snapshot.begin_to_reserve(nbytes)

    def _make_snapshot(self) -> Snapshot:
        self._snapshot = Snapshot()
        self.hold_back(self.state.optimizer)
        return self._snapshot

    def hold_back(self, optimizer: Optimizer) -> None:
        """Let an optimizer's steps wait until a save in the background has copied all it needs.

        Those of the state's optimizer wait without a call of this method.

        Args:
            optimizer: changes a part of what checkpoints hold.
        """
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._wait()))

    def poll(self) -> None:
        """Go on with a save in the background. Collective. Call it after each step.

        Raises:
            CheckpointError: the checkpoint could not be written.
            UserError: a checkpoint cannot hold what the optimizer made in its first step.
        """
        if self._refused or not self._looked:
            self._looked = self._refused = True
            self._content.check()
            self._refused = False
        if self._background is not None:
            self._advance(wait=False)

    def finish(self) -> None:
        """Wait for the end of a save in the background. Collective.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._background is not None:
            self._advance(wait=True)

    def close(self) -> None:
        """Finish a save in the background and release the optimizer. Collective.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        try:
            self.finish()
        finally:
            for hook in self._hooks:
                hook.remove()
            if self._snapshot is not None:
                self._snapshot.close()
            self._hooks, self._snapshot = [], None

    def _advance(self, *, wait: bool) -> None:
        under_way, self._background = self._background, None
        assert under_way is not None
        step, save = under_way
        try:
            ended = save.poll(wait=wait)
        finally:
            self.longest_save = max(self.longest_save, save.seconds)
        if ended:
            self._saved(step, save.seconds)
        else:
            self._background = under_way

    def _saved(self, step: int, seconds: float) -> None:
        self.saved_step, self.save_seconds = step, seconds
        path = self.directory / name_of(step)
        logger.info("step %d: checkpoint %s (%.1f s)", step, path, seconds)
        if self.group.rank == 0 and (self.claim is None or self.claim.lost() is None):
            note_save_seconds(self.directory, self.longest_save)

    def _saving(self, path: Path, step: int, *, background: bool) -> Phases[None]:
        self.unify()
        self._content.look(copy_buffers=background)
        try:
            seconds, way = yield from self._written(path, step, background=background)
        finally:
            self._content.release()
        self._engines.note(way, seconds)
        yield from agree(self.group, lambda: self._publish(path, step))

    def _written(
        self, path: Path, step: int, *, background: bool
    ) -> Phases[tuple[float, WriteEngine]]:
        """Write what the content has collected; returns the seconds of writing and the engine."""
        self._compare(step)
        self._check_finite(step)
        if background and self._snapshot is None:
            self._make_snapshot()
        write = partial(
            saving,
            path,
            self._content.parts,
            self._state(step),
            self._content.plans,
            snapshot=self._snapshot if background else None,
            claim=self._own_claim(),
        )

        def written(way: WriteEngine) -> Phases[float]:
            verify = self.policy.verify or way != "posix"
            try:
                return (yield from write(engine=way, verify=verify))
            except CheckpointError:  # the same one on all ranks
                yield from agree(self.group, self._check)  # another job has removed the file?
                raise

        # The thread of a save in the background makes no MPI calls.
        way: WriteEngine = "posix" if background else self._engines.next()
        try:
            return (yield from written(way)), way
        except CheckpointError as error:  # the same one on all ranks
            if not self._engines.give_up(way):
                raise
            logger.warning("through MPI-IO: %s; from now on by POSIX calls", error)
            return (yield from written("posix")), "posix"

    def _own_claim(self) -> Claim:
        """The claim of the directory, or one that only tells this job's files from others'.

        Collective where the job holds none.
        """
        if self.claim is not None:
            return self.claim
        if self._unclaimed is None:
            token = self.group.from_first(lambda: secrets.token_hex(8))
            self._unclaimed = Claim(self.directory, token)
        return self._unclaimed

    def _check(self) -> None:
        """Make sure that the directory is still this job's. Rank 0 alone knows."""
        if self.claim is not None:
            self.claim.check()

    def _wait(self) -> None:
        if self._snapshot is not None:
            self._snapshot.wait()

    def _compare(self, step: int) -> None:
        """Compare a sample of the tensors that all replicas hold whole. Collective."""
        try:
            if self.policy.replicas != "off":
                self._content.compare(step)
        except DivergenceError as error:  # the same one on all ranks
            if self.policy.replicas == "stop":
                raise
            if self.group.rank == 0:
                logger.warning("%s", error)

    def _check_finite(self, step: int) -> None:
        self._known.finite[step] = self._content.is_finite()
        if self._known.finite[step]:
            return
        if self.policy.nonfinite == "stop":
            error = NotFiniteError(
                f"after step {step} trained parameters are infinite or not numbers",
                "go on from the last checkpoint with a smaller learning rate, or clip gradients",
            )
            error.agreed = True  # all ranks raise it
            raise error
        if self.group.rank == 0:
            logger.warning("step %d: trained parameters are infinite or not numbers", step)

    def _publish(self, path: Path, step: int) -> None:
        """Name the new checkpoint as the latest one, and remove those that are not kept."""
        if self.group.rank > 0:
            return
        self._check()
        try:
            try:
                files.write_text(self.directory / LATEST, path.name + "\n")
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._drop_old(step)  # which gives LATEST its room
                files.write_text(self.directory / LATEST, path.name + "\n")
            self._drop_old(step)
        except (OSError, CheckpointUnreadable) as error:  # the checkpoint is complete without it
            logger.warning("%s is complete; bringing its folder up to date: %s", path, error)

    def resume(self, source: str = "auto") -> int:
        """Restore the state of the newest sound checkpoint. Collective.

        Args:
            source: "auto" for the folder's checkpoints; "none" to start anew; or a file or a run
                directory to start from, until the folder has checkpoints of its own.

        Returns:
            The step after which training goes on; 0 if there is no checkpoint.

        Raises:
            CheckpointError: the given file, or every file in the folder, is damaged.
            CheckpointUnreadable: a rank cannot read the newest file that is not damaged.
            CheckpointMismatch: the file is of another model, optimizer, data set or sample order;
                or the folder has newer checkpoints than the start that was asked for.
        """
        self._content.begin()
        found, self.earlier_save, latest = from_first(
            self.group,
            lambda: (
                self._candidates(source),
                earlier_save_seconds(self.directory),
                latest_in(self.directory),
            ),
        )
        for number, path in enumerate(found):
            try:
                step = self._restore(path)
                if number and path != latest:  # else later ones were passed over before
                    lost = step_of(found[0]) - step
                    logger.warning(
                        "%s lost, up to step %d",
                        plural(lost, "step is", "steps are"),
                        step_of(found[0]),
                    )
                if path.parent == self.directory and path != latest:
                    self._name_latest(path)
                return step
            except CheckpointUnreadable:
                raise  # it need not be damaged: going back would lose work, and overwrite it
            except CheckpointError as error:  # the same one on all ranks
                if number == len(found) - 1:
                    raise
                logger.warning("%s; trying the one before", error)
        return 0

    def _name_latest(self, path: Path) -> None:
        """Name a restored checkpoint as the latest one. A kill may have come before its name."""
        if self.group.rank == 0 and self.claim is not None and self.claim.lost() is None:
            try:
                files.write_text(self.directory / LATEST, path.name + "\n")
            except OSError as error:  # the next save will try again, and tell
                logger.warning("%s cannot be written (%s)", self.directory / LATEST, error)

    def unify_buffers(self) -> None:
        """Give all replicas the buffers of rank 0. Collective."""
        self._content.buffers.unify()

    def unify(self) -> None:
        """Bring all replicas to one state: running statistics in their buffers differ."""
        self._wait()
        self._content.unify()

    def _candidates(self, source: str) -> list[Path]:
        """The files to resume from, in the order to try. Removes files that dead jobs left."""
        self._check()
        for unfinished in unfinished_in(self.directory):
            files.remove(unfinished)
        return start_candidates(self.directory, source)

    def _restore(self, path: Path) -> int:
        saved = self._content.restore(path)
        step = int(saved["step"])
        if not saved.get("finite", True):
            logger.warning("%s has parameters that are infinite or not numbers", path)
        self.saved_step = step
        if path.parent != self.directory:  # another run's, which may be saved here as well
            self.saved_step = 0
            if "score" in saved:
                self.scores.setdefault(step, saved["score"])
        logger.info("resumed from %s, after step %d", path, step)
        return step

    def _state(self, step: int) -> bytes:
        return self._content.state(step, self._known.values(step))

    def _drop_old(self, step: int) -> None:
        """Remove the checkpoints that the policy does not keep."""
        for path in self._known.superfluous(self.directory, step, self.policy.retention):
            self._check()
            files.remove(path)
