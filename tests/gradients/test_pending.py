"""Promises of gradients that others look at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.slow("torch.compile loads")
@pytest.mark.parametrize("zero", [0, 1])
def test_one_rank_makes_code_while_gradients_are_promised(job, zero):
    """It does so between two backward passes of a step, and all ranks do before the next step."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = AveragingOptions(engine="mpi", zero=zero, hang_timeout=20)
        averager = average_gradients(model, optimizer, job.world, options)
        forward = torch.compile(model, backend="eager", dynamic=False) if compiled else model
        averager.zero_grad()
        for width in (2, 5 if job.world.rank == 0 else 2):
            generator = torch.Generator().manual_seed(job.world.rank)
            x = torch.randn(width, 3, generator=generator).double()
            forward(x).square().mean().backward()
        averager.step()
        with torch.no_grad():
            losses = [forward(torch.ones(7, 3).double()).sum()]
        averager.close()
        found.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
