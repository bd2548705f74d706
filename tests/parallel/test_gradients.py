"""Gradients of a layout: sums over ranks that share parameters, and comparisons between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_train.collectives import connect
from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.topology import discover
from hpc_train.parallel.gradients import LayoutGradients
from tests.cases import cases
from tests.system.test_same import levels_of

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("small", [0, 1 << 18])
def test_gradients_of_any_layout_in_memory_are_completed(job, monkeypatch, small):
    monkeypatch.setattr("hpc_train.parallel.gradients.SMALL", small)
    rank, seeded = job.world.rank, torch.Generator().manual_seed(5)
    before = [torch.randn(shape, generator=seeded).double() for shape in [(3, 4), (2, 3, 4, 5), ()]]
    before[0] = before[0].T
    before[1] = before[1].to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in before]
    for parameter, one in zip(parameters, before, strict=True):
        parameter.grad = one * (rank + 1)
    alone = connect(Group())
    gradients = [parameter.grad for parameter in parameters]
    whole = LayoutGradients(
        [], parameters, [], {}, tensor=alone, embedding=connect(job.world), model=alone
    )
    whole.complete()
    ranks = sum(range(1, job.world.size + 1))
    for parameter, gradient, one in zip(parameters, gradients, before, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient, one * ranks, rtol=1e-13, atol=0)


@pytest.mark.mpi(min_size=2)
def test_a_parameter_without_a_gradient_on_all_ranks_keeps_none(job):
    unused, used = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    if job.world.rank == 0:
        used.grad = torch.ones(3)
    alone = connect(Group())
    over = connect(job.world)
    LayoutGradients([unused, used], [], [], {}, tensor=over, embedding=alone, model=over).complete()
    assert unused.grad is None
    assert used.grad.tolist() == [1.0] * 3


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_copy_that_is_not_finite_on_one_rank_is_in_the_norm_of_all(job, bad):
    counted, copy = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    parts = [(counted, torch.ones(3)), (copy, torch.ones(3))]
    averager = SimpleNamespace(parts=lambda: parts, shards=connect(Group()))
    over = connect(job.world)
    layout = LayoutGradients([], [], [counted], {}, tensor=over, embedding=over, model=over)
    assert float(layout.norm(averager)) == pytest.approx((3 * job.world.size) ** 0.5)
    if job.world.rank == job.world.size - 1:
        parts[1][1][0] = bad
    assert not layout.norm(averager).isfinite()


def compared(job, *names):
    """A layout over all ranks, and an averager, of parameters that all of them have whole."""
    parameters = [nn.Parameter(torch.ones(50, 100)) for _ in names]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    averager = average_gradients(nn.ParameterList(parameters), optimizer, Group())
    over = {"tensor": connect(job.world), "embedding": connect(Group()), "model": connect(Group())}
    alike = dict(zip(parameters, names, strict=True))
    return LayoutGradients([], [], [], alike, **over), averager, parameters


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("noise", [1e-4, 1.0])
def test_gradients_that_tensor_parallel_ranks_should_share_are_compared(job, noise):
    layout, averager, parameters = compared(job, "between.weight", "outside.weight")
    for factor in (0.0, 1 + noise * job.world.rank):  # the first step may say nothing
        layout.check_alike(averager, [])
        averager.zero_grad()
        sum(p.sum() * f for p, f in zip(parameters, (factor, 2.0), strict=True)).backward()
        averager.average()
    if noise < 1 or job.world.rank == 0:  # the others compare with rank 0
        layout.check_alike(averager, [])
    else:
        with pytest.raises(UserError, match="the gradient of between.weight differs"):
            layout.check_alike(averager, [])
    averager.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("exact", "noise", "fits"),
    [(True, 1e-3, True), (True, 0.1, False), (False, 0.01, True), (False, 0.1, False)],
)
def test_losses_that_tensor_parallel_ranks_should_share_are_compared(job, exact, noise, fits):
    layout, averager, (parameter,) = compared(job, "outside.weight")
    parameter.sum().backward()
    averager.average()  # gradients for whose comparison ranks wait, and so do not miss each other
    losses = [torch.tensor(2.0), torch.tensor(1 + 3 * noise * (job.world.rank > 0))]
    if fits or job.world.rank == 0:
        layout.check_alike(averager, losses, exact=exact)
    else:
        with pytest.raises(UserError, match=r"the loss differs between the ranks of parallel\.tp"):
            layout.check_alike(averager, losses, exact=exact)
    averager.close()


DIVISIONS = cases(
    {
        "zero 0": {"zero": 0},
        "zero 1": {"zero": 1},
        "zero 1 all": {"zero": 1, "scope": "all"},
        "zero 2": {"zero": 2},
    },
    later=["zero 2"],
)


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("options", DIVISIONS)
def test_ranks_that_have_other_rows_and_buckets_compare_whole_gradients(job, options, nodes):
    grid = ParallelGrid.build(job.world, discover(job.world, job.node), dp=2, tp=2)
    place, world = grid.coordinate, job.world
    levels = levels_of(grid.data, tuple(nodes[rank] for rank in grid.data.gathered(world.rank)))
    model = nn.ParameterList(nn.Parameter(torch.ones(n, 5).double()) for n in (9, 7, 2000, 3))
    options = AveragingOptions(
        engine="mpi",
        bucket_bytes=(300, 1000)[place.tp],  # as if each data group had measured its own
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(model, optimizer, levels, options)
    alone, over = connect(Group()), connect(grid.tensor)
    alike = {p: name for name, p in model.named_parameters()}
    errors = []
    for wrong in (None, "2"):
        layout = LayoutGradients([], [], [], alike, tensor=over, embedding=alone, model=alone)
        averager.zero_grad()
        factors = [torch.linspace(1, 2, p.numel()).double().view(p.shape) for p in alike]
        if wrong is not None and place.tp:
            factors[int(wrong)][1000:] = 0  # rows that one rank of zero has not
        sum((p * f).sum() for p, f in zip(alike, factors, strict=True)).backward()
        averager.average()
        try:
            layout.check_alike(averager, [])
        except UserError as error:
            errors.append(str(error))
    averager.close()
    levels.close()
    grid.close()
    assert len(errors) == place.tp
    assert all("the gradient of 2 differs" in error for error in errors)
