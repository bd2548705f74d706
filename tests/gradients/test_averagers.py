"""Both engines against a reference in one process that sees all samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi
SAMPLES, PASSES, STEPS = 24, 2, 4

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")


class Model(nn.Module):
    """Has what averaging must get right: a shared, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.frozen(self.second(self.first(x).tanh()).tanh()))


def trained(group: Group, engine: str, optimizer_class, *, plain_zero_grad=False, bucket_bytes=256):
    """The model after some steps on all samples, cut over the group's ranks and two passes."""
    torch.manual_seed(group.rank)  # all but rank 0's weights are to be replaced
    model = Model().double()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    averager = average_gradients(
        model, optimizer, group, engine=engine, bucket_bytes=bucket_bytes, backward_passes=PASSES
    )
    data = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(STEPS):
        (optimizer if plain_zero_grad else averager).zero_grad()
        for part in data.chunk(group.size)[group.rank].chunk(PASSES):
            ((model(part[:, :6]) - part[:, 6:]).square().mean() / PASSES).backward()
        averager.average()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        averager.step()
    averager.close()
    return model


def assert_same(model, reference):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_engine_mpi_equals_one_process(group, optimizer_class, bucket_bytes):
    if not group:
        return
    reference = trained(Group(), "mpi", optimizer_class)
    model = trained(group, "mpi", optimizer_class, bucket_bytes=bucket_bytes)
    assert_same(model, reference)


@needs_horovod
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_engine_horovod_equals_one_process_and_engine_mpi(job, optimizer_class):
    reference = trained(Group(), "mpi", optimizer_class)
    assert_same(trained(job.world, "horovod", optimizer_class), reference)
    assert_same(trained(job.world, "mpi", optimizer_class), reference)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_the_optimizers_own_zero_grad_will_do(job, engine):
    reference = trained(Group(), "mpi", torch.optim.SGD)
    model = trained(job.world, engine, torch.optim.SGD, plain_zero_grad=True)
    assert_same(model, reference)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_step_averages_if_nobody_did(job, engine):
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(model, optimizer, job.world, engine=engine)
    start = model.weight.item()
    averager.zero_grad()
    (model.weight.sum() * job.world.rank).backward()
    averager.step()
    assert start - model.weight.item() == pytest.approx((job.world.size - 1) / 2)
    averager.close()


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_the_plain_optimizer_keeps_the_state(job, engine):
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.AdamW(model.parameters())
    averager = average_gradients(model, optimizer, job.world, engine=engine)
    averager.zero_grad()
    model(torch.ones(1, 2).double()).sum().backward()
    averager.step()
    assert all("exp_avg" in optimizer.state[parameter] for parameter in model.parameters())
    averager.close()


def test_ranks_with_different_models_are_told_and_not_left_waiting(job):
    model = nn.Linear(2, 2 + job.world.rank)
    if job.world.size > 1:
        with pytest.raises(UserError, match="the model .* differs from that of rank 0"):
            average_gradients(model, torch.optim.SGD(model.parameters()), job.world)


def test_gradients_are_views_of_the_buckets_after_averaging(job):
    model = nn.Linear(2, 2).double()
    averager = average_gradients(
        model, torch.optim.SGD(model.parameters()), job.world, engine="mpi"
    )
    averager.zero_grad()
    model(torch.ones(1, 2).double()).sum().backward()
    averager.average()
    if job.world.size > 1:
        flats = {flat.untyped_storage().data_ptr() for flat in averager.sums.flats}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == flats
    averager.close()
