"""What compression has not sent yet, when parameters come or go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.collectives import connect
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from tests.system.test_same import levels_of

pytestmark = pytest.mark.mpi(min_size=4)


def owed(averager, model, world):
    """The residuals of all ranks together, by parameter."""
    sums, found = averager.sums, {}
    for name, parameter in model.named_parameters():
        found[name] = whole = torch.zeros(parameter.numel(), dtype=torch.float64)
        for number, residual in sums.compressor.residuals.items():
            first, last = sums.division.part(number)
            for other, begin, end in sums.buckets[number].ranges():
                low, high = max(begin, first), min(end, last)
                if other is parameter and low < high:
                    whole[low - begin : high - begin] += residual[low - first : high - first]
        connect(world).sum_(whole)
    return found


def step(model, averager, rank):
    averager.optimizer.zero_grad()
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).double()
    model(inputs).square().mean().backward()
    averager.optimizer.step()


@pytest.mark.parametrize(
    ("nodes", "compression"),
    [((0, 0, 1, 1), "topk:0.1"), ((0, 0, 0, 1), "powersgd:1"), ((0, 1, 2, 3), "topk:0.1")],
    ids=str,
)
def test_it_is_kept_when_a_layer_is_unfrozen_and_another_one_frozen(job, nodes, compression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 6)).double()
    model[0].requires_grad_(False)
    levels = levels_of(job.world, nodes)
    options = AveragingOptions(engine="mpi", compression=compression, bucket_bytes=300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(model, optimizer, levels, options)
    for _ in range(3):
        step(model, averager, job.world.rank)
    before = owed(averager, model, job.world)
    assert before["1.weight"].any()
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    averager.refresh()
    after = owed(averager, model, job.world)
    for name in ("1.weight", "1.bias"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-13, atol=0)
    assert not any(after[f"{layer}.weight"].any() for layer in (0, 2))
    step(model, averager, job.world.rank)
    assert job.world.largest(averager.sums.compressor.steps) == 4
    averager.close()
    levels.close()
