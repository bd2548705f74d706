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
