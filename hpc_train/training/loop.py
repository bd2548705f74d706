"""The parts of the Trainer for a loop of your own: averaging, batches, checkpoints, stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from hpc_train.checkpoint import Checkpoints, checks
from hpc_train.checkpoint.state import Together, TrainingState
from hpc_train.collectives import connect
from hpc_train.data.loader import Loader
from hpc_train.data.order import SampleOrder
from hpc_train.data.reader import Reader
from hpc_train.errors import HpcTrainError, UserError
from hpc_train.gradients import LossScaler, average_gradients
from hpc_train.gradients.hooks import after_step, before_step
from hpc_train.host.allocator import close_gaps
from hpc_train.job.heartbeat import Heartbeat
from hpc_train.job.leaving import Held
from hpc_train.job.reporting import reporting
from hpc_train.job.run_directory import check_may_start, claimed_by_job, keep_lost_records
from hpc_train.mpi.agreement import agreed, same
from hpc_train.mpi.runtime import Runtime
from hpc_train.parallel import batch_norm as batch_norms
from hpc_train.parallel.recompute import recompute
from hpc_train.parallel.stages import gates_of
from hpc_train.training.averaging import options_of, whole_training_state
from hpc_train.training.costs import RunCosts
from hpc_train.training.device import choose_matmul, use_cores
from hpc_train.training.evaluation import PerSample, evaluate, telling_of_eval_mode
from hpc_train.training.keeping import keeping_divided
from hpc_train.training.loop_records import LoopRecords, mean_of
from hpc_train.training.options import DEFAULT_LOOP_OPTIONS, LoopOptions, check_given, check_integer
from hpc_train.training.outsiders import telling_of_outsiders
from hpc_train.training.parts import MANY_PASSES, parts_of_loop
from hpc_train.training.registered import Registered, Registrable, parameters_beside
from hpc_train.training.same_data import SameData
from hpc_train.training.saving import finishing_saves
from hpc_train.training.sharing import check_device
from hpc_train.training.stepping import Stepping


class Loop(Stepping):
    """Runs an ordinary training loop on all ranks of a job. All ranks must make it.

    Iterate over `epochs` instead of a data loader, and run the program with `hpc_train.run`. The
    optimizer's step averages the gradients first. A program that is started again after a stop
    resumes from the newest checkpoint.

    Args:
        runtime: the runtime that `hpc_train.run` passes to the program.
        directory: the folder of the checkpoints.
        model, optimizer: as in a single process. All ranks get rank 0's weights.
        options: how the loop averages, computes, saves and stops.
    """

    def __init__(
        self,
        runtime: Runtime,
        directory: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        options: LoopOptions = DEFAULT_LOOP_OPTIONS,
    ) -> None:
        self.end_left_loops(runtime)  # before any other call of all ranks
        with agreed(runtime.world):
            check_given(directory, optimizer, options)
            checks.check_savable(TrainingState(model, optimizer))  # before anything is sent
        super().__init__(runtime, optimizer, options)
        group, gradients = self.group, options.gradients
        # These may differ, and functions cannot be compared.
        alike = replace(options, time_limit=None, prefetch=0, workers=0, counted=None)
        what = "what the loop was given (LoopOptions)"
        same(group, what, f"{alike!r} {options.counted is None}", "give all ranks the same")
        self._enough = False
        self._records: LoopRecords | None = None
        self._compared_sizes: set[int] = set()  # of data sets of `evaluate`
        self._reading = threading.RLock()  # both data sets may be parts of one
        self.collectives = connect(group)

        # How this rank computes: cores, matrix products, BatchNorm layers and precision.
        use_cores(runtime)
        device = next(model.parameters()).device
        self._device_type = device.type
        choose_matmul(group, options.matmul, device)
        batch_norms.set_up_batch_norm(model, self.collectives, options.batch_norm)
        with agreed(group):
            check_device(options.memory, device)
            recompute(model, options.memory.recompute)
            if options.memory.recompute != "none" and device.type == "cpu":
                close_gaps()
            gates = gates_of(model) if options.memory.zero == 3 else []
            self._hooks += gates
        if options.precision:
            local = group if gradients.average_every > 1 else None
            self.scaler = LossScaler(getattr(torch, options.precision), local)

        # The optimizer's step averages first. `_begin_step` comes before: it may refuse the step.
        self._hooks.append(before_step(optimizer, self._begin_step))
        try:
            memory = options.memory
            asked = options_of(
                gradients,
                zero=memory.stage,
                scope=memory.scope,
                staged=memory.staged,
                only_modules_read=options.private_parameters,
                gates=gates,
                cores=runtime.cores,
            )
            beside = parameters_beside(model, optimizer)
            self.averager = average_gradients(model, optimizer, group, asked)
        except BaseException:
            self._unhook()
            raise
        self._hooks += [
            before_step(optimizer, self._clip_in_step),
            after_step(optimizer, self._end_step),
        ]
        if group.rank == 0:
            self._hooks.append(before_step(optimizer, telling_of_eval_mode(model)))
        self.averager.at_close.append(self._unhook)

        # A checkpoint holds the state of training, and what the user registers.
        state = whole_training_state(
            self.averager, model, optimizer, self.collectives, self.scaler, divided=options.divided
        )
        owned = not options.divided or group.rank == 0
        own = bool(memory.stage) or gradients.average_every > 1 or gradients.reduction == "adasum"
        more = {"copied": options.background, "owned": owned, "own_gradients": own}
        more["scaled"] = self.scaler is not None and self.scaler.dynamic
        self.registered = Registered(group, optimizer, model, beside, **more)
        self._hooks += self.registered.hooks
        self._same_data = SameData(group)
        state = replace(state, extra=Together([state.extra, self.registered, self._same_data]))
        try:
            self.checkpoints = Checkpoints(Path(directory), self.collectives, state, options.policy)
        except HpcTrainError:  # the same one on all ranks
            self.averager.close()
            raise

        # `mean` and `evaluate` have a communicator of their own. On a shared one, a rank that calls
        # `mean` too often would take numbers of other agreements for the mean.
        self._calls = group.duplicate()
        self._start_watchdog()

    def epochs(
        self,
        dataset: Any,
        *,
        batch: int,
        epochs: int,
        seed: int = 0,
        shuffle: bool | Literal["full"] = True,
        accumulate: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield each epoch's number, from 1, and this rank's batches of the epoch. Collective.

        Iterate over each epoch's batches to their end, or call `stop`. If a rank leaves the loop by
        `break` or `return`, all ranks must. The steps that were taken are then saved in the next
        call of this loop, or at the end of the program. Samples are put together by `collate_fn`
        (by default torch's `default_collate`), or by the data set's `fetch`. The random generators
        of torch, NumPy and Python are seeded for each step and rank, so that a resumed loop draws
        what an uninterrupted one would. The data set draws the same on any number of ranks.

        Args:
            dataset: map-style, as torch's DataLoader takes it, or with `fetch` (see `Loader`); the
                same on all ranks.
            batch: samples per step over the whole job. It must be divisible by the number of ranks
                times `accumulate`, unless the loop has the option `micro_tokens`.
            epochs: number of passes over the data set. Each has one step per whole batch.
            seed: seed of the sample order, which does not depend on the number of ranks.
            shuffle: whether each epoch has a new order; otherwise all have the data set's own. For
                "full" see `SampleOrder.of`.
            accumulate: number of micro-batches that make a step's batch. Each has its own backward
                pass (`backward`); the step is taken after the last one: `if loop.step_due`.
            collate_fn: puts a list of samples together, as `collate_fn` of torch's DataLoader.

        Raises:
            ConfigError: the batch does not fit the ranks or the data, a file STOP was in the
                directory before the start, or the directory is the folder of a data set.
            UserError: the ranks passed different arguments, an epoch was not run to its end, or
                some ranks have left the loop and others have not.
            ClaimError: another job writes to the directory.
            Stopped: SIGTERM, SIGUSR1, SIGUSR2, a file STOP or the time limit stopped the loop,
                with a checkpoint.
        """
        self._check_open()
        self._check_not_replaced()
        self._end()
        self._begun = True
        with agreed(self.group):
            reader = Reader(dataset, self._reading, collate_fn)
        self._running = self._epochs(reader, batch, epochs, seed, shuffle, accumulate)
        return Held(self._running, self._dropped)

    def _epochs(
        self,
        reader: Reader,
        batch: int,
        epochs: int,
        seed: int,
        shuffle: bool | Literal["full"],
        accumulate: int,
    ) -> Generator[tuple[int, Iterator[Any]]]:
        """Check the arguments, restore the newest checkpoint, and deliver the epochs."""
        dataset, ahead = reader.dataset, self.options
        load = partial(Loader, prefetch=ahead.prefetch, workers=ahead.workers)
        with agreed(self.group):
            check_integer("batch", batch, least=1)
            check_integer("epochs", epochs, least=0)
            order = SampleOrder.of(dataset, batch, seed=seed, shuffle=shuffle)
            seed = order.seed  # as a plain integer
            most = self.options.micro_tokens
            parts, lengths = parts_of_loop(
                *(dataset, order, self.group, self.optimizer), accumulate=accumulate, most=most
            )
            last = epochs * order.steps_per_epoch
            self.options.profile.check(self.group.size, last)
        self.checkpoints.identity |= {
            "batch": batch,
            "seed": seed,
            "shuffle": shuffle,
            "number of samples": order.samples,
            **order.identity,
        }
        what = "what the loop was given (data set, batch, epochs, seed ...)"
        given = repr(
            (order.samples, order.identity, batch, epochs, seed, shuffle, accumulate, lengths)
        )
        same(self.group, what, given, "give all ranks the same")
        check_may_start(self.group, self.checkpoints.directory)
        self.registered.check_optimizers()
        self.averager.expect(accumulate if most is None else MANY_PASSES)
        with (
            claimed_by_job(
                self.group, self.checkpoints.directory, self.options.hang_timeout
            ) as claim,
            self._watched(),
            closing(self._stop_requests()) as stop,
            finishing_saves(self.checkpoints),
            self._until_end(),
            telling_of_outsiders(self.registered.parameters_known),
            ExitStack() as ending,
        ):
            self.checkpoints.claim = claim
            self._same_data.compare(reader, copied=self.options.workers > 0)
            done = self._given = self._taken = self.checkpoints.resume()
            keep_lost_records(self.group, self.checkpoints.directory, done)
            with agreed(self.group):
                loader = load(reader, order, parts, first_step=done + 1, last_step=last)
                loader.counted = self.options.counted
                loader.pinned = self._device_type == "cuda"
            directory = self.checkpoints.directory
            nodes = self.group.total(self._runtime.node.rank == 0)
            # As `mean`, a record uses the communicator of the program's calls.
            costs = RunCosts(replace(self._runtime, world=self._calls), nodes, saved=False)
            ending.enter_context(costs.counting(directory))
            report = ending.enter_context(
                reporting(self.group, directory, done, last, claim, shown=False, spent=costs.now)
            )
            device = next(self.checkpoints.state.model.parameters()).device
            records = LoopRecords(self._runtime, self.optimizer, device, report, order, costs)
            self._records = records
            self._requests = stop
            stop.enough, self._enough = self._enough, False
            try:
                yield from self._delivered(self._batches(loader, stop, seed, records), order, last)
            except GeneratorExit:
                if not stop.enough and report.ending[0] == "finished":
                    left = ("stopped", "the program left the loop")
                    error = ("failed", "the program ended with an error")
                    report.ending = error if self._failed else left
                if self._failed:
                    self.checkpoints.finish()
                else:
                    self._leave()
            finally:
                self._records = None
                report.last_step = self._taken
                loader.close()
                if not self._failed:  # what the program does now may take any time
                    Heartbeat(self.group).tell(self._taken, 0.0)

    def stop(self) -> None:
        """End training after this step, with a checkpoint, as if it were the last step.

        It is enough if one rank calls it. A call before `epochs` ends that without a step. A loop
        that is started again resumes from the checkpoint.
        """
        if self._requests is not None:
            self._requests.enough = True
        elif not self._begun:
            self._enough = True

    def close(self) -> None:
        """Release what the loop holds, after a last checkpoint if it was left early. Collective.

        The optimizer and the model stay, with all parameters and the optimizer's state if they fit.
        Another loop may be made.

        Raises:
            UserError: other ranks have not left the loop.
            CheckpointError: the last checkpoint could not be written.
        """
        self._close()

    def _release(self) -> None:
        self.checkpoints.close()
        with keeping_divided(self.averager, self._runtime, failed=self._failed):
            self.averager.close()
        batch_norms.release(self.checkpoints.state.model, self.collectives)
        self._calls.close()

    def register(self, name: str, thing: Registrable) -> None:
        """Let checkpoints hold an object's state, and `epochs` restore it. Collective.

        Any object with `state_dict` and `load_state_dict` can be registered: learning-rate
        schedulers, averaged models (EMA), torch's GradScaler, metrics. If one of them changes the
        optimizer's learning rate, the options of the optimizer's groups are restored as well.
        Otherwise they stay as the program sets them.

        Args:
            name: letters, digits, _ and -; the same in the next start. A warning names objects that
                the checkpoint lacks, and saved ones that are no longer registered.
            thing: the object. Its state may hold numbers, strings, None, tensors, and lists,
                tuples, sets, dicts and Counters of those, and is the same on all ranks.

        Raises:
            UserError: the state holds another type (the message has its path) or differs on a rank
                (the message names it); this is checked again after the first step and at each
                checkpoint. Or `epochs` was called before.
        """
        self._check_open()
        with self._watched():
            with agreed(self.group, "loop.register"):
                if self._begun:
                    raise UserError(
                        f"loop.register({name!r}, ...) was called after loop.epochs",
                        "register it before: loop.epochs restores what is registered",
                    )
            self.registered.add(name, thing)
        if isinstance(thing, Optimizer):
            if self.registered.trains_model(thing):
                self._count_steps_of(thing)
                self.averager.follow(thing)
            self.checkpoints.hold_back(thing)

    def record(self, **values: torch.Tensor | float) -> dict[str, float]:
        """Write a record of this step to metrics.jsonl in the loop's directory. Collective.

        It has the step and its epoch, the mean of each value over the ranks, the learning rate,
        what was measured since the last record, and what the run has cost: samples per second,
        seconds per step and those of them that were waits, memory, node-hours, and joules if they
        can be read. `hpc-train report` and trackers read it. Call it inside of
        the loop, once per step or more seldom: `if loop.step_number % 10 == 0`.

        Args:
            values: numbers, or tensors with one element, such as loss=loss.

        Returns:
            The mean of each value, the same on all ranks.

        Raises:
            UserError: it was called outside of the loop or twice in a step, a name is one of a
                record's own, or the ranks gave different names.
        """
        self._check_open()
        with self._watched():
            self._settle()
            if self._records is None:
                raise UserError(
                    "loop.record was called outside of the loop", "call it after a batch"
                )
            return self._records.write(self._calls, self._given, values)

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean of a number, or of a tensor with one element, over the ranks. Collective.

        Raises:
            UserError: a rank has given something else; on all ranks.
        """
        with self._watched():
            self._settle()
            return mean_of(self.group if self._closed else self._calls, value)

    def evaluate(
        self,
        dataset: Any,
        per_sample: PerSample,
        *,
        batch: int = 64,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> float | dict[str, float]:
        """The mean of `per_sample` over all samples, the same on all ranks. Collective.

        Each rank computes its part of the samples, without gradients. Any number of samples will
        do. The loop's model and registered modules are in eval mode meanwhile. Training then
        continues as if nothing had been evaluated, with one exception. State that differs between
        ranks becomes its mean on all of them, as at a checkpoint: parameters with local steps
        (average_every), and running statistics of "local" BatchNorm layers. Other buffers become
        those of rank 0.

        Args:
            dataset: map-style, the same on all ranks.
            per_sample: a function of a batch, as the data set returns it. It returns a tensor of
                shape (samples,), or a dict of such tensors. It must not call a collective, because
                ranks call it different numbers of times. Its random draws depend on the number of
                ranks; those of the data set do not.
            batch: samples that the whole job computes at a time.
            collate_fn: as for `epochs`.

        Returns:
            The mean, or a dict of means by name. Sums are made in float64.

        Raises:
            ConfigError: the data set is empty, or `batch` is less than 1.
            UserError: `per_sample` returned something else on a rank, or arguments differ.
            RankError: `per_sample` or the data set has failed on some rank.
        """
        self._check_open()
        with self._watched():
            self._settle()
            with agreed(self._calls, "loop.evaluate"):
                reader = Reader(dataset, self._reading, collate_fn)
            with self._unlimited():
                models, alike = self._in_one_state(), self.options.memory.zero == 3
                over = partial(evaluate, alike=alike, compared_sizes=self._compared_sizes)
                return over(self._calls, reader, per_sample, batch, models)

    def _in_one_state(self) -> list[nn.Module]:
        """The modules to evaluate, after they were made the same on all ranks. Collective."""
        if self.options.gradients.average_every > 1:
            self.checkpoints.finish()  # a save must not see parameters change
            self.averager.settle()
        model = self.checkpoints.state.model
        batch_norms.average_statistics(model, self.collectives)
        self.checkpoints.unify_buffers()
        return [model, *self.registered.modules]
