"""A second optimizer of the model, which an averager of engine mpi follows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import AveragingOptions, average_gradients
from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi
SAMPLES, STEPS = 24, 5


def two_optimizers(group, way, **options):
    """The parameters after some steps of two optimizers, the second one first.

    Args:
        group: the ranks, which divide the samples.
        way: "unused": no rank uses what the second trains; else from which step on it trains more.
    """
    torch.manual_seed(0)
    first, second = model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)).double()
    scale = nn.Parameter(torch.ones(3).double())
    second.requires_grad_(way in ("unused", "added"))
    own = torch.optim.SGD(first.parameters(), lr=0.1)
    other = torch.optim.AdamW(second.parameters(), lr=0.1, weight_decay=0.5)
    averager = average_gradients(model, own, group, AveragingOptions(**options))
    averager.follow(other)
    data = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)).double()
    mine = data.chunk(group.size)[group.rank]
    try:
        for step in range(STEPS):
            if step == 2:
                second.requires_grad_(True)
                if way == "added":
                    other.add_param_group({"params": [scale]})
            own.zero_grad()
            other.zero_grad()
            alone = way == "alone" and step >= 2
            out = mine if alone else first(mine)
            (out if way == "unused" else second(out) * scale).square().mean().backward()
            other.step()
            if not alone:
                own.step()
    finally:
        averager.close()
    return [parameter.detach().clone() for parameter in (*model.parameters(), scale)]


@pytest.mark.parametrize("way", ["unused", "unfrozen", "alone", "added"])
def test_what_a_second_optimizer_trains_is_as_in_one_process(job, way):
    found = two_optimizers(job.world, way)
    for mine, expected in zip(found, two_optimizers(Group(), way), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.mpi(min_size=2)
def test_what_a_second_optimizer_unfreezes_with_zero_is_refused(job):
    with pytest.raises(UserError, match=r"1\.weight was unfrozen"):
        two_optimizers(job.world, "unfrozen", zero=1)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_freeze_other_parameters_are_told(job):
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(model, optimizer, job.world, AveragingOptions())
    model[0].requires_grad_(job.world.rank > 0)
    later = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [later]})  # so that all parameters get buckets anew
    (model[1](model[0](torch.ones(1, 2))) * later).sum().backward()
    with pytest.raises(UserError, match="the list of parameters that are trained .* differs"):
        optimizer.step()
    averager.close()
