"""Delivers the batches of a user's own loop, and counts the steps that are taken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from hpc_train.data.generators import seed_process
from hpc_train.data.loader import Loader
from hpc_train.data.order import SampleOrder
from hpc_train.errors import Stopped, UserError
from hpc_train.gradients import GradientAverager
from hpc_train.gradients.hooks import after_step, before_step
from hpc_train.job.deadline import of_job
from hpc_train.job.heartbeat import Pace
from hpc_train.job.leaving import LeftBySome, check_left_by_all
from hpc_train.job.preemption import StopRequests
from hpc_train.job.profiling import Profiler
from hpc_train.launch.protocol import STOP
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.seeds import mix
from hpc_train.training.loop_life import LoopLife, raise_at_end
from hpc_train.training.loop_records import LoopRecords
from hpc_train.training.options import LoopOptions
from hpc_train.training.parts import loss_weights
from hpc_train.training.registered import Registered
from hpc_train.training.saving import Saving
from hpc_train.training.steps import guarded_steps
from hpc_train.training.updates import Updates

logger = logging.getLogger(__name__)


class Delivery(LoopLife):
    """Delivers the batches of a loop, and counts the steps that are taken.

    A subclass sets `averager` and `registered`, and the `checkpoints` of `LoopLife`.

    Args:
        runtime: the runtime of the job.
        optimizer: the optimizer whose steps are counted.
        options: the loop's options.
    """

    averager: GradientAverager
    registered: Registered

    def __init__(self, runtime: Runtime, optimizer: Optimizer, options: LoopOptions) -> None:
        super().__init__(runtime, options)
        self.optimizer = optimizer
        self._requests: StopRequests | None = None
        self._given = 0  # the number of the step whose batch was given last
        self._taken = 0  # the number of the step that was taken last
        self._scales: list[float] = []  # the scales of torch's GradScalers before that batch
        self._computing = False  # the program has run, and the ranks have not met since then
        self._stepping: set[int] = set()  # ids of optimizers whose step has begun, and not ended
        self._stepped: set[int] = set()  # ids of those that have stepped since a batch was given
        self._optimizers = {id(optimizer)}  # ids of all whose steps count
        self._habits: set[frozenset[int]] = set()  # ids of those that have stepped in whole batches
        self._updates = Updates({})  # of the registered objects, after the steps of this process
        self._begun = False  # whether `epochs` was called
        self._told_of_early = False  # whether a step before that was told
        self._looked = False  # whether the registered objects were checked after the first step
        self.accumulate = 1
        """The number of micro-batches, and so of backward passes, in the step."""
        self._weight = 1.0  # of the loss of the micro-batch that was given last
        self._asked = False  # whether it was asked for
        self._weighed = 0  # number of losses in the step whose weight was asked for
        self.step_due = True
        """Whether the step is to be taken now: the batch that was given last is the step's last."""
        self.saving = Saving(options.every, background=options.background)

    def _delivered(
        self, batches: Iterator[Any], order: SampleOrder, last: int
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Deliver epoch after epoch up to step `last`, and check that each was run to its end."""
        done, stop = self._given, self._requests
        assert stop is not None
        while done < last:
            if self.group.largest(int(stop.enough)):
                self.saving.last(self.checkpoints, self._taken)
                return
            left = order.steps_per_epoch - done % order.steps_per_epoch
            self._computing = True
            yield order.epoch(done + 1) + 1, self._up_to(done + left, batches)
            if stop.ended:
                return
            done += left
            if self._given < done or not self.step_due:
                self._leave()
                error = UserError(
                    f"an epoch was left before its end; a checkpoint has step {self._taken}",
                    "iterate over all batches, or end the loop by loop.stop()",
                )
                error.agreed = True
                raise error
            self._leave_step()
            whole = left == order.steps_per_epoch  # after a resume, it may be the rest of one
            if whole and self.group.largest(self._taken) <= done - left and not self._skipped:
                error = UserError(
                    "no step of the loop's optimizer was taken in a whole epoch",
                    "give the loop the optimizer whose step the program calls",
                )
                error.agreed = True
                raise error
        # The last step is over. This lets `guarded_steps` continue and write the checkpoint.
        next(batches, None)

    def _up_to(self, last: int, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of all steps up to step `last`."""
        self._leave_step()
        for batch in batches:
            yield batch
            if self._given == last and self.step_due:
                return

    def _batches(
        self, loader: Loader, stop: StopRequests, seed: int, records: LoopRecords
    ) -> Iterator[Any]:
        """The batches of all steps. A stop is raised again at the end of the program."""
        profiler = Profiler(
            self.group,
            self._runtime.node,
            self.checkpoints.directory,
            loader.steps.start - 1,
            loader.steps.stop - 1,
            self.options.profile,
            records.report.event,
        )
        try:
            yield from self._seeded(loader, stop, seed, records, profiler)
        except Stopped as stopped:  # the exit code must say so even if the program catches it
            records.report.ending = ("stopped", stopped.reason)
            self._runtime.at_end.append(partial(raise_at_end, stopped))
            raise
        finally:
            profiler.close()

    def _seeded(
        self,
        loader: Loader,
        stop: StopRequests,
        seed: int,
        records: LoopRecords,
        profiler: Profiler,
    ) -> Iterator[Any]:
        """The batches of all steps, each after the random generators were seeded for it."""
        pace = Pace(self.options.hang_steps, self.options.hang_timeout)
        for step in guarded_steps(
            loader,
            self.checkpoints,
            stop,
            self.saving,
            pace,
            profiler,
            taken=lambda _: self._taken,
            together=records.begin_step,
        ):
            self._scales = self.registered.scales
            weights = loss_weights(
                step, loader.order.batch, self.group, counted=self.options.counted is not None
            )
            self.accumulate, self._weighed = len(weights), 0
            for number, micro_batch in enumerate(step.micro_batches):
                self._weight, self._asked = weights[number], False
                of_step = mix(seed, step.number, self.group.rank, *([number] if number else []))
                seed_process(of_step)
                self._given, self._computing = step.number, True
                self.step_due = number == len(step.micro_batches) - 1
                yield micro_batch.data
            self._leave_step()
            if not self._skipped:
                self._habits.add(frozenset(self._stepped))
            self._stepped.clear()
            self._updates.end_batch()
            records.report.last_step = self._taken
            # Some objects make their state in the first step. If a checkpoint cannot hold it, the
            # error should not wait until the first save.
            if not self._looked:
                self._looked = True
                self.registered.check()
                self.registered.tell_of_lost()

    def _leave_step(self, *, gone: bool = False) -> None:
        """Meet the other ranks, if the program has run since they met last. Collective.

        It comes before all other collectives between two steps. So a rank that has left the loop
        needs no other one to tell it.

        Args:
            gone: whether this rank has left the loop.

        Raises:
            LeftBySome: some ranks have left the loop and others have not; raised on all ranks.
            UserError: a rank averages gradients instead; raised on all ranks.
        """
        if self._computing:
            self._computing = False
            self._check_not_replaced()
            if self.averager.leave_step(gone=gone):
                try:
                    check_left_by_all(self.group, left=gone)
                except LeftBySome:
                    self._is_over = True
                    raise
        if self._skipped:
            self._taken = self._given

    @property
    def _skipped(self) -> bool:
        """Whether torch's GradScaler has skipped a step in this batch. That counts as taken."""
        return any(
            now < was for now, was in zip(self.registered.scales, self._scales, strict=False)
        )

    @property
    def loss_weight(self) -> float:
        """The factor for the loss of the micro-batch that was given last.

        The losses of all micro-batches and ranks times their factors, divided by the number of
        ranks, add up to the loss of the step. `backward` multiplies by it. So use it where you call
        torch's `backward`, or to know the loss of a step:
        `total += loss.detach() * loop.loss_weight`, and then `loop.mean(total)`.
        """
        if not self._asked:
            self._asked = True
            self._weighed += 1
        return self._weight

    def _check_due(self, what: str) -> None:
        """Refuse a call, named by `what`, before the step's gradients are complete and weighted."""
        if not self.step_due:
            raise UserError(
                f"{what} was called before the last of the step's {self.accumulate} micro-batches",
                "call it `if loop.step_due:`, or leave accumulate out",
            )
        if self.options.uneven and self._weighed < self.accumulate:
            raise UserError(
                f"{what} was called, but the losses of this step were not weighted",
                "call loop.backward(loss) in place of loss.backward()",
            )

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook before an optimizer's step."""
        self._check_due("optimizer.step()")
        self._stepping.add(id(optimizer))

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook after an optimizer's step."""
        if not self._begun and not self._told_of_early:
            self._told_of_early = True
            logger.warning(
                "the optimizer has stepped before loop.epochs was called: the loop divides no "
                "samples then, and no checkpoint has the step: iterate over loop.epochs(...)"
            )
        self._stepping.discard(id(optimizer))
        self._stepped.add(id(optimizer))
        self._taken = self._given
        self._updates.note_step()

    def _count_steps_of(self, optimizer: Optimizer) -> None:
        """Let the steps of another optimizer count too: a checkpoint after one has that step."""
        self._optimizers.add(id(optimizer))
        self._hooks += [
            before_step(optimizer, partial(Delivery._begin_step, self)),
            after_step(optimizer, partial(Delivery._end_step, self)),
        ]

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Let the end of the program end this loop if the user has left it open."""
        self._stepping.clear()
        self._stepped.clear()
        self._scales = []
        self._updates = Updates(self.registered.things)
        try:
            with super()._until_end():
                yield
        finally:
            self._requests, self.step_due, self.accumulate = None, True, 1
            self._weight, self._asked, self._weighed = 1.0, False, 0

    def _leave(self) -> None:
        """Save the last step if all ranks have left the loop; otherwise all raise. Collective."""
        if self._is_replaced or self._is_over:  # the parameters are another loop's, or nobody waits
            return
        if self._requests is not None and self._requests.ended:  # all have stopped and saved
            return
        self._leave_step(gone=True)
        device = next(self.checkpoints.state.model.parameters()).device
        if device.type == "cuda":
            with agreed(self.group):  # a GPU that has failed leaves no state to save
                torch.cuda.synchronize(device)
        what, whole = "the step in which the loop was left", self._is_whole()
        same(self.group, what, f"{self._taken} {whole}", "let all ranks leave it together")
        if whole:
            self.saving.last(self.checkpoints, self._taken)
            if late := self._updates.missing():
                logger.warning(
                    "the loop was left in step %d before the update of %s that other steps had, so "
                    "the checkpoint lacks it: leave the loop after that, or call loop.stop()",
                    self._taken,
                    ", ".join(late),
                )
            return
        self.checkpoints.finish()
        if self._taken > self.checkpoints.saved_step:
            logger.warning(
                "the loop was left in step %d, which may be half done, so no checkpoint has it: a "
                "restart begins with step %d",
                self._taken,
                self.checkpoints.saved_step + 1,
            )

    def _is_whole(self) -> bool:
        """Whether the state is one between two batches, as the loop was left.

        It is not if a step was interrupted. If only some of several optimizers have stepped in the
        batch, it is if this is usual, or if a step was skipped: then the scale was changed, which
        comes last. But an error may have come between two steps. The loop knows of it only if it
        has left the `with` block: an iterator that it drops looks like one that `break` drops.
        """
        if self._stepping:
            return False
        begun = bool(self._stepped) or self._skipped
        if len(self._optimizers) == 1 or self._stepped == self._optimizers or not begun:
            return True
        return not self._raised and (self._skipped or self._stepped in self._habits)

    def _stop_requests(self) -> StopRequests:
        """The reasons to stop: signals, the stop file and the time limit of the options."""
        file = self.checkpoints.directory / STOP
        if self.options.time_limit == "auto":
            end = of_job(self.group, self.options.end_margin)
            return StopRequests(end=end, file=file)
        return StopRequests(self.options.time_limit_seconds(), file=file)
