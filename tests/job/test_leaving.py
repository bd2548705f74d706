"""A user leaves a loop before its end: by break, stop, an exception, SystemExit."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.restore import Tensors
from hpc_train.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from hpc_train.job.preemption import StopRequests
from hpc_train.job.program import run
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions

LAST = 24  # steps: 4 epochs of 6


def alone() -> Runtime:
    return Runtime(Group(), Group())


def data():
    inputs = torch.randn(72, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Job:
    """A loop, and what it has done."""

    def __init__(self, runtime: Runtime, directory, **options) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loop = Loop(
            runtime, directory, self.model, self.optimizer, LoopOptions(**{"every": 10} | options)
        )
        self.directory = directory
        self.seen = 0
        self.weights = {0: self.weight()}

    def weight(self):
        return self.model.weight.detach().clone()

    def batches(self):
        """The batches of all epochs; this generator goes when its reader does."""
        for _, batches in self.loop.epochs(data(), batch=12, epochs=4):
            for batch in batches:
                self.seen += 1
                yield batch

    def compute(self, batch):
        self.optimizer.zero_grad()
        mse_loss(self.model(batch[0]), batch[1]).backward()

    def step(self, batch):
        self.compute(batch)
        self.loop.step()
        self.weights[self.seen] = self.weight()

    def saved(self) -> list[int]:
        return sorted(map(step_of, find_checkpoints(self.directory, "auto")))

    def check_saved(self, step: int):
        """The newest checkpoint is of that step, with the weights that it left."""
        assert self.saved()[-1] == step
        newest = Tensors(find_checkpoints(self.directory, "auto")[0])
        assert torch.equal(newest["model.weight"], self.weights[step])
        assert not [*self.directory.glob(".step-*.partial")]


@pytest.mark.parametrize("background", [False, True])
def test_a_break_after_a_step_leaves_a_checkpoint_of_it(tmp_path, background):
    job = Job(alone(), tmp_path, background=background)
    for batch in job.batches():
        job.step(batch)
        if job.seen == 17:
            break
    job.check_saved(17)
    again = Job(alone(), tmp_path)
    for batch in again.batches():
        again.step(batch)
    assert again.seen == LAST - 17


def test_a_break_before_the_step_counts_what_was_taken(tmp_path):
    job = Job(alone(), tmp_path)
    for batch in job.batches():
        if job.seen == 18:
            break
        job.step(batch)
    job.check_saved(17)


def test_a_break_of_one_epoch_is_refused_with_a_checkpoint(tmp_path):
    job = Job(alone(), tmp_path)
    with pytest.raises(UserError, match=r"left before its end; a checkpoint has step 2: .*stop"):
        for _, batches in job.loop.epochs(data(), batch=12, epochs=4):
            for batch in batches:
                job.seen += 1
                job.step(batch)
                if job.seen == 2:
                    break
    job.check_saved(2)


def test_only_steps_that_were_taken_count(tmp_path):
    """The user skips some, and takes others by the optimizer itself."""
    job = Job(alone(), tmp_path, every=3, keep=0)
    for batch in job.batches():
        if job.seen in (5, 6, 7, LAST):
            continue
        job.compute(batch)
        job.loop.averager.average()
        job.optimizer.step()
        job.weights[job.seen] = job.weight()
    assert job.saved() == [3, 4, 9, 12, 15, 18, 21, 23]
    job.check_saved(23)


@pytest.mark.parametrize("within", [True, False])
def test_stop_ends_the_loop_after_the_step_and_it_can_go_on(tmp_path, within):
    job, epochs = Job(alone(), tmp_path), []
    for epoch, batches in job.loop.epochs(data(), batch=12, epochs=4):
        epochs.append(epoch)
        for batch in batches:
            job.seen += 1
            job.step(batch)
            if within and job.seen == 8:
                job.loop.stop()
        if not within and epoch == 2:
            job.loop.stop()
    assert epochs == [1, 2]
    job.check_saved(8 if within else 12)
    again = Job(alone(), tmp_path)
    for batch in again.batches():
        again.step(batch)
    whole = Job(alone(), tmp_path / "whole")
    for batch in whole.batches():
        whole.step(batch)
    assert torch.equal(again.weight(), whole.weight())


@pytest.mark.parametrize(
    "leaving",
    [SystemExit(0), SystemExit(3), KeyError("x"), OSError(13, "denied", "x"), KeyboardInterrupt()],
    ids=repr,
)
def test_a_process_alone_that_ends_in_its_loop_has_saved(tmp_path, leaving):
    jobs = []

    def program(runtime: Runtime) -> None:
        job = Job(runtime, tmp_path, background=True)
        jobs.append(job)
        for _, batches in job.loop.epochs(data(), batch=12, epochs=4):
            for batch in batches:
                job.seen += 1
                job.step(batch)
                if job.seen == 17:
                    raise leaving

    if isinstance(leaving, KeyboardInterrupt):
        assert run(program) == EXIT_INTERRUPTED
    else:
        with pytest.raises(type(leaving)) as caught:
            run(program)
        assert caught.value is leaving
    jobs[0].check_saved(17)


def test_a_signal_before_the_loop_ends_it_before_its_first_step(tmp_path):
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    jobs = []

    def program(runtime: Runtime) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        jobs.append(Job(runtime, tmp_path))
        jobs[0].step(next(jobs[0].batches()))

    assert run(program) == EXIT_STOPPED
    assert not jobs[0].seen
    signal.signal(signal.SIGUSR2, before)


def test_an_error_within_the_optimizers_step_leaves_no_state_that_is_saved(tmp_path):
    def program(runtime: Runtime) -> None:
        job = Job(runtime, tmp_path)
        for batch in job.batches():
            job.step(batch)
            if job.seen == 12:
                job.optimizer.register_step_pre_hook(lambda *_: sys.exit())

    with pytest.raises(SystemExit):
        run(program)
    assert max(map(step_of, find_checkpoints(tmp_path, "auto"))) == 10


def test_loops_can_be_made_again_in_one_process(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    threads = {*threading.enumerate()}
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epochs in (1, 2, 3):
        with Loop(
            alone(), tmp_path, model, optimizer, LoopOptions(background=True, every=2, keep=0)
        ) as loop:
            running = loop.epochs(data(), batch=12, epochs=epochs)
            for _, batches in running:  # which is kept: nothing but `close` ends it
                for inputs, targets in batches:
                    optimizer.zero_grad()
                    mse_loss(model(inputs), targets).backward()
                    loop.step()
                if epochs == 3:
                    break
    assert {*map(step_of, find_checkpoints(tmp_path, "auto"))} >= {12, 18}
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    left = {thread.name for thread in {*threading.enumerate()} - threads if thread.is_alive()}
    assert not left - {"checkpoint_0"}
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_new_start_is_not_ended_by_the_end_of_the_one_before(tmp_path):
    job, seen = Job(alone(), tmp_path), []
    for epochs in (1, 2):
        running = job.loop.epochs(data(), batch=12, epochs=epochs)  # the former one goes only now
        for _, batches in running:
            for batch in batches:
                job.seen += 1
                job.step(batch)
        seen.append(job.seen)
    assert seen == [6, 12]


def test_a_loop_that_a_notebook_has_left_open_gives_way_to_the_next(tmp_path, caplog):
    first, second = Job(alone(), tmp_path), Job(alone(), tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    left = first.loop.epochs(data(), batch=12, epochs=4)
    _, batches = next(left)
    first.step(next(batches))
    for batch in second.batches():
        second.step(batch)
    del left
    assert "was taken over by process" in caplog.text
    second.check_saved(LAST)
    assert second.saved() == [10, 20, LAST]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.mpi
def test_ranks_that_break_together_leave_a_checkpoint(job, together):
    mine = Job(job, together, background=True)
    for batch in mine.batches():
        mine.step(batch)
        if mine.seen == 7:
            break
    mine.loop.close()
    job.world.barrier()
    mine.check_saved(7)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["both loops", "one loop", "Ctrl-C elsewhere"])
def test_a_rank_that_breaks_alone_ends_all_with_its_name(job, together, kind, monkeypatch):
    """The line also comes if a checkpoint is due after the step."""
    monkeypatch.setattr(StopRequests, "interrupted", kind == "Ctrl-C elsewhere")
    mine, odd = Job(job, together, every=3), job.world.size - 1
    with pytest.raises(UserError, match=rf"^rank {odd} \(.*\) left the loop before its end, but"):
        for _, batches in mine.loop.epochs(data(), batch=12, epochs=4):
            for batch in batches:
                mine.seen += 1
                mine.step(batch)
                if mine.seen == 3 and job.world.rank == odd:
                    break
                if mine.seen == 3 and StopRequests.interrupted:
                    signal.raise_signal(signal.SIGTERM)
            if mine.seen == 3 and kind == "both loops":
                break
        mine.loop.mean(1.0)  # the rank that has left hears of it here
    mine.loop.close()  # else the next test's loop would end it, and answer its signal
    assert not mine.saved()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["before its first batch", "after its last batch"])
def test_a_rank_that_breaks_alone_between_epochs_ends_all_with_its_name(job, together, where):
    mine, odd = Job(job, together, every=6), job.world.size - 1
    with pytest.raises(UserError, match=rf"^rank {odd} \(.*\) left the loop before its end, but"):
        for epoch, batches in mine.loop.epochs(data(), batch=12, epochs=2):
            leaves = epoch == 2 and job.world.rank == odd
            if leaves and where == "before its first batch":
                break
            for batch in batches:
                mine.step(batch)
            if leaves:
                break
        mine.loop.mean(1.0)


@pytest.mark.mpi
def test_a_rank_may_break_once_all_have_stopped(job, together):
    mine = Job(job, together)
    for _, batches in mine.loop.epochs(data(), batch=12, epochs=4):
        for batch in batches:
            mine.seen += 1
            mine.step(batch)
            mine.loop.stop()
        if job.world.rank == job.world.size - 1:
            break
    assert mine.loop.mean(float(job.world.rank)) == (job.world.size - 1) / 2
    mine.check_saved(1)


@pytest.mark.mpi
def test_one_rank_may_ask_for_the_end(job, together):
    mine = Job(job, together)
    for batch in mine.batches():
        mine.step(batch)
        if mine.seen == 5 and job.world.rank == job.world.size - 1:
            mine.loop.stop()
    job.world.barrier()
    assert mine.seen == 5
    mine.check_saved(5)
