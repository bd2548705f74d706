"""The loss scale against torch's rule; clipping under it; steps that all ranks skip."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_train.errors import HpcTrainError
from hpc_train.gradients import LossScaler, average_gradients, scaling
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.scaling import BACKOFF, GROWTH, INITIAL_SCALE, clip_factor, clip_gradients
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

several = pytest.mark.mpi
needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
ENGINES = ["mpi", pytest.param("horovod", marks=needs_horovod)]


class Averager:
    """Records what it is told."""

    def __init__(self, norm=1.0):
        self.value, self.factors, self.units, self.steps = norm, [], [], 0

    def average(self):
        pass

    def norm(self):
        return torch.tensor(self.value, dtype=torch.float64)

    def scale_(self, factor):
        self.factors.append(factor)

    def rescale(self, factor):
        self.units.append(factor)

    def step(self):
        self.steps += 1


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_follows_torchs_rule(good):
    scaler, interval = LossScaler(), 5
    scale, tracker = torch.tensor(INITIAL_SCALE), torch.tensor(0, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "GOOD_STEPS", interval)
        for each in good:
            scaler.step(Averager(1.0 if each else math.inf))
            found = torch.tensor(0.0 if each else 1.0)
            torch._amp_update_scale_(scale, tracker, found, GROWTH, BACKOFF, interval)
            assert (scaler.scale, scaler.good_steps) == (scale.item(), tracker.item())
    assert scaler.skipped_steps == good.count(False)


def test_the_averager_hears_of_a_new_scale(monkeypatch):
    """What compression has not sent yet is in the old one."""
    monkeypatch.setattr(scaling, "GOOD_STEPS", 2)
    scaler, averager = LossScaler(), Averager()
    for norm in (1.0, 1.0, math.nan, 1.0):
        averager.value = norm
        scaler.step(averager)
    assert averager.units == [2.0, 0.5]


def test_constants_are_those_of_torch():
    theirs = torch.amp.GradScaler("cpu")
    assert theirs.get_scale() == INITIAL_SCALE
    assert theirs.get_growth_factor() == GROWTH
    assert theirs.get_backoff_factor() == BACKOFF
    assert theirs.get_growth_interval() == scaling.GOOD_STEPS


def test_a_scale_that_nothing_stops_stays_finite(monkeypatch):
    monkeypatch.setattr(scaling, "GOOD_STEPS", 1)
    scaler = LossScaler()
    for _ in range(200):
        assert scaler.step(Averager(0.0))
    assert scaler.scaled(torch.tensor(1e3)).isfinite()


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_bfloat16_skips_and_counts_without_a_scale(norm):
    scaler, averager = LossScaler(torch.bfloat16), Averager(norm)
    assert not scaler.step(averager)
    assert (averager.steps, averager.factors) == (0, [])
    averager.value = 1.0
    assert scaler.step(averager)
    assert (averager.steps, averager.factors) == (1, []), "nothing to undo: no pass over them"
    assert (scaler.scale, scaler.skipped_steps) == (1.0, 1)
    assert scaler.describe() == "its gradients are not finite (1 skipped so far)"


def test_unscaling_and_clipping_are_one_factor():
    scaler, averager = LossScaler(), Averager(8 * INITIAL_SCALE)
    assert clip_gradients(averager, 2.0, scaler) == 8
    assert averager.factors == [pytest.approx(2 / 8 / INITIAL_SCALE)]
    averager.value = INITIAL_SCALE
    assert clip_gradients(averager, 2.0, scaler) == 1
    assert averager.factors[1:] == [1 / INITIAL_SCALE]


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.7, 0.8, 3.0, math.inf, math.nan])
def test_the_clip_factor_is_torchs(norm):
    parameter = nn.Parameter(torch.ones(()).double())
    parameter.grad = torch.ones(()).double()
    nn.utils.clip_grads_with_norm_([parameter], 0.8, torch.tensor(norm, dtype=torch.float64))
    found = torch.tensor(clip_factor(norm, 0.8), dtype=torch.float64)
    torch.testing.assert_close(found, parameter.grad, rtol=1e-15, atol=0, equal_nan=True)
    assert clip_factor(norm, 0.0) == 1


def test_a_float16_loss_is_scaled_beyond_what_float16_holds():
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    scaled = LossScaler().scaled(loss)
    assert scaled.item() == 3 * INITIAL_SCALE
    assert LossScaler().scaled(loss.double()).dtype is torch.float64


def test_a_hundred_skipped_steps_in_a_row_are_an_error_of_all_ranks():
    scaler = LossScaler()
    for _ in range(99):
        assert not scaler.step(Averager(math.nan))
    assert scaler.step(Averager())
    for _ in range(99):
        assert not scaler.step(Averager(math.nan))
    with pytest.raises(HpcTrainError, match="100 steps in a row .* lower optimizer.lr") as caught:
        scaler.step(Averager(math.nan))
    assert caught.value.agreed
    assert scaler.skipped_steps == 199


def test_the_loss_scalers_state_is_restored_exactly():
    scaler = LossScaler()
    for norm in (1.0, math.nan, math.inf, 1.0, 1.0, math.nan, 1.0):
        scaler.step(Averager(norm))
    found = LossScaler()
    found.load_state_dict(scaler.state_dict())
    assert vars(found) == vars(scaler)
    assert (found.scale, found.good_steps, found.skipped_steps) == (INITIAL_SCALE / 8, 1, 3)


def test_the_state_of_another_type_tells_the_count_only():
    other = LossScaler(torch.bfloat16)
    other.step(Averager(math.nan))
    scaler = LossScaler()
    scaler.load_state_dict(other.state_dict())
    assert (scaler.scale, scaler.skipped_steps, scaler.skipped_in_a_row) == (INITIAL_SCALE, 1, 0)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def mean_square(module, rank, ranks, step):
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
    mine = x.chunk(ranks)[rank]
    return (module(mine[:, :6]) - mine[:, 6:]).square().mean()


@several
@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_under_a_scale_is_clipping_without_one(job, engine):
    """A scale is a power of two: not a bit of the gradients may change."""
    group, found = job.world, []
    for scaler in (LossScaler(torch.float16), LossScaler(torch.bfloat16)):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        averager = average_gradients(module, optimizer, group, AveragingOptions(engine=engine))
        for step in range(3):
            averager.zero_grad()
            scaler.scaled(mean_square(module, group.rank, group.size, step)).backward()
            assert scaler.step(averager, clip_norm=0.1)
        averager.close()
        found.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        mean_square(reference, 0, 1, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    for a, b in zip(found[0], reference.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach())


@several
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(job, engine, value):
    group, module = job.world, model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    averager = average_gradients(module, optimizer, group, AveragingOptions(engine=engine))
    scaler, taken = LossScaler(), []
    for step in range(4):
        before = deepcopy(list(module.parameters()))
        averager.zero_grad()
        loss = mean_square(module, group.rank, group.size, step)
        if step == 2 and group.rank == group.size - 1:
            loss = loss * value
        scaler.scaled(loss).backward()
        taken.append(scaler.step(averager, clip_norm=1.0))
        same = [torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
        assert all(same) if step == 2 else not any(same)
    averager.close()
    assert taken == [True, True, False, True]
    assert scaler.scale == INITIAL_SCALE / 2


def test_a_loop_of_ones_own_in_three_lines():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averager = average_gradients(module, optimizer, Group(), AveragingOptions(engine="mpi"))
    losses = []
    scaler = LossScaler(torch.float16)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mean_square(module, 0, 1, 0)
        scaler.scaled(loss).backward()
        scaler.step(averager, clip_norm=1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.dtype is torch.float32 for p in module.parameters())
    averager.close()
