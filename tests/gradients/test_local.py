"""Local steps whose optimizer takes a closure, against all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions

pytestmark = pytest.mark.mpi(min_size=2)

EVERY, STEPS = 2, 6


def build():
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def lbfgs(model, rank):
    """Ranks call their closures differently often."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["max_iter"] = 2 + rank
    return optimizer


def closure_of(model, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        found = loss(model, torch.randn(8, 3, generator=generator).double())
        found.backward()
        return found

    return closure


def loss(model, inputs):
    return (model(inputs) - inputs[:, :2].sin()).square().mean()


def searched(size):
    """The parameters after local steps of all ranks in one process, and the ranks' losses."""
    models = [build() for _ in range(size)]
    losses = [[] for _ in range(size)]
    for step in range(STEPS):
        if step % EVERY == 0:
            steppers = [lbfgs(model, rank) for rank, model in enumerate(models)]
        for rank, (model, stepper) in enumerate(zip(models, steppers, strict=True)):
            losses[rank].append(
                float(stepper.step(closure_of(model, stepper, rank, step)).detach())
            )
        if (step + 1) % EVERY == 0:
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in same]).mean(0)
                for parameter in same:
                    parameter.data.copy_(mean)
    return models[0], losses


def test_closures_of_local_steps_are_each_ranks_own(job):
    rank, model = job.world.rank, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = AveragingOptions(average_every=EVERY)
    averager = average_gradients(model, optimizer, job.world, options)
    found = float(optimizer.step(closure_of(model, optimizer, rank, 0)).detach())
    averager.close()
    alone = build()
    expected = closure_of(alone, torch.optim.SGD(alone.parameters()), rank, 0)()
    assert found == pytest.approx(float(expected.detach()))


def test_local_steps_may_call_closures_differently_often(job):
    rank, model = job.world.rank, build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    options = AveragingOptions(average_every=EVERY, hang_timeout=20)
    averager = average_gradients(model, optimizer, job.world, options)
    optimizer.param_groups[0]["max_iter"] = 2 + rank
    losses = [
        float(optimizer.step(closure_of(model, optimizer, rank, step)).detach())
        for step in range(STEPS)
    ]
    averager.leave_step()
    averager.close()
    expected, expected_losses = searched(job.world.size)
    assert losses == pytest.approx(expected_losses[rank], rel=1e-9)
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-9)


def steps_of_pairs(group, count, change):
    """Two parameters, the second frozen, after local steps that differ between ranks.

    Args:
        count: how many steps.
        change: is called before each step with its number, the parameters, and the averager.
    """
    pair = [nn.Parameter(torch.ones(3).double(), requires_grad=first) for first in (True, False)]
    optimizer = torch.optim.SGD(pair, lr=0.1, momentum=0.5)
    averager = average_gradients(
        nn.ParameterList(pair), optimizer, group, AveragingOptions(average_every=EVERY)
    )
    for step in range(count):
        change(step, pair, averager)
        optimizer.zero_grad()
        sum(p.sum() for p in pair if p.requires_grad).mul(group.rank + 1).backward()
        optimizer.step()
    averager.close()
    state = [optimizer.state[p]["momentum_buffer"].tolist() for p in pair]
    return [p.tolist() for p in pair], state


def exchanged(step, pair, averager):
    """Freeze the first within a period, and train the second in its place."""
    if step == 1:
        pair[0].requires_grad_(False)
        pair[1].requires_grad_(True)


def refreshed(step, pair, averager):
    exchanged(step, pair, averager)
    if step == 1:
        averager.refresh()


def tried(step, pair, averager):
    """Train the second for one step within a period."""
    pair[1].requires_grad_(step == 0)


@pytest.mark.parametrize("change", [exchanged, refreshed, tried], ids=lambda c: c.__name__)
def test_parameters_that_were_trained_for_a_part_of_a_period_are_averaged(job, change):
    found = steps_of_pairs(job.world, 2, change)
    everyone = job.world.gathered(repr(found))
    assert len({*everyone}) == 1
    mean, (values, _) = (job.world.size + 1) / 2, found
    first = 1 - 0.1 * mean * (2.5 if change is tried else 1)
    assert values == [pytest.approx([first] * 3), pytest.approx([1 - 0.1 * mean] * 3)]


def test_replicas_are_one_after_close_also_if_a_step_failed_on_one_rank(job):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = AveragingOptions(average_every=EVERY, hang_timeout=20)
    averager = average_gradients(model, optimizer, job.world, options)
    if job.world.rank > 0:
        optimizer.step(closure_of(model, optimizer, job.world.rank, 0))
    averager.close()
    values = repr([p.tolist() for p in model.parameters()])
    assert len({*job.world.gathered(values)}) == 1


def test_the_factors_of_adafactor_are_averaged(job):
    """Rank 0 alone uses the second parameter before the mean, and all do afterwards."""
    pair = nn.ParameterList(torch.ones(2, 3).double() for _ in range(2))
    optimizer = torch.optim.Adafactor(pair.parameters(), lr=0.1)
    averager = average_gradients(pair, optimizer, job.world, AveragingOptions(average_every=EVERY))
    for _ in range(EVERY):
        optimizer.zero_grad()
        used = [*pair][: 1 if job.world.rank else 2]
        sum(p.square().sum() for p in used).mul(job.world.rank + 1).backward()
        optimizer.step()
    averager.close()
    state = [sorted(optimizer.state[p].items()) for p in pair]
    everyone = job.world.gathered(repr(state))
    sum(p.sum() for p in pair).backward()
    optimizer.step()
    assert len({*everyone}) == 1
    assert [name for name, _ in state[1]] == ["col_var", "row_var", "step"]
