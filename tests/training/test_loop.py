"""A user's own loop on several ranks, against one rank; stopped and resumed."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from hpc_train.config import GradientsSection
from hpc_train.data import Mixture
from hpc_train.errors import CheckpointMismatch, ConfigError, RankError, Stopped, UserError
from hpc_train.launch.protocol import DEADLINE, PROGRESS, read_progress
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.cases import cases

EPOCHS, BATCH, SAMPLES = 3, 12, 62  # five steps per epoch, two samples left over
ENGINES = ["mpi", *(["horovod"] if runtime.horovod_built() else [])]


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.abs().argmax(1) % 3)


def mixture():
    """The same samples in two data sets. One gives most samples of every step."""
    inputs, targets = data().tensors
    parts = [TensorDataset(inputs[part], targets[part]) for part in (slice(20), slice(20, None))]
    return Mixture([(parts[0], 3), (parts[1], 1)])


def train(started, directory, engine="mpi", stop_at=None, dropout=0.0, dataset=None, **more):
    """Train; returns the steps' mean losses and the final weights."""
    torch.manual_seed(started.world.rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Dropout(dropout), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = LoopOptions(gradients=GradientsSection(engine=engine), every=4, keep=0, **more)
    loop = Loop(started, directory, model, optimizer, options)
    seen = []
    for epoch, batches in loop.epochs(dataset or data(), batch=BATCH, epochs=EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            loop.step()
            seen.append((epoch, loop.mean(loss)))
            if stop_at == len(seen) and started.world.rank == started.world.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
        torch.rand(7)  # what a user does between epochs must not change a resumed run
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


def alone():
    return Runtime(Group(), Group())


def test_each_micro_batch_draws_other_numbers(tmp_path):
    model = torch.nn.Linear(5, 3).double()
    drawn = []
    with Loop(alone(), tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)) as loop:
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=1, accumulate=3):
            for inputs, targets in batches:
                drawn.append(torch.rand(()).item())
                cross_entropy(model(inputs), targets).backward()
                if loop.step_due:
                    loop.step()
    assert len({*drawn}) == len(drawn) == 15


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES, ids="engine-{}".format)
def test_any_number_of_ranks_gives_the_same_losses(job, together, engine, tmp_path):
    many, weights = train(job, together / engine, engine)
    one, reference = train(alone(), tmp_path / "one")
    assert (
        [epoch for epoch, _ in many] == [epoch for epoch, _ in one] == [1] * 5 + [2] * 5 + [3] * 5
    )
    assert [loss for _, loss in many] == pytest.approx([loss for _, loss in one], rel=1e-12)
    for mine, other in zip(weights, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.mpi
def test_a_mixture_gives_the_same_losses_and_goes_on_where_it_stopped(job, together, tmp_path):
    one, _ = train(alone(), tmp_path / "one", dataset=mixture())
    with pytest.raises(Stopped):
        train(job, together / "cut", stop_at=7, dataset=mixture())
    many, _ = train(job, together / "cut", dataset=mixture())
    assert [loss for _, loss in many] == pytest.approx([loss for _, loss in one[7:]], rel=1e-12)
    told = r"shares of the mixture \[0.75, 0.25\].*: set the weights of the mixture back, or start"
    with pytest.raises(CheckpointMismatch, match=told):
        train(job, together / "cut", dataset=Mixture([(one, 1) for one in mixture().datasets]))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_weights_are_refused(job, together):
    dataset = Mixture([(data(), 1), (data(), 1 + job.world.rank)])
    with pytest.raises(UserError, match=r"rank 1 .*what the loop was given \(data set, batch"):
        train(job, together / "run", dataset=dataset)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "stop_at", [5, 14, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 10))]
)
def test_a_stopped_loop_goes_on_bit_for_bit(job, together, stop_at):
    whole, weights = train(job, together / "whole", dropout=0.3)
    with pytest.raises(Stopped, match=f"by SIGUSR1 after step {stop_at}"):
        train(job, together / "cut", stop_at=stop_at, dropout=0.3)
    rest, resumed = train(job, together / "cut", dropout=0.3)
    assert rest == whole[stop_at:]
    assert all(torch.equal(mine, other) for mine, other in zip(resumed, weights, strict=True))


def test_the_launcher_gives_a_program_any_time_after_its_loop(tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress.json"))
    train(alone(), tmp_path / "run")
    assert read_progress(tmp_path / "progress.json", "-0")[:2] == (15, 0.0)


def test_the_last_step_has_a_checkpoint_and_a_finished_loop_nothing_to_do(tmp_path):
    seen, weights = train(alone(), tmp_path)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert [int(name[5:14]) for name in names] == [4, 8, 12, 15]
    again, resumed = train(alone(), tmp_path)
    assert (len(seen), len(again)) == (15, 0)
    assert all(torch.equal(mine, other) for mine, other in zip(resumed, weights, strict=True))


def test_the_margin_before_the_jobs_end_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv(DEADLINE, str(time.time() + 1000))
    with pytest.raises(UserError, match="is over before the first step"):
        train(alone(), tmp_path, end_margin=1000)
    with pytest.raises(UserError, match="end_margin is -1"):
        train(alone(), tmp_path, end_margin=-1)
    assert train(alone(), tmp_path)[0]


class Damaged(torch.utils.data.Dataset):
    """Samples that can be read up to the third batch."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= 3 * BATCH:
            raise KeyError("damaged")
        return data()[index]


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["sample", "evaluation"])
def test_an_error_in_data_or_evaluation_loses_no_finished_step(job, together, where):
    model = torch.nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def failing(batch):
        if job.world.rank == job.world.size - 1:
            raise KeyError("damaged")
        return torch.ones(len(batch[0]))

    loop = Loop(job, together, model, optimizer, LoopOptions(every=1000))
    dataset = Damaged() if where == "sample" else data()
    with pytest.raises((RankError, KeyError), match="damaged"), loop:
        for _, batches in loop.epochs(dataset, batch=BATCH, epochs=1, shuffle=False):
            for inputs, targets in batches:
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                if where == "evaluation" and loop.step_number == 3:
                    loop.evaluate(data(), failing)
    assert [path.name for path in together.glob("*.safetensors")] == ["step-000000003.safetensors"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dataset", cases({"damaged": Damaged(), "sound": data()}, later=["sound"]))
def test_a_block_that_some_ranks_leave_early_ends_on_all(job, together, dataset):
    model = torch.nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program():
        with Loop(job, together, model, optimizer) as loop:
            for _, batches in loop.epochs(dataset, batch=BATCH, epochs=1, shuffle=False):
                for inputs, targets in batches:
                    optimizer.zero_grad()
                    cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                    if loop.step_number == 3 and job.world.rank == 0:
                        return

    with pytest.raises(UserError, match="left the loop before its end"):
        program()
    assert not [*together.glob("*.safetensors")]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["data", "break"])
def test_ranks_that_go_different_ways_are_told_and_not_left_waiting(job, together, kind):
    model = torch.nn.Linear(5, 3).double()
    loop = Loop(job, together, model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = 48 + 12 * job.world.rank if kind == "data" else 48
    dataset = torch.utils.data.Subset(data(), range(min(samples, SAMPLES)))
    message = "differs from that of rank 0" if kind == "data" else "left before its end"
    if kind == "data" and job.world.size == 1:
        return
    with pytest.raises(UserError, match=message):
        for _, batches in loop.epochs(dataset, batch=12, epochs=2):
            next(batches)


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES, ids="engine-{}".format)
def test_two_backward_passes_give_the_mean_of_both(job, together, engine):
    model = torch.nn.Linear(2, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = LoopOptions(gradients=GradientsSection(engine=engine))
    loop = Loop(job, together, model, optimizer, options)
    before = model.weight.detach().clone()
    for value in (1.0, 3.0):
        inputs = torch.full((1, 2), value + job.world.rank, dtype=torch.float64)
        (model(inputs).sum() / 2).backward()
    loop.step()
    mean = 2 + (job.world.size - 1) / 2
    torch.testing.assert_close(model.weight.detach(), before - mean)


@pytest.mark.mpi
def test_a_gradient_that_the_user_throws_away_is_gone(job, together):
    model = torch.nn.Linear(5, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = Loop(job, together, model, optimizer)
    before = model.weight.detach().clone()
    model(torch.full((1, 5), 1e6, dtype=torch.float64)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    loop.step()
    torch.testing.assert_close(model.weight.detach(), before - 1)


@pytest.mark.mpi
def test_a_batch_that_the_ranks_cannot_share_is_refused(job, together):
    model = torch.nn.Linear(5, 3).double()
    loop = Loop(job, together, model, torch.optim.SGD(model.parameters(), lr=0.1))
    if job.world.size > 1:
        with pytest.raises(ConfigError, match="is not divisible by"):
            next(iter(loop.epochs(data(), batch=13, epochs=1)))
