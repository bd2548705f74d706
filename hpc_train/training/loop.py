"""The parts of the Trainer for a loop of your own: averaging, batches, checkpoints, stopping."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.store import Nonfinite
from hpc_train.collectives import connect
from hpc_train.data.generators import seed_beside_torch
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.averager import Engine
from hpc_train.gradients.scaling import clip_factor
from hpc_train.launch.protocol import STOP
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.watchdog import watch_over
from hpc_train.parallel import batch_norm as batch_norms
from hpc_train.parallel.batch_norm import BatchNorm
from hpc_train.processor import Matmul
from hpc_train.seeds import mix
from hpc_train.training.averaging import Statistics
from hpc_train.training.deadline import of_job
from hpc_train.training.device import choose_matmul, use_cores
from hpc_train.training.heartbeat import Pace
from hpc_train.training.leaving import Held, leave_together
from hpc_train.training.preemption import StopRequests
from hpc_train.training.run_directory import claimed_by_job
from hpc_train.training.saving import Saving, landing
from hpc_train.training.steps import guarded_steps

logger = logging.getLogger(__name__)


class Loop:
    """Takes an ordinary training loop to all ranks of a job.

    In place of the data loader iterate over `epochs`, and run the program with `hpc_train.run`. The
    optimizer's step averages the gradients. Started again after a stop, the loop goes on where the
    newest checkpoint stands.

    Args:
        runtime: what `hpc_train.run` gives the program.
        directory: for the checkpoints.
        model, optimizer: as in a single process; all ranks get rank 0's weights.
        engine: how gradients are averaged: auto, horovod or mpi.
        batch_norm: what BatchNorm layers do: "sync" takes statistics over all ranks' samples, as
            one process would; "local" takes each rank's own; "refuse" refuses such a model.
        every: steps between two checkpoints; one more is written at the end and at a stop.
        keep: newest checkpoints that are kept.
        background: whether training goes on while one is written; then nothing but `step` may
            change parameters and the optimizer's state.
        nonfinite: what is done at a checkpoint of trained parameters that are infinite or not
            numbers: "stop" before it is written, or "warn".
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
        batch_norm: BatchNorm = "sync",
        every: int = 1000,
        keep: int = 3,
        background: bool = False,
        nonfinite: Nonfinite = "stop",
        time_limit: float | Literal["auto"] | None = "auto",
        hang_timeout: float = 1800.0,
        hang_steps: int = 0,
        matmul: Matmul = "auto",
    ) -> None:
        self.group, self.optimizer, self._runtime = runtime.world, optimizer, runtime
        self._running: Generator[tuple[int, Iterator[Any]]] | None = None
        self._requests: StopRequests | None = None
        self._given = self._taken = 0  # the last batch; the last one with which a step was taken
        self._computing = False  # a batch was given, and the ranks have not come together since
        self._in_step = self._is_left = self._failed = self._closed = False
        self.saving = Saving(every, background=background)
        self.time_limit = time_limit
        self.hang_timeout, self.hang_steps = hang_timeout, hang_steps
        self.collectives = connect(self.group)
        use_cores(runtime)
        choose_matmul(self.group, matmul, next(model.parameters()).device)
        batch_norms.set_up(model, self.collectives, batch_norm)
        self.checkpoints = Checkpoints(
            Path(directory),
            self.collectives,
            model,
            optimizer,
            keep=keep,
            background=background,
            more=Statistics(model, self.collectives),
            nonfinite=nonfinite,
        )
        self.averager = average_gradients(
            model,
            optimizer,
            self.group,
            engine=engine,
            cores=runtime.cores,
        )

    def epochs(
        self,
        dataset: Any,
        *,
        batch: int,
        epochs: int,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 0,
        workers: int = 0,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Deliver (epoch from 1, batches of this rank) up to the last epoch. Collective.

        Iterate over each epoch's batches to their end, or call `stop`. Whoever leaves the loop by
        `break` or `return` leaves it on all ranks; in the next call of this loop, or at the end of
        the program, a checkpoint is written of the steps which were taken. Batches are put
        together by `collate_fn` (torch's `default_collate`), or by the data set's `fetch`. The
        random generators of torch, NumPy and Python are seeded for each step and rank, so that a
        resumed loop draws what an uninterrupted one would; what the data set draws is the same on
        any number of ranks.

        Args:
            dataset: map-style, as torch's DataLoader takes it, or one with `fetch` (see `Loader`);
                the same on all ranks.
            batch: samples per step over the whole job; divisible by the number of ranks.
            epochs: passes over the data set in all; one has as many steps as it has whole batches.
            seed: of the sample order, which does not depend on the number of ranks.
            shuffle: a new order in each epoch, or the data set's own in all.
            collate_fn: puts a list of samples together, as that of torch's DataLoader.
            prefetch: steps read ahead by a thread, if the data set draws no random numbers.
            workers: processes of each rank that read ahead, if `hpc_train.start_workers` was called
                before MPI started; else threads. The batches are the same as without.

        Raises:
            ConfigError: the batch does not fit the ranks or the data.
            UserError: the ranks were given different things, an epoch was not run to its end, or
                some ranks have left the loop and others have not.
            ClaimError: another job writes to the directory.
            Stopped: on SIGTERM, SIGUSR1, SIGUSR2 or at the time limit, with a checkpoint.
        """
        self._end()
        load = partial(Loader, dataset, collate_fn=collate_fn, prefetch=prefetch, workers=workers)
        self._running = self._epochs(dataset, batch, epochs, seed, shuffle, load)
        return Held(self._running, self._dropped)

    def _epochs(
        self,
        dataset: Any,
        batch: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        load: Callable[..., Loader],
    ) -> Generator[tuple[int, Iterator[Any]]]:
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
            self._counting(),
        ):
            self.checkpoints.claim = claim
            done = self._given = self._taken = self.checkpoints.resume()
            with agreed(self.group):
                loader = load(order, parts, first_step=done + 1, last_step=last)
            self._requests = stop
            try:
                yield from self._delivered(self._batches(loader, stop, seed), order, last)
            except GeneratorExit:
                if self._failed:
                    self.checkpoints.finish()
                else:
                    self._leave(stop)
            finally:
                loader.close()

    def _delivered(
        self, batches: Iterator[Any], order: SampleOrder, last: int
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        done, stop = self._given, self._requests
        assert stop is not None
        while done < last:
            if self.group.largest(int(stop.enough)):
                self.saving.last(self.checkpoints, self._taken)
                return
            left = order.steps_per_epoch - done % order.steps_per_epoch
            yield order.epoch(done + 1) + 1, islice(batches, left)
            if stop.ended:
                return
            done += left
            if self._given < done:
                self._leave(stop)
                error = UserError(
                    f"an epoch was left before its end; a checkpoint has step {self._taken}",
                    "iterate over all batches, or end the loop by loop.stop()",
                )
                error.agreed = True
                raise error
        next(batches, None)  # the last step is over: this writes its checkpoint

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Note which of the batches that were given a step was taken with, whoever called it."""

        def begin(*_: Any) -> None:
            self._in_step = True

        def end(*_: Any) -> None:
            self._in_step, self._taken = False, self._given

        hooks = [
            self.optimizer.register_step_pre_hook(begin),
            self.optimizer.register_step_post_hook(end),
        ]
        self._in_step = False
        self._runtime.at_end.append(self._at_end)
        try:
            yield
        finally:
            self._requests = None
            for hook in hooks:
                hook.remove()
            if self._at_end in self._runtime.at_end:
                self._runtime.at_end.remove(self._at_end)

    def _leave(self, stop: StopRequests) -> None:
        """Save the steps that were taken, if all ranks have left; else all end. Collective."""
        self._leave_step()
        stop.leave(self.group)
        what = "the step in which the loop was left"
        same(self.group, what, f"{self._taken} {self._in_step}", "let all ranks leave it together")
        if not self._in_step:  # else the state is none of a step
            self.saving.last(self.checkpoints, self._taken)

    def _at_end(self, failed: bool) -> None:
        """The program has ended; if it has not failed, what it has trained is saved. Collective."""
        self._failed = failed
        self._end()

    def _dropped(self, running: object) -> None:
        """The user has no longer what `epochs` gave: the loop is over, or was left.

        By an exception, perhaps, of this rank alone: so several ranks meet in the next call of this
        loop, or at the program's end.
        """
        if running is not self._running:
            return  # another one has begun since
        if self.group.comm is not None or sys.is_finalizing():
            self._is_left = True
            return
        try:
            self._end()
        except HpcTrainError as error:
            logger.error("%s", error)  # nothing can be raised from here

    def _settle(self) -> None:
        if self._is_left:
            self._end()

    def _end(self) -> None:
        """End a loop that was left. Collective."""
        running, self._running, self._is_left = self._running, None, False
        if running is not None:
            running.close()

    def stop(self) -> None:
        """Ask that training ends after this step, with a checkpoint, as if it were the last one.

        One rank may call it, or several. A loop that is started again goes on from there.
        """
        if self._requests is not None:
            self._requests.enough = True

    def close(self) -> None:
        """End a loop that was left, with a checkpoint, and release what it holds. Collective.

        The model and the optimizer stay as they are. Another loop may be made with them.

        Raises:
            UserError: other ranks have not left the loop.
            CheckpointError: the last checkpoint could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._end()
        self.checkpoints.close()
        self.averager.close()
        batch_norms.release(self.checkpoints.model, self.collectives)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if leave_together(self.group, error):
            self._failed = error is not None
            self.close()

    def _stop_requests(self) -> StopRequests:
        file = self.checkpoints.directory / STOP
        if self.time_limit == "auto":
            return StopRequests(end=of_job(self.group), file=file)
        return StopRequests(self.time_limit, file=file)

    def _batches(self, loader: Loader, stop: StopRequests, seed: int) -> Iterator[Any]:
        pace = Pace(self.hang_steps, self.hang_timeout)
        for step in guarded_steps(
            loader, self.checkpoints, stop, self.saving, pace, taken=lambda _: self._taken
        ):
            of_step = mix(seed, step.number, self.group.rank)
            torch.manual_seed(of_step)
            seed_beside_torch(of_step)
            self._given, self._computing = step.number, True
            yield step.micro_batches[0].data
            self._leave_step()

    def _leave_step(self) -> None:
        """Come together after a batch, wherever the loop goes on; some may average yet."""
        if self._computing:
            self._computing = False
            self.averager.leave_step()

    def step(self) -> None:
        """Average the gradients and take the optimizer's step, as it does itself. Collective."""
        self._settle()
        self.averager.step()

    def clip(self, max_norm: float) -> float:
        """Average the gradients, and scale them down where their norm is larger. Collective.

        Returns:
            The 2-norm of all averaged gradients before.
        """
        self.averager.average()
        norm = float(self.averager.norm())
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            self.averager.scale_(factor)
        return norm

    def weight(self, items: int) -> float:
        """The factor for a loss that is a mean over so many items of this rank. Collective.

        For losses whose items are not the samples: tokens that count, pixels under a mask. With it
        the mean over the ranks is one over all items. A rank without any gets 0, and may leave the
        backward pass out.
        """
        return self.averager.weight(items)

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean of a number over the ranks. Collective."""
        self._settle()
        total = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone()
        self.collectives.sum_(total)
        return float(total) / self.group.size
