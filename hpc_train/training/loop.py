"""The parts of the Trainer for a loop of your own: averaging, batches, checkpoints, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hpc_train.checkpoint import Checkpoints
from hpc_train.collectives import connect
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder
from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.averager import Engine
from hpc_train.launch.protocol import STOP
from hpc_train.models.dropout import mix
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.watchdog import watch_over
from hpc_train.processor import Matmul
from hpc_train.training.deadline import of_job
from hpc_train.training.device import choose_matmul, use_cores
from hpc_train.training.heartbeat import Pace
from hpc_train.training.preemption import StopRequests
from hpc_train.training.run_directory import claimed_by_job
from hpc_train.training.saving import Saving, landing
from hpc_train.training.steps import guarded_steps


class Loop:
    """Takes an ordinary training loop to all ranks of a job.

    In place of the data loader iterate over `epochs`, in place of `optimizer.step()` call `step`;
    run the program with `hpc_train.run`. Started again after a stop, the loop goes on where the
    newest checkpoint stands.

    Args:
        runtime: what `hpc_train.run` gives the program.
        directory: for the checkpoints.
        model, optimizer: as in a single process; all ranks get rank 0's weights.
        engine: how gradients are averaged: auto, horovod or mpi.
        backward_passes: calls of `backward` in each step, each of a loss divided by their number.
        every: steps between two checkpoints; one more is written at the end and at a stop.
        keep: newest checkpoints that are kept.
        background: whether training goes on while one is written; then nothing but `step` may
            change parameters and the optimizer's state.
        time_limit: seconds after which it stops with a checkpoint; "auto": before the end of the
            SLURM or PBS job that it is in.
        hang_timeout: seconds that a rank in `epochs` waits for another before the job ends with an
            error; 0: for ever.
        hang_steps: the same between two steps, in times of the longest one so far, and at least
            60 s; 0: not so, for a loop in which one rank may work while the others wait.
        matmul: how `hpc_train.models.linear` multiplies float32 matrices, as `precision.matmul`.
    """

    def __init__(
        self,
        runtime: Runtime,
        directory: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        engine: Engine = "auto",
        backward_passes: int = 1,
        every: int = 1000,
        keep: int = 3,
        background: bool = False,
        time_limit: float | Literal["auto"] | None = "auto",
        hang_timeout: float = 1800.0,
        hang_steps: int = 0,
        matmul: Matmul = "auto",
    ) -> None:
        self.group = runtime.world
        self.saving = Saving(every, background=background)
        self.time_limit = time_limit
        self.hang_timeout, self.hang_steps = hang_timeout, hang_steps
        self.collectives = connect(self.group)
        use_cores(runtime)
        choose_matmul(self.group, matmul, next(model.parameters()).device)
        self.averager = average_gradients(
            model,
            optimizer,
            self.group,
            engine=engine,
            backward_passes=backward_passes,
            cores=runtime.cores,
        )
        self.checkpoints = Checkpoints(
            Path(directory),
            self.collectives,
            model,
            optimizer,
            keep=keep,
            background=background,
        )

    def epochs(
        self, dataset: Any, *, batch: int, epochs: int, seed: int = 0, shuffle: bool = True
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Deliver (epoch from 1, batches of this rank) up to the last epoch. Collective.

        Iterate over each epoch's batches to their end. Batches are put together by torch's
        `default_collate`, or by the data set's `fetch` (see `Loader`). torch's random generator is
        seeded for each step, so that a resumed loop draws what an uninterrupted one would.

        Args:
            dataset: map-style, as torch's DataLoader takes it; the same on all ranks.
            batch: samples per step over the whole job; divisible by the number of ranks.
            epochs: passes over the data set in all; one has as many steps as it has whole batches.
            seed: of the sample order, which does not depend on the number of ranks.
            shuffle: a new order in each epoch, or the data set's own in all.

        Raises:
            ConfigError: the batch does not fit the ranks or the data.
            UserError: the ranks were given different things, or an epoch was not run to its end.
            Stopped: on SIGTERM, SIGUSR1, SIGUSR2 or at the time limit, with a checkpoint.
        """
        self.checkpoints.identity |= {
            "batch": batch,
            "seed": seed,
            "shuffle": shuffle,
            "number of samples": len(dataset),
        }
        with agreed(self.group):
            parts = cut(batch, self.group.size, self.group.rank)
            order = SampleOrder(len(dataset), batch, seed=seed, shuffle=shuffle)
        what = "what the loop was given (size of the data set, batch, epochs, seed or shuffle)"
        given = repr((len(dataset), batch, epochs, seed, shuffle))
        same(self.group, what, given, "give all ranks the same")
        last = epochs * order.steps_per_epoch
        with (
            claimed_by_job(self.group, self.checkpoints.directory, self.hang_timeout) as claim,
            watch_over(self.group, self.hang_timeout),
            closing(self._stop_requests()) as stop,
            landing(self.checkpoints),
        ):
            self.checkpoints.claim = claim
            done = self.checkpoints.resume()
            loader = Loader(dataset, order, parts, first_step=done + 1, last_step=last, prefetch=0)
            batches = self._batches(loader, stop, seed)
            while done < last:
                left = order.steps_per_epoch - done % order.steps_per_epoch
                epoch = islice(batches, left)
                yield order.epoch(done + 1) + 1, epoch
                if any(True for _ in epoch):
                    raise UserError("an epoch was left before its end", "iterate over all batches")
                done += left
            next(batches, None)  # the last step is over: this writes its checkpoint

    def _stop_requests(self) -> StopRequests:
        file = self.checkpoints.directory / STOP
        if self.time_limit == "auto":
            return StopRequests(end=of_job(self.group), file=file)
        return StopRequests(self.time_limit, file=file)

    def _batches(self, loader: Loader, stop: StopRequests, seed: int) -> Iterator[Any]:
        pace = Pace(self.hang_steps, self.hang_timeout)
        for step in guarded_steps(loader, self.checkpoints, stop, self.saving, pace):
            torch.manual_seed(mix(seed, step.number, self.group.rank))
            yield step.micro_batches[0].data

    def step(self) -> None:
        """Average the gradients and take the optimizer's step. Collective."""
        self.averager.step()

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean of a number over the ranks. Collective."""
        total = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone()
        self.collectives.sum_(total)
        return float(total) / self.group.size
