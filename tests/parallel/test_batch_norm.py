"""BatchNorm over the samples of all ranks, against one process that has them all."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpc_train.collectives import connect
from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.parallel import batch_norm

pytestmark = pytest.mark.mpi


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def build(momentum):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.BatchNorm2d(3, affine=False),
        nn.Flatten(),
        nn.Linear(48, 5, bias=False),
        Activated(5, track_running_stats=False),
        nn.Linear(5, 2),
    ).double()


def pictures(step, shift):
    return torch.randn(12, 2, 8, 8, generator=torch.Generator().manual_seed(step)).double() + shift


def squares(model, batch):
    return model(batch).square().mean()


def steepness(model, batch):
    """A gradient penalty, as of a discriminator."""
    outputs = model(batch.requires_grad_())
    (slopes,) = torch.autograd.grad(outputs.square().sum(), batch, create_graph=True)
    return outputs.square().mean() + slopes.square().sum() / len(batch)


def train(model, batch_of, optimizer, loss):
    for step in range(4):
        optimizer.zero_grad()
        loss(model, batch_of(step)).backward()
        optimizer.step()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("shift", "loss"), [(0.0, squares), (50.0, squares), (0.0, steepness), (50.0, steepness)]
)
def test_statistics_gradients_and_buffers_are_those_of_one_process(group, momentum, shift, loss):
    model = build(momentum)
    batch_norm.set_up_batch_norm(model, connect(group), "sync")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = average_gradients(model, optimizer, group)
    train(model, lambda step: pictures(step, shift).chunk(group.size)[group.rank], optimizer, loss)
    averager.close()
    expected = build(momentum)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    train(expected, lambda step: pictures(step, shift), optimizer, loss)
    for (name, mine), theirs in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10, msg=name)


def test_a_layer_stays_a_batch_norm_and_copies_are_plain(job):
    model = build(0.1)
    batch_norm.set_up_batch_norm(model, over := connect(job.world), "sync")
    assert isinstance(model[1], nn.BatchNorm2d)
    twin = copy.deepcopy(model).eval()
    assert type(twin[1]) is nn.BatchNorm2d
    x = pictures(0, 0.0)
    assert type(twin[7]) is Activated
    assert torch.equal(twin[:7](x), model.eval()[:7](x))
    kept = model[1].forward  # as the wrapper of a block keeps it
    batch_norm.release(model, over)
    assert type(model[1]) is nn.BatchNorm2d
    y = model[0](x)
    assert torch.equal(kept(y), model[1](y))


def domains(over):
    """Two layers, one for each kind of samples."""
    model = nn.ModuleList(nn.BatchNorm1d(width) for width in (3, 5)).double()
    batch_norm.set_up_batch_norm(model, over, "sync")
    return model


def bend(x, y):
    """Compute gradients of a loss that has a gradient in it."""
    (slopes,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (y.pow(3).sum() + slopes.square().sum()).backward()


def test_a_rank_without_samples_adds_nothing(job):
    over, rank = connect(job.world), job.world.rank
    model, x = domains(over), torch.randn(4, 3).double()
    mine = x.clone()[: 4 if rank == 0 else 0].requires_grad_()
    y = model[0](mine)
    bend(mine, y)
    alone, whole = nn.BatchNorm1d(3).double(), x.clone().requires_grad_()
    expected = alone(whole)
    bend(whole, expected)
    if rank == 0:
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(mine.grad, whole.grad)
    torch.testing.assert_close(model[0].running_var, alone.running_var)


@pytest.mark.mpi(min_size=2)
def test_ranks_of_which_only_some_create_a_graph_are_refused(job):
    model = domains(connect(job.world))
    loss = model[0](torch.randn(4, 3).double().requires_grad_()).square().sum()
    with pytest.raises(UserError, match="the ranks do not all compute BatchNorm layer"):
        loss.backward(create_graph=job.world.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_a_transform_of_torch_func_is_refused(job):
    model = domains(connect(job.world))
    x = torch.randn(4, 3).double()
    with pytest.raises(UserError, match=r"layer 0 needs the samples of all ranks.*autograd\.grad"):
        torch.func.grad(lambda x: model[0](x).square().sum())(x)
    model.eval()
    assert torch.func.grad(lambda x: model[0](x).square().sum())(x).any()


@pytest.mark.mpi
def test_a_model_in_bfloat16_has_statistics_in_float32(job):
    over = connect(job.world)
    model = domains(over).bfloat16()
    y = model[0](torch.randn(8, 3).bfloat16())
    y.square().sum().backward()
    assert y.dtype == model[0].weight.grad.dtype == torch.bfloat16


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backward", [False, True])
def test_ranks_in_different_layers_are_refused(job, backward):
    over = connect(job.world)
    model = domains(over)
    layer = model[job.world.rank % 2]
    x = torch.randn(4, layer.num_features).double()
    if backward:  # the others are in the backward pass of the first layer
        y = model[0](torch.randn(4, 3).double().requires_grad_())
        call = partial(model[1], torch.randn(4, 5).double()) if job.world.rank else y.sum().backward
    else:
        call = partial(layer, x)
    with pytest.raises(UserError, match="do not all compute BatchNorm layer"):
        call()


class Frozen(nn.BatchNorm1d):
    """Keeps its statistics in training, until it is released."""

    frozen = True

    def forward(self, x):
        if self.frozen:
            return F.batch_norm(x, self.running_mean, self.running_var, eps=self.eps)
        return super().forward(x)


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_is_frozen_in_training_takes_statistics_of_all_ranks_later(job):
    model = nn.Sequential(Frozen(3))
    batch_norm.set_up_batch_norm(model, over := connect(job.world), "sync")
    x = torch.full((2, 3), float(job.world.rank))
    first = model(x)
    model[0].frozen = False
    later = model(x)
    batch_norm.release(model, over)
    torch.testing.assert_close(first, x / (1 + 1e-5) ** 0.5)
    var, mean = torch.var_mean(torch.arange(job.world.size) * 1.0, correction=0)
    torch.testing.assert_close(later, (x - mean) / (var + 1e-5) ** 0.5)


class ByItself(nn.BatchNorm1d):
    """Computes as torch's own layer does, and does not call it."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_takes_its_own_statistics_is_refused(job):
    model, x = nn.Sequential(nn.Identity(), ByItself(3)), torch.randn(4, 3)
    batch_norm.set_up_batch_norm(model, connect(job.world), "sync")
    with pytest.raises(UserError, match=r"layer 1, a ByItself, .* let its forward call super\(\)"):
        model(x)
    assert model.eval()(x).shape == x.shape


def test_evaluation_asks_nobody(job):
    """Ranks may evaluate unlike numbers of batches."""
    model = build(0.1)[:7]
    batch_norm.set_up_batch_norm(model, over := connect(job.world), "sync")
    model.eval()
    for _ in range(job.world.rank):
        model(pictures(0, 0.0))
    batch_norm.release(model, over)


def test_local_statistics_are_averaged_before_they_are_saved(job):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    collectives = connect(job.world)
    batch_norm.set_up_batch_norm(model, collectives, "local")
    model[0](torch.full((2, 3), float(job.world.rank)) + torch.arange(2.0)[:, None])
    batch_norm.average_statistics(model, collectives)
    mean = 0.1 * ((job.world.size - 1) / 2 + 0.5)
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), mean))


@pytest.mark.mpi(min_size=2)
def test_a_model_with_such_layers_can_be_refused(job):
    with pytest.raises(UserError, match="1 is a BatchNorm layer, and batch_norm is refuse"):
        batch_norm.set_up_batch_norm(build(0.1), connect(job.world), "refuse")
    foreign = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.raises(UserError, match="SyncBatchNorm, which needs torch.distributed"):
        batch_norm.set_up_batch_norm(foreign, connect(job.world), "sync")


def test_what_couples_samples_or_draws_is_named(job, caplog):
    caplog.set_level("INFO")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(3))
    model[3].requires_grad_(False).eval()  # it keeps its statistics
    resting = nn.Sequential(nn.Dropout(0.1)).eval()
    batch_norm.set_up_batch_norm(resting, connect(job.world), "sync")
    assert "dropout masks" not in caplog.text
    batch_norm.set_up_batch_norm(model, connect(job.world), "sync")
    if job.world.rank == 0 and job.world.size > 1:
        assert "those of all ranks' samples (layer 0, 1 in all)" in caplog.text
        assert "each rank draws its own dropout masks (layer 1, 1 in all)" in caplog.text
