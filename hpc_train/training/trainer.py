"""The Trainer: a model, a data set and a configuration, trained over all ranks of a job."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint import Checkpoints
from hpc_train.collectives import connect
from hpc_train.config import RunConfig
from hpc_train.data.loader import Loader, MicroBatch, Step, cut
from hpc_train.data.order import SampleOrder
from hpc_train.data.reader import Reader
from hpc_train.errors import ConfigError, NotFiniteError
from hpc_train.gradients import LossScaler
from hpc_train.gradients.scaling import clip_factor
from hpc_train.job.deadline import of_job
from hpc_train.job.heartbeat import Heartbeat, Pace
from hpc_train.job.leaving import leave_together
from hpc_train.job.preemption import StopRequests
from hpc_train.job.preflight import preflight
from hpc_train.job.run_directory import reporting, run_directory
from hpc_train.launch.protocol import STOP
from hpc_train.monitoring.meter import Meter
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import discover
from hpc_train.mpi.watchdog import watch_over
from hpc_train.parallel import batch_norm
from hpc_train.parallel.apply import apply
from hpc_train.seeds import mix
from hpc_train.training import averaging, sharing
from hpc_train.training.device import (
    choose_device,
    choose_matmul,
    make_deterministic,
    move,
    seed,
    use_cores,
)
from hpc_train.training.evaluation import HELD_OUT
from hpc_train.training.learning_rate import last_step, learning_rate
from hpc_train.training.optimizers import build_optimizer
from hpc_train.training.saving import (
    Saving,
    check_best,
    finishing_saves,
    policy_of,
    resume_or_start,
)
from hpc_train.training.steps import guarded_steps

logger = logging.getLogger(__name__)


Loss = Callable[[nn.Module, Any], Tensor]


class Trainer:
    """Trains a model to the configuration's last step, from its newest checkpoint on.

    All ranks must make it and call `train`, with the same arguments.

    Args:
        config: every section but `model`, which whoever built the model has used.
        model: any module, whole and the same on all ranks, which get rank 0's weights; parts of it
            that are other ranks' are taken from it. For tp above 1 it has an attribute
            `tensor_plan`, for pp above 1 `stages` (docs/how-to/parallel.md). If it has a method
            `seed_samples`, it is given one integer per sample before each forward pass, to make
            masks from that do not depend on the layout. torch's generator is seeded for each
            micro-batch too.
        dataset: any map-style data set of torch, or one with `fetch` (see `Loader`).
        loss: of the model and a batch as the data set gives it, on the model's device: the mean
            over the batch's samples, a scalar.
        runtime: from `hpc_train.mpi.runtime.start_runtime`.
        validation: a held-out data set of the same kind.
        identity: what a checkpoint must have been made with to be continued, besides the seed,
            the batch and the number of samples, by configuration key.
        about: what the checkpoint's readers need to use the model, as plain JSON values.
        tokens_per_sample: to report tokens per second.
        only_optimizer_writes: whether nothing but the optimizer's step writes to parameters after
            the Trainer is made; then `memory.zero: auto` may share them between ranks. What a
            model, a loss or a hook writes to shared ones is written by each of the ranks.

    Raises:
        ConfigError: the values do not fit the ranks or the data.
        UserError: the model does not say how the layout is put on it.
        SetupError: engine horovod, and Horovod is missing.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        dataset: Any,
        loss: Loss,
        runtime: Runtime,
        *,
        validation: Any = None,
        identity: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        tokens_per_sample: int = 0,
        only_optimizer_writes: bool = False,
    ) -> None:
        self.config, self.loss, self.validation = config, loss, validation
        lock = threading.RLock()  # both may be parts of one data set
        self.reader, self.held_out = Reader(dataset, lock), Reader(validation, lock)
        self.runtime, self.group = runtime, runtime.world
        run, data = config.run, config.data
        layout = config.parallel
        self.grid = ParallelGrid.build(
            self.group,
            discover(self.group, runtime.node),
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
        )
        replica = self.grid.coordinate.dp
        with agreed(self.group):
            self.parts = cut(data.batch, self.grid.dp, replica, data.micro_batch)
            self.order = SampleOrder(len(dataset), data.batch, seed=run.seed, shuffle=data.shuffle)
            self.last_step = last_step(run, self.order.steps_per_epoch)
            if data.validation_every and validation is None:
                raise ConfigError(
                    f"data.validation_every is {data.validation_every}, but nothing is held out",
                    "prepare the data with more --validation, or leave the key out",
                )
            check_best(config.checkpoint, data, self.last_step, held_out=validation is not None)
        sizes = f"{len(dataset)} {len(validation) if validation is not None else 0}"
        same(self.group, "the size of the data set", sizes, "give all ranks the same data")
        if len(self.parts) < self.grid.pp and self.group.rank == 0:
            logger.warning(
                "a step has %d micro-batches, fewer than the %d stages of the pipeline: most ranks "
                "wait most of the time; a smaller data.micro_batch gives more",
                len(self.parts),
                self.grid.pp,
            )
        if run.deterministic:
            make_deterministic()
        use_cores(runtime)
        self.device = choose_device()
        choose_matmul(self.group, config.precision.matmul, self.device)
        engine = averaging.start_engine(config, self.grid, self.device)
        zero = sharing.decide(
            config,
            self.grid,
            engine,
            self.device,
            model,
            only_optimizer_writes=only_optimizer_writes,
        )
        dtype = getattr(torch, config.precision.dtype)
        local = self.group if config.gradients.average_every > 1 else None
        self.scaler = LossScaler(dtype, local) if dtype.itemsize == 2 else None
        self.model = model.to(getattr(torch, config.precision.parameters))
        numbers = sum(parameter.numel() for parameter in model.parameters())
        # With Adam's two moments, before the model is divided over the ranks.
        self.state_bytes = 3 * numbers * getattr(torch, config.precision.parameters).itemsize
        self.layout = apply(
            self.model,
            self.grid,
            config.parallel,
            self.device,
            overlap=runtime.cores > torch.get_num_threads(),
        )
        self.model.to(self.device)
        self._replicas = connect(self.grid.data, self.device)
        batch_norm.set_up_batch_norm(self.model, self._replicas, layout.batch_norm)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.averager, zero = averaging.make_averager(
            config,
            self.model,
            self.optimizer,
            self.grid,
            self.layout,
            engine,
            zero=zero,
            cores=runtime.cores,
        )
        self.collectives = connect(self.group)
        self.checkpoints = Checkpoints(
            Path(run.dir) / "checkpoints",
            self.collectives,
            averaging.training_state(
                config,
                zero,
                self.averager,
                self.model,
                self.optimizer,
                self.layout,
                self.grid,
                self.scaler,
            ),
            policy_of(config.checkpoint, run.nonfinite),
            identity={**sample_order_identity(config, len(dataset)), **(identity or {})},
            about=about,
        )
        self.meter = Meter(data.batch, self.group.waiting, tokens_per_sample)
        self._closed = False

    def close(self) -> None:
        """Release hooks, threads, shared memory and communicators. Collective.

        The model stays with the parameters that this rank has of it. Another Trainer may be made.
        """
        if self._closed:
            return
        self._closed = True
        self.checkpoints.close()
        self.averager.close()
        batch_norm.release(self.model, self._replicas)
        self.layout.close()
        self.grid.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if leave_together(self.group, error):
            self.close()

    def train(self) -> None:
        """Train until the last step. Collective.

        Raises:
            Stopped: a signal or the time limit stopped it, with a checkpoint.
            HpcTrainError: as the parts raise them, the same on all ranks.
        """
        self._train()
        Heartbeat(self.group).finish(self.last_step)

    def _train(self) -> None:
        with (
            run_directory(self.group, self.config) as (directory, claim),
            watch_over(self.group, self.config.run.hang_timeout),
            closing(self._stop_requests(directory)) as stop,
            finishing_saves(self.checkpoints),
        ):
            self.checkpoints.claim = claim
            if self.config.run.preflight:
                preflight(self.runtime, directory, self.device, self.state_bytes)
            after = resume_or_start(self.checkpoints, self.config.checkpoint)
            if after >= self.last_step:
                logger.info("nothing to do: step %d of %d is done", after, self.last_step)
                return
            with (
                closing(self._loader(after)) as loader,
                reporting(self.group, directory, after, self.last_step, claim) as report,
            ):
                self.model.train()
                saving = Saving.of(self.config.checkpoint)
                self.meter.start()
                run = self.config.run
                pace = Pace(run.hang_steps, run.hang_timeout, self._validation_due)
                steps = guarded_steps(loader, self.checkpoints, stop, saving, pace, self.meter)
                for step in steps:
                    self._train_step(step, report)
                if summary := self.averager.profile.describe():
                    logger.info(summary)

    def validate(self) -> float:
        """The mean loss over the held-out data set. Collective."""
        self.checkpoints.unify()
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        for indices in self._validation_rounds():
            with agreed(self.group):
                batches = [move(self._read_held_out(some), self.device) for some in indices]
            with torch.no_grad():
                losses = self._evaluate(batches, [len(some) for some in indices])
            for loss, some in zip(losses, indices, strict=False):  # none where nothing ends
                totals += torch.tensor([loss.item() * len(some), len(some)], dtype=torch.float64)
        self.model.train()
        self.collectives.sum_(totals)
        return float(totals[0] / totals[1])

    def _read_held_out(self, indices: range) -> Any:
        def seed_of(place: int) -> int:
            return mix(self.config.run.seed, HELD_OUT, indices[place])

        return self.held_out.read(indices, seed_of)

    def _validation_rounds(self) -> Iterator[list[range]]:
        """Which samples this replica evaluates; all replicas go as many rounds."""
        total, replicas = len(self.validation), self.grid.dp
        size, at_once = self.parts[0].count, 2 * self.grid.pp - 1
        mine = range(self.grid.coordinate.dp, total, replicas)
        for first in range(0, -(-total // replicas), size * at_once):
            cuts = range(first, min(first + size * at_once, len(mine)), size)
            yield [mine[begin : begin + size] for begin in cuts]

    def _evaluate(self, batches: list[Any], samples: list[int]) -> list[Tensor]:
        if not batches:
            return []
        losses = self.layout.pipeline.evaluate(
            lambda number, chunk: self._loss(batches[number]), samples
        )
        return losses if self._speaks else []

    @property
    def _speaks(self) -> bool:
        """Whether this rank's losses count: of the ranks of a replica one does."""
        return self.layout.pipeline.is_last and self.grid.coordinate.tp == 0

    def _train_step(self, step: Step, report: Callable[[dict[str, float]], None]) -> None:
        due = self._due(step.number)
        losses = self._backward(step)
        self.averager.average()
        self.layout.gradients.complete()
        norm = self._clip(needed=due)
        mean = self._mean(losses) if due else 0.0
        rate = self._set_learning_rate(step.number)
        self._check_finite(step.number, mean, norm)
        if self.scaler is None or math.isfinite(norm):
            self.averager.step()
        else:
            logger.warning("step %d skipped: %s", step.number, self.scaler.describe())
        self.meter.count_step()
        if due:
            record = {"step": step.number, "epoch": step.epoch + 1, "loss": mean, "lr": rate}
            record |= {"grad_norm": norm, **self.meter.take()}
            if self.scaler is not None:
                record["skipped_steps"] = self.scaler.skipped_steps
            if self._validation_due(step.number):
                record["validation_loss"] = self.validate()
                self.checkpoints.scores[step.number] = record["validation_loss"]
            report(record)

    def _backward(self, step: Step) -> list[Tensor]:
        """Accumulate the step's gradients; returns the micro-batches' losses, where they end."""
        self.averager.zero_grad()
        micro_batches = step.micro_batches
        batches = [move(micro_batch.data, self.device) for micro_batch in micro_batches]

        def forward(number: int, chunk: int) -> Tensor:
            self._seed(step.number, micro_batches[number], chunk)
            return self._loss(batches[number])

        samples = [micro_batch.part.count for micro_batch in micro_batches]
        scale = 1.0 if self.scaler is None else self.scaler.scale
        return self.layout.pipeline.train(forward, samples, factor=scale)

    def _loss(self, batch: Any) -> Tensor:
        """The loss of a micro-batch, computed in the number format of the configuration."""
        if self.scaler is None:
            return self.loss(self.model, batch)
        with torch.autocast(self.device.type, self.scaler.dtype):
            loss = self.loss(self.model, batch)
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    def _seed(self, step: int, micro_batch: MicroBatch, chunk: int) -> None:
        base, part = self.config.run.seed, micro_batch.part
        stage = chunk * self.grid.pp + self.grid.coordinate.pp  # unlike draws in unlike layers
        seed(self.device, mix(base, step, part.first, *([stage] if stage else [])))
        seed_samples = getattr(self.model, "seed_samples", None)
        if seed_samples is not None:
            places = range(part.first, part.first + part.count)
            seed_samples([mix(base, step, place) for place in places])

    def _clip(self, *, needed: bool) -> float:
        """Clip the averaged gradients; returns their global norm before, if anybody needs it.

        The loss's scale is undone, too. With a scaler a norm that is not finite asks for a skip.
        """
        limit = self.config.optimizer.clip_norm
        if not limit and not needed and self.scaler is None:
            return 0.0
        if self.grid.tp == self.grid.pp == 1:  # an averager need not go through all parameters
            norm = float(self.averager.norm())
        else:
            parts, shards = self.averager.parts(), self.averager.shards
            norm = float(self.layout.gradients.norm(parts, shards))
        if self.scaler is not None:
            return self.scaler.unscale(self.averager, norm, clip_norm=limit)
        factor = clip_factor(norm, limit)
        if factor != 1.0:
            self.averager.scale_(factor)
        return norm

    def _set_learning_rate(self, step: int) -> float:
        rate = learning_rate(self.config.optimizer, step, self.last_step, self.grid.dp)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean loss of a step's samples, which are divided among the ranks. Collective."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for loss in losses if self._speaks else []:
            total += loss / len(losses)
        self.collectives.sum_(total)
        return float(total) / self.grid.dp

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        """Stop before a step that would spoil the model; 0 for what is not known. Collective.

        Raises:
            NotFiniteError: the loss or the norm is not finite; on all ranks.
        """
        bad = not math.isfinite(loss + norm) and self.scaler is None  # which skips such steps
        if self.config.gradients.average_every > 1:  # else all ranks have the same numbers
            bad = self.group.largest(int(bad)) > 0
        if not bad:
            return
        error = NotFiniteError(
            f"step {step} has a loss of {loss} and gradients with a norm of {norm}",
            "give a smaller optimizer.lr, or optimizer.clip_norm, and start again: it goes on from "
            "the last checkpoint; run.nonfinite warn goes on all the same",
        )
        if self.config.run.nonfinite == "warn":
            logger.warning("%s", error.cause)
            return
        error.agreed = True
        raise error

    def _due(self, step: int) -> bool:
        regular = step % self.config.run.log_every == 0
        return regular or step in (1, self.last_step) or self._validation_due(step)

    def _validation_due(self, step: int) -> bool:
        every = self.config.data.validation_every
        due = step == self.last_step or (every > 0 and step % every == 0)
        return self.validation is not None and due

    def _loader(self, after: int) -> Loader:
        return Loader(
            self.reader,
            self.order,
            self.parts,
            first_step=after + 1,
            last_step=self.last_step,
            prefetch=self.config.data.prefetch,
            workers=self.config.data.workers,
        )

    def _stop_requests(self, directory: Path) -> StopRequests:
        run = self.config.run
        end = of_job(self.group) if run.time_limit == "auto" else None
        return StopRequests(run.time_limit_seconds(), end, directory / STOP)


def sample_order_identity(config: RunConfig, samples: int) -> dict[str, Any]:
    """What decides which samples a step has, by configuration key."""
    return {
        "run.seed": config.run.seed,
        "data.batch": config.data.batch,
        "data.shuffle": config.data.shuffle,
        "number of samples": samples,
    }
