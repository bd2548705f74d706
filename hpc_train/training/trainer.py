"""The Trainer: a model, a data set and a configuration, trained over all ranks of a job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hpc_train.config import RunConfig
from hpc_train.data.leaves import leaves
from hpc_train.data.loader import Loader, Step, cut
from hpc_train.data.mixture import MixedOrder, describe_drawn
from hpc_train.data.reader import Reader
from hpc_train.errors import Stopped
from hpc_train.job.deadline import of_job
from hpc_train.job.heartbeat import Heartbeat, Pace
from hpc_train.job.leaving import leave_together
from hpc_train.job.preemption import StopRequests
from hpc_train.job.preflight import preflight
from hpc_train.job.profiling import Profiler
from hpc_train.job.reporting import RunReport, reporting
from hpc_train.job.run_directory import keep_lost_records, run_directory, write_config
from hpc_train.launch.protocol import STOP
from hpc_train.monitoring.console import describe_scores
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.watchdog import watch_over
from hpc_train.parallel.simulate import enough
from hpc_train.planning.schedules import OPTIMIZER_TENSORS
from hpc_train.training.assemble import assemble
from hpc_train.training.batch_loss import BatchLoss
from hpc_train.training.device import moved, threads_in_use
from hpc_train.training.evaluation import eval_mode, train_mode
from hpc_train.training.keeping import keeping_divided
from hpc_train.training.last_start import tell_last_start
from hpc_train.training.learning_rate import learning_rate
from hpc_train.training.micro_batch import (
    find_micro_batch,
    same_buffers_after,
    sizes_to_try,
)
from hpc_train.training.optimizers import Frozen
from hpc_train.training.parts import MANY_PASSES, loss_weights
from hpc_train.training.performance import without_extras
from hpc_train.training.saving import Saving, finishing_saves, resume_or_start
from hpc_train.training.step_records import StepRecords
from hpc_train.training.steps import guarded_steps
from hpc_train.training.task import TrainingTask
from hpc_train.training.validation import Validation

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model from its newest checkpoint to the last step of the configuration.

    All ranks must make it and call `train`, with the same arguments.

    Args:
        config: the configuration. `model` is not used here: the caller has built the model.
        task: the model, its loss and its data.
        runtime: the runtime from `hpc_train.mpi.runtime.start_runtime`.

    Raises:
        HpcTrainError: as `assemble`.
    """

    shown = True
    """Whether the console shows the progress."""

    def __init__(self, config: RunConfig, task: TrainingTask, runtime: Runtime) -> None:
        config, task = without_extras(config, task)
        self.config, self.task, self.runtime = config, task, runtime
        self.group = runtime.world
        made = self.assembly = assemble(config, task, runtime)
        self.loss = BatchLoss(task, made, config.run.seed)
        self.grid, self.plan, self.device = made.grid, made.plan, made.device
        self.model, self.layout, self.optimizer = made.model, made.layout, made.optimizer
        self.averager, self.scaler, self.patience = made.averager, made.scaler, made.patience
        self.counted = task.counted if config.data.loss == "token" else None
        if hasattr(self.model, "loss_over"):
            setattr(self.model, "loss_over", config.data.loss)  # noqa: B010  # torch types modules
        self.averager.expect(self._passes())
        self.collectives, self.checkpoints = made.collectives, made.checkpoints
        lock = threading.RLock()  # both data sets may be parts of one
        self.reader = Reader(task.dataset, lock)
        held_out = Reader(task.validation, lock)
        collector = None if task.scores is None else task.scores.collector
        self.validation = Validation(
            config, held_out, made, self.loss.measured, self.counted, collector
        )
        self.validation.seed_samples = self.loss.seed_samples
        self.validation.together = task.together
        self.held_out: dict[str, float] = {}
        """The mean loss and the scores of the last pass over held-out samples."""
        self.step = 0
        """The last step that is done, when `task.finish` is called."""
        self.step_records = StepRecords(config, made, runtime, task.tokens_per_sample)
        self.phases = self.group.waiting.phases
        self._frozen = Frozen(self.model)
        self._heartbeat = Heartbeat(self.group)
        self._stop: StopRequests | None = None
        self._closed = self._searched = False

    def close(self) -> None:
        """Release hooks, threads, shared memory and communicators. Collective.

        The model keeps this rank's part of the parameters, also of those that were divided over
        nodes, if they fit in memory. Another Trainer may be made.
        """
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with keeping_divided(self.averager, self.runtime, failed=failed):
            self.assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if leave_together(self.group, error):
            self._close(failed=error is not None)

    def train(self) -> None:
        """Train until the last step, or until `run.patience` ends it. Collective.

        Raises:
            Stopped: a signal, the stop file or the time limit stopped it, with a checkpoint.
            HpcTrainError: a part of the job failed; the same error is raised on all ranks.
        """
        self._heartbeat.finish(self._train())

    def _train(self) -> int:
        """Claim the run directory, resume, and take all steps. Returns the last one."""
        test = self.step_records.test
        with (
            run_directory(self.group, self.config) as (directory, claim),
            watch_over(self.group, self.config.run.hang_timeout),
            closing(self._stop_requests(directory)) as stop,
            finishing_saves(self.checkpoints),
            self.assembly.costs.counting(directory),
        ):
            self.checkpoints.claim, self._stop = claim, stop
            if self.config.run.preflight:
                found = preflight(self.runtime, directory, self.device, self.assembly.state_bytes)
                self.step_records.links = found
                self.step_records.costs.measure_peak()
            if self.config.data.micro_batch == "auto" and not self._searched:
                self._find_micro_batch()
            after = resume_or_start(self.checkpoints, self.config)
            if after >= self.plan.last or self.patience.over:
                self._tell_done(after)
                if after != self.checkpoints.saved_step and test is None:  # it is another run's
                    write_config(self.group, directory, self.config)
                    self.checkpoints.save(after)
                self._finish(after)
                return after
            write_config(self.group, directory, self.config)
            threads = threads_in_use(self.group, self.device)
            tell_last_start(self.group, directory, self.config, self.grid.dp, threads)
            keep_lost_records(self.group, directory, after, saves=test is None)
            with (
                closing(self._loader(after)) as loader,
                reporting(
                    *(self.group, directory, after, self.plan.last, claim),
                    shown=self.shown,
                    trackers=self.config.run.trackers,
                    spent=self.assembly.costs.now,
                ) as report,
                self.step_records.measuring(report, after),
            ):
                train_mode(self.model, tell=self.group.rank == 0)
                saving = Saving.of(self.config.checkpoint, none=test is not None)
                run = self.config.run
                pace = Pace(run.hang_steps, run.hang_timeout, self._validation_due)
                profiler = self._profiler(directory, after, report)
                with closing(profiler):
                    for step in guarded_steps(
                        loader, self.checkpoints, stop, saving, pace, profiler
                    ):
                        self._train_step(step, report.record)
                        after = report.last_step = step.number
                        stop.enough = self.patience.over
                stop.enough = False  # training has ended, and what comes then is not to stop
                if summary := self.averager.profile.describe():
                    logger.info(summary)
                if isinstance(order := self.plan.order, MixedOrder) and order.drawn(after):
                    told = describe_drawn(order, after, self._names(len(order.orders)))
                    logger.info("samples of the mixture: %s", told)
                if self.held_out:
                    logger.info("held-out samples at the end: %s", describe_scores(self.held_out))
                if test:
                    test.finish(self.runtime, directory)
                self._finish(after)
        return after

    def _tell_done(self, step: int) -> None:
        """Tell that there is no step to take."""
        early = f"; raise run.{'epochs' if self.config.run.epochs else 'steps'} to go on"
        if self.patience.over:
            early = ", and run.patience has ended training"
        logger.info("nothing to do: step %d of %d is done%s", step, self.plan.last, early)

    def _names(self, count: int) -> list[str]:
        """The names of the data sets of a mixture."""
        folders = [*self.config.data.folders]
        numbered = [f"data set {number}" for number in range(1, count + 1)]
        return folders if len(folders) == count else numbered

    def _finish(self, step: int) -> None:
        self.step = step
        if self.task.finish is not None:
            self._heartbeat.tell(self.step, 1.5 * self.config.run.hang_timeout)
            self.task.finish(self)

    def check_in(self, needed_seconds: float = 0.0) -> None:
        """Between two parts of long work in `task.finish`: report progress, or stop. Collective.

        Args:
            needed_seconds: seconds that the next part needs, for the time limit.

        Raises:
            Stopped: a rank has a reason to stop. The checkpoint of the last step is written.
        """
        assert self._stop is not None  # `train` has set it
        self._heartbeat.tell(self.step, 1.5 * self.config.run.hang_timeout)
        if reason := self._stop.agree(self.group, needed_seconds):
            raise Stopped(self.step, reason)

    def _find_micro_batch(self) -> None:
        """Choose the size of micro-batches by trial. Collective."""
        samples, most = self.config.data.batch // self.grid.dp, self.task.most_at_a_time
        sizes = sizes_to_try(samples, self.grid.pp)
        sizes = [size for size in sizes if size <= (most or samples)] or sizes[:1]
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = OPTIMIZER_TENSORS[self.config.optimizer.name] * sum(p.nbytes for p in params)
        later = kept if self.config.memory.offload == "none" else 0
        train_mode(self.model)
        with same_buffers_after(self.model):
            size = find_micro_batch(self.runtime, self.device, sizes, self._try_step, later)
        self._searched = True
        self._cut(size)

    def _try_step(self, size: int) -> int:
        """Compute gradients with micro-batches of a size, as many as are under way at once.

        Returns:
            Bytes of the data that a real step has besides, which is read ahead.
        """
        self._cut(size)
        every = self.plan.parts
        assert isinstance(every, list)
        few = enough(self.grid.pp, len(every))[-1]
        gpipe = self.config.parallel.schedule == "gpipe"  # holds all of them
        parts = every if gpipe else every[:few]
        with agreed(self.group):
            loader = Loader(
                self.reader, self.plan.order, parts, first_step=1, last_step=1, prefetch=0
            )
            loader.counted = self.counted
            step = next(iter(loader))
        loader.close()
        self.averager.expect(len(parts))
        self._backward(step)
        self.averager.average()
        self.averager.zero_grad()
        found = leaves([micro_batch.data for micro_batch in step.micro_batches])
        read = sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor))
        of_all = read * len(every) // len(parts)
        ahead = self.config.data.prefetch if self.device.type == "cpu" else 0
        return of_all * (1 + ahead) - read

    def _cut(self, size: int) -> None:
        """Cut this replica's samples into micro-batches."""
        data, grid = self.config.data, self.grid
        parts = cut(data.batch, grid.dp, grid.coordinate.dp, size)
        self.plan = replace(self.plan, parts=parts)
        self.averager.expect(len(parts))

    @property
    def micro_batch(self) -> int:
        """The number of samples of a micro-batch; 0 if their lengths decide it."""
        return self.plan.parts[0].count if isinstance(self.plan.parts, list) else 0

    def _passes(self) -> int:
        """The number of backward passes of a step. It is a hint, if lengths decide it."""
        return len(self.plan.parts) if isinstance(self.plan.parts, list) else MANY_PASSES

    def validate(self) -> float:
        """The mean loss over the held-out data set. Collective.

        Raises:
            UserError: nothing is held out.
        """
        self.held_out = self._scores(self.validation)
        return self.held_out["loss"]

    def scores_of(self, dataset: Any) -> dict[str, float]:
        """The mean loss as "loss", and the task's scores, of other samples. Collective.

        Args:
            dataset: samples of the same kind as the held-out ones; `data.validation_batches` counts
                for them, too.
        """
        return self._scores(self.validation.of(dataset))

    def _scores(self, validation: Validation) -> dict[str, float]:
        self.checkpoints.unify()
        with self.phases("evaluation"), eval_mode(self.model):
            return validation.scores(self.micro_batch)

    def _train_step(self, step: Step, report: Callable[[dict[str, Any]], None]) -> None:
        """Compute one step, and report its numbers if that is due. Collective."""
        self.assembly.substituted.count(step)
        if self.step_records.costs.uncounted:
            self.step_records.costs.count_operations(self.loss, step)
            self.step_records.start()  # counting takes a second, which is not the step's
        due = self._due(step.number)
        losses = self._backward(step)
        self.averager.average()
        with self.phases("optimizer"):
            self.layout.gradients.complete()
        mean = 0.0
        if due:
            self.assembly.steps.wait()
            mean = self._mean(losses)
        rate = self._set_learning_rate(step.number)
        norm = self.assembly.steps.advance(step.number, mean, needed=due, losses=losses)
        self.step_records.count_step()
        if due:
            self._frozen.look()
            record = {"step": step.number, "epoch": step.epoch + 1, "loss": mean, "lr": rate}
            record |= {"grad_norm": norm, **self.step_records.measured(step.number)}
            if self._validation_due(step.number):
                self._validated(step.number, self.validate())
                record |= {f"validation_{name}": one for name, one in self.held_out.items()}
            report(record)

    def _validated(self, step: int, loss: float) -> None:
        """Note a validation loss. Collective."""
        self.checkpoints.scores[step] = loss
        self.patience.note(step, loss)

    def _backward(self, step: Step) -> list[Tensor]:
        """Accumulate the step's gradients. Collective.

        Returns:
            On the last stage the micro-batches' losses times their weights, whose sum over all
            replicas is dp times the loss of the step.
        """
        self.averager.zero_grad()
        micro_batches = step.micro_batches
        batches = [moved(micro_batch.data, self.device) for micro_batch in micro_batches]

        def forward(number: int, virtual_stage: int) -> Tensor:
            self.loss.seed(step.number, micro_batches[number], virtual_stage)
            return self.loss(batches[number])

        forms = [micro_batch.part.form for micro_batch in micro_batches]
        scale = 1.0 if self.scaler is None else self.scaler.scale
        counted = self.counted is not None
        weights = loss_weights(step, self.config.data.batch, self.grid.data, counted=counted)
        with self.step_records.computing():
            losses = self.layout.pipeline.train(forward, forms, [scale * one for one in weights])
        return [one * weight for one, weight in zip(losses, weights, strict=False) if weight]

    def _set_learning_rate(self, step: int) -> float:
        """Set and return the learning rate of a step."""
        rate = learning_rate(self.config.optimizer, step, self.plan.last, self.grid.dp)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean loss of a step's samples, which are divided among the ranks. Collective."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for loss in losses if self.assembly.speaks else []:
            total += loss
        self.collectives.sum_(total)
        return float(total) / self.grid.dp

    def _due(self, step: int) -> bool:
        """Whether a step's numbers are reported."""
        regular = step % self.config.run.log_every == 0
        return regular or step in (1, self.plan.last) or self._validation_due(step)

    def _validation_due(self, step: int) -> bool:
        """Whether the held-out data is evaluated after a step."""
        every = self.config.data.validation_every
        due = step == self.plan.last or (every > 0 and step % every == 0)
        return self.task.validation is not None and due

    def _loader(self, after: int) -> Loader:
        """The loader of all steps after step `after`."""
        loader = Loader(
            self.reader,
            self.plan.order,
            self.plan.parts,
            first_step=after + 1,
            last_step=self.plan.last,
            prefetch=self.config.data.prefetch,
            workers=self.config.data.workers,
        )
        loader.counted, loader.pinned = self.counted, self.device.type == "cuda"
        return loader

    def _profiler(self, directory: Path, after: int, report: RunReport) -> Profiler:
        section, node = self.config.run.profile, self.runtime.node
        last, event = self.plan.last, report.event
        return Profiler(self.group, node, directory, after, last, section, event)

    def _stop_requests(self, directory: Path) -> StopRequests:
        """The reasons to stop: signals, the stop file and `run.time_limit`."""
        run = self.config.run
        end = of_job(self.group, run.end_margin) if run.time_limit == "auto" else None
        return StopRequests(run.time_limit_seconds(), end, directory / STOP)
