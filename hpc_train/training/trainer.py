"""The Trainer: a model, a data set and a configuration, trained over all ranks of a job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hpc_train import files, log
from hpc_train.checkpoint import Checkpoints
from hpc_train.collectives import connect
from hpc_train.config import RunConfig
from hpc_train.data.loader import Loader, MicroBatch, Step, cut, fetch
from hpc_train.data.order import SampleOrder
from hpc_train.errors import ConfigError
from hpc_train.gradients import average_gradients
from hpc_train.models.dropout import mix
from hpc_train.monitoring.console import progress
from hpc_train.monitoring.meter import Meter
from hpc_train.monitoring.metrics import MetricsFile
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.device import choose_device, make_deterministic, move, use_cores
from hpc_train.training.optimizers import build_optimizer
from hpc_train.training.preemption import StopRequests
from hpc_train.training.schedule import learning_rate
from hpc_train.training.steps import guarded_steps

logger = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]


class Trainer:
    """Trains a model to the configuration's last step, from its newest checkpoint on.

    All ranks must make it and call `train`, with the same arguments.

    Args:
        config: every section but `model`, which whoever built the model has used.
        model: any module; all ranks get rank 0's weights. If it has a method `seed_samples`, it is
            given one integer per sample before each forward pass, to make masks from that do not
            depend on the layout. torch's generator is seeded for each micro-batch too.
        dataset: any map-style data set of torch, or one with `fetch` (see `Loader`).
        loss: of the model and a batch as the data set gives it, on the model's device: the mean
            over the batch's samples, a scalar.
        runtime: from `hpc_train.mpi.runtime.start`.
        validation: a held-out data set of the same kind.
        identity: what a checkpoint must have been made with to be continued, besides the seed,
            the batch and the number of samples, by configuration key.
        about: what the checkpoint's readers need to use the model, as plain JSON values.
        tokens_per_sample: to report tokens per second.

    Raises:
        ConfigError: the values do not fit the ranks or the data.
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
    ) -> None:
        self.config, self.dataset, self.loss, self.validation = config, dataset, loss, validation
        self.group = runtime.world
        run, data = config.run, config.data
        with agreed(self.group):
            check_ranks(config, self.group.size)
            self.parts = cut(data.batch, self.group.size, self.group.rank, data.micro_batch)
            self.order = SampleOrder(len(dataset), data.batch, seed=run.seed, shuffle=data.shuffle)
            self.last_step = last_step(config, self.order)
            if data.validation_every and validation is None:
                raise ConfigError(
                    f"data.validation_every is {data.validation_every}, but nothing is held out",
                    "prepare the data with more --validation, or leave the key out",
                )
        sizes = f"{len(dataset)} {len(validation) if validation is not None else 0}"
        same(self.group, "the size of the data set", sizes, "give all ranks the same data")
        if run.deterministic:
            make_deterministic()
        use_cores(runtime)
        self.device = choose_device()
        self.model = model.to(self.device, getattr(torch, config.precision.dtype))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.averager = average_gradients(
            self.model,
            self.optimizer,
            self.group,
            engine=config.gradients.engine,
            bucket_bytes=int(config.gradients.bucket_mb * (1 << 20)),
            backward_passes=len(self.parts),
        )
        self.collectives = connect(self.group)
        self.checkpoints = Checkpoints(
            Path(run.dir) / "checkpoints",
            self.collectives,
            self.model,
            self.optimizer,
            keep=config.checkpoint.keep,
            engine=config.checkpoint.engine,
            identity={**sample_order_identity(config, len(dataset)), **(identity or {})},
            about=about,
        )
        self.meter = Meter(data.batch, tokens_per_sample)

    def train(self) -> None:
        """Train until the last step. Collective.

        Raises:
            Stopped: a signal or the time limit stopped it, with a checkpoint.
            HpcTrainError: as the parts raise them, the same on all ranks.
        """
        with (
            self._run_directory() as directory,
            closing(StopRequests(self.config.run.time_limit_seconds())) as stop,
        ):
            after = self.checkpoints.resume(self.config.checkpoint.resume)
            if after >= self.last_step:
                logger.info("nothing to do: step %d of %d is done", after, self.last_step)
                return
            with (
                closing(self._loader(after)) as loader,
                self._reporting(directory, after) as report,
            ):
                every = self.config.checkpoint.every
                waiting = self.meter.start()
                for step in guarded_steps(loader, self.checkpoints, stop, every, waiting):
                    self._train_step(step, report)

    def validate(self) -> float:
        """The mean loss over the held-out data set. Collective."""
        self.checkpoints.unify_buffers()
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        size = self.parts[0].count
        mine = range(self.group.rank, len(self.validation), self.group.size)
        with agreed(self.group), torch.no_grad():
            for first in range(0, len(mine), size):
                indices = mine[first : first + size]
                batch = move(fetch(self.validation, indices), self.device)
                loss = self.loss(self.model, batch).item()
                totals += torch.tensor([loss * len(indices), len(indices)], dtype=torch.float64)
        self.model.train()
        self.collectives.sum_(totals)
        return float(totals[0] / totals[1])

    def _train_step(self, step: Step, report: Callable[[dict[str, float]], None]) -> None:
        due = self._due(step.number)
        loss = self._backward(step)
        with self.meter.communicating():
            self.averager.average()
        norm = self._clip(needed=due)
        rate = self._set_learning_rate(step.number)
        self.averager.step()
        self.meter.count_step()
        if due:
            with self.meter.communicating():
                mean = self._mean(loss)
            record = {"step": step.number, "epoch": step.epoch + 1, "loss": mean, "lr": rate}
            record |= {"grad_norm": norm, **self.meter.take()}
            if self._validation_due(step.number):
                record["validation_loss"] = self.validate()
            report(record)

    def _backward(self, step: Step) -> Tensor:
        """Accumulate the step's gradients; returns the mean loss over this rank's samples."""
        self.averager.zero_grad()
        self.model.train()
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for micro_batch in step.micro_batches:
            self._seed(step.number, micro_batch)
            loss = self.loss(self.model, move(micro_batch.data, self.device))
            loss = loss / len(step.micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def _seed(self, step: int, micro_batch: MicroBatch) -> None:
        seed, part = self.config.run.seed, micro_batch.part
        torch.manual_seed(mix(seed, step, part.first))
        seed_samples = getattr(self.model, "seed_samples", None)
        if seed_samples is not None:
            places = range(part.first, part.first + part.count)
            seed_samples([mix(seed, step, place) for place in places])

    def _clip(self, *, needed: bool) -> float:
        """Clip the averaged gradients; returns their global norm before, if anybody needs it."""
        limit = self.config.optimizer.clip_norm
        if not limit and not needed:
            return math.nan
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit:
            clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def _set_learning_rate(self, step: int) -> float:
        rate = learning_rate(self.config.optimizer, step, self.last_step, self.group.size)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _mean(self, local: Tensor) -> float:
        total = local.detach().clone()
        self.collectives.sum_(total)
        mean = float(total) / self.group.size
        if not math.isfinite(mean):
            logger.warning("the loss is %s", mean)
        return mean

    def _due(self, step: int) -> bool:
        regular = step % self.config.run.log_every == 0
        return regular or step in (1, self.last_step) or self._validation_due(step)

    def _validation_due(self, step: int) -> bool:
        every = self.config.data.validation_every
        due = step == self.last_step or (every > 0 and step % every == 0)
        return self.validation is not None and due

    def _loader(self, after: int) -> Loader:
        # A user's data set may draw from global generators, which a thread would disturb.
        threaded = hasattr(self.dataset, "fetch") or not self.config.run.deterministic
        return Loader(
            self.dataset,
            self.order,
            self.parts,
            first_step=after + 1,
            last_step=self.last_step,
            prefetch=self.config.data.prefetch if threaded else 0,
        )

    @contextmanager
    def _run_directory(self) -> Iterator[Path]:
        """Make the run directory, with the configuration in it, and log to it."""
        directory = Path(self.config.run.dir)
        with agreed(self.group), _usable(directory):
            if self.group.rank == 0:
                (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
                files.write_text(directory / "config.yaml", self.config.to_yaml())
        with agreed(self.group), _usable(directory):
            handler = log.to_file(directory / "logs", self.group.rank, self.group.size)
        try:
            yield directory
        finally:
            log.stop(handler)

    @contextmanager
    def _reporting(
        self, directory: Path, after: int
    ) -> Iterator[Callable[[dict[str, float]], None]]:
        """Where records go: on rank 0 to metrics.jsonl and the console, elsewhere nowhere."""
        with agreed(self.group), _usable(directory):
            metrics = (
                MetricsFile(directory / "metrics.jsonl", after) if self.group.rank == 0 else None
            )
        if metrics is None:
            yield lambda record: None
            return
        shown = progress(self.last_step, alone=self.group.comm is None)
        with closing(metrics), closing(shown):

            def report(record: dict[str, float]) -> None:
                metrics.write(record)
                shown.show(record)

            yield report


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir {directory} cannot be written ({error.strerror}: {error.filename})",
            "give a folder that you may write to, or free space",
        ) from None


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Check that the data-parallel size is what the job has.

    Raises:
        ConfigError: it is not.
    """
    if config.parallel.dp not in (None, ranks):
        raise ConfigError(
            f"parallel.dp is {config.parallel.dp}, the job has {ranks} ranks",
            f"start {config.parallel.dp} ranks, or leave parallel.dp out",
        )


def last_step(config: RunConfig, order: SampleOrder) -> int:
    """The run's last step, given as steps or as epochs.

    Raises:
        ConfigError: neither is given.
    """
    if config.run.steps is not None:
        return config.run.steps
    if config.run.epochs is None:
        raise ConfigError("neither run.steps nor run.epochs is given", "give one of them")
    return config.run.epochs * order.steps_per_epoch


def sample_order_identity(config: RunConfig, samples: int) -> dict[str, Any]:
    """What decides which samples a step has, by configuration key."""
    return {
        "run.seed": config.run.seed,
        "data.batch": config.data.batch,
        "data.shuffle": config.data.shuffle,
        "number of samples": samples,
    }
