"""An optimizer that the user has wrapped by hvd.DistributedOptimizer, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built"),
]
STEPS = 4


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def loss(model: nn.Module, step: int, rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    data = torch.randn(6, 4, generator=generator).double()
    return (model(data[:, :3]) - data[:, 3:]).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def plain(ranks: int, passes: int = 1, clip: float = 0.0) -> nn.Module:
    """What one process gets that computes the losses of all ranks."""
    model = build(0)
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            for number in range(passes):
                (loss(model, step, rank, number) / passes / ranks).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.fixture
def hvd(job):
    return runtime.start_horovod(job.world)


def wrapped(hvd, job, passes=1, before=lambda optimizer: None):
    """A model that starts with another rank's weights, its wrapped optimizer, and the averager."""
    model = build(seed=job.world.rank)
    optimizer = hvd.DistributedOptimizer(
        adamw(model), model.named_parameters(), backward_passes_per_step=passes
    )
    before(optimizer)
    return model, optimizer, average_gradients(model, optimizer, job.world)


def test_gradients_are_averaged_once_per_step(job, hvd):
    calls = []

    def count(optimizer):
        synchronize = optimizer.synchronize
        optimizer.synchronize = lambda: (calls.append(1), synchronize())

    model, optimizer, averager = wrapped(hvd, job, before=count)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # Horovod's takes no argument
        loss(model, step, job.world.rank).backward()
        (averager if step % 2 else optimizer).step()
    averager.close()
    assert_same(model, plain(job.world.size))
    assert len(calls) == STEPS or job.world.size == 1


def test_passes_that_horovod_was_told_of(job, hvd):
    model, optimizer, averager = wrapped(hvd, job, passes=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(3):
            (loss(model, step, job.world.rank, number) / 3).backward()
        optimizer.step()
    averager.close()
    assert_same(model, plain(job.world.size, passes=3))


@pytest.mark.parametrize("by", ["averager", "Horovod's documentation", "no skip_synchronize"])
def test_clipping_sees_the_mean(job, hvd, by, recwarn):
    model, optimizer, averager = wrapped(hvd, job)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, job.world.rank).backward()
        if by == "averager":
            averager.average()
            averager.scale_(min(1.0, 0.1 / (float(averager.norm()) + 1e-6)))
            optimizer.step()
            continue
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if by == "no skip_synchronize":
            optimizer.step()
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    averager.close()
    assert_same(model, plain(job.world.size, clip=0.1))


@pytest.mark.parametrize("by", ["average", "synchronize", "norm"])
@pytest.mark.parametrize("drop", ["optimizer", "model"])
def test_a_step_given_up_after_averaging(job, hvd, by, drop):
    model, optimizer, averager = wrapped(hvd, job)
    for step in range(STEPS):
        loss(model, step + 10, job.world.rank).backward()
        {"average": averager.average, "norm": averager.norm}.get(by, optimizer.synchronize)()
        (optimizer if drop == "optimizer" else model).zero_grad()
        loss(model, step, job.world.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    averager.close()
    assert_same(model, plain(job.world.size))


def test_closed_after_averaging_it_averages_again(job, hvd):
    model, optimizer, averager = wrapped(hvd, job)
    loss(model, 10, job.world.rank).backward()
    averager.average()
    averager.close()
    optimizer.zero_grad()
    for step in range(STEPS):
        loss(model, step, job.world.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, plain(job.world.size))


def test_other_operations_and_frozen_parameters_are_refused(job, hvd):
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    model = build(0)
    added = hvd.DistributedOptimizer(adamw(model), model.named_parameters(), op=hvd.Sum)
    refused("its op is not hvd.Average", lambda: average_gradients(model, added, job.world))
    model = build(0)
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(adamw(model), model.named_parameters())
    model.requires_grad_(True)
    refused("were frozen, when it was", lambda: average_gradients(model, optimizer, job.world))


def test_it_is_horovods_alone_again_afterwards(job, hvd):
    model, optimizer, averager = wrapped(hvd, job)
    for step in range(STEPS):
        if step == 2:
            averager.close()
        optimizer.zero_grad()
        loss(model, step, job.world.rank).backward()
        optimizer.step()
    assert_same(model, plain(job.world.size))


def refused(match, call):
    with pytest.raises(UserError, match=match):
        call()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "mpi"}, "engine mpi"),
        ({"compression": "fp16"}, "compression"),
        ({"average_every": 2}, "average_every"),
        ({"zero": 1}, "zero"),
        ({"two_level": "on"}, "two_level"),
        ({"engine": "horovod", "reduction": "adasum"}, "reduction adasum"),
    ],
)
def test_what_horovod_would_not_do_is_refused(job, hvd, options, name):
    model = build(0)
    optimizer = hvd.DistributedOptimizer(adamw(model), model.named_parameters())
    refused(
        f"an optimizer that Horovod has wrapped does not work with {name}",
        lambda: average_gradients(model, optimizer, job.world, AveragingOptions(**options)),
    )


def test_adasum_and_closures_are_refused(job, hvd):
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    model = build(0)
    adasum = hvd.DistributedOptimizer(adamw(model), model.named_parameters(), op=hvd.Adasum)
    refused("Adasum", lambda: average_gradients(model, adasum, job.world))
    model, optimizer, averager = wrapped(hvd, job)
    refused("takes no closure", lambda: optimizer.step(lambda: loss(model, 0, job.world.rank)))
    averager.close()


def test_parameters_that_horovod_does_not_know_are_an_error(job, hvd):
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    model, optimizer, averager = wrapped(hvd, job)
    more = nn.Parameter(torch.zeros(3).double())
    optimizer.add_param_group({"params": [more]})
    loss(model, 0, job.world.rank).backward()
    refused("Horovod does not average their gradients", optimizer.step)
    averager._synchronize()
    averager.close()


def test_ranks_that_take_different_steps_are_told(job, hvd):
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    model, optimizer, averager = wrapped(hvd, job)
    loss(model, 0, job.world.rank).backward()
    with pytest.raises(UserError, match="the ranks take different steps: rank 0 .* averages"):
        if job.world.rank == 1:
            averager.leave_step()
        else:
            optimizer.step()
    averager._synchronize()
    averager.close()
