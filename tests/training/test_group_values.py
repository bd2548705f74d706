"""State that an optimizer keeps in its groups, in itself or in another optimizer."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.group_values import GroupValues
from hpc_train.training.loop import Loop


class Counting(torch.optim.SGD):
    """Keeps its state in its groups, as Prodigy and Schedule-Free do."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group |= {"k": 0, "seen": [0, None], "sum": 0.0}
        self.defaults["mode"] = self.param_groups[0]["mode"] = "train"

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["seen"][0] += group["k"]
            group["sum"] = group["sum"] + torch.tensor(0.5, dtype=torch.float64)
            group["lr"] = 0.1 / group["k"] / float(group["sum"])
        loss = super().step(closure)  # it calls the hooks of a step, too
        self.param_groups[0]["last"] = self.param_groups[0]["k"]
        return loss


class Slow(torch.optim.Optimizer):
    """Has another optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "times": 3}


def train(started, folder, make, *, stop_at=0, among=None, seen=lambda optimizer: None):
    """Returns the weights and the optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = make(model.parameters())
    inputs = torch.randn(24, 3, dtype=torch.float64)
    with Loop(started, folder, model, optimizer) as loop:
        if among:
            loop.register("inner", among(optimizer))
        for _, batches in loop.epochs(TensorDataset(inputs), batch=12, epochs=4):
            for (batch,) in batches:
                optimizer.zero_grad()
                (model(batch) - 1).square().mean().backward()
                optimizer.step()
                seen(optimizer)
                if loop.step_number == stop_at:
                    loop.stop()
    return model.weight.detach(), optimizer


def alone():
    return Runtime(Group(), Group())


def test_what_an_optimizer_keeps_in_its_groups_goes_on(tmp_path):
    def make(parameters):
        return Counting(parameters, lr=0.1)

    whole, _ = train(alone(), tmp_path / "whole", make)
    train(alone(), tmp_path / "cut", make, stop_at=5)
    weights, resumed = train(alone(), tmp_path / "cut", make)
    assert torch.equal(weights, whole)
    group = resumed.param_groups[0]
    assert (group["k"], group["last"], group["seen"], float(group["sum"])) == (8, 8, [36, None], 4)


def test_what_no_step_changes_stays_the_programs_choice(tmp_path):
    def leave_training(optimizer):
        optimizer.param_groups[0] |= {"mode": "eval", "momentum": 0.5}

    def make(parameters, **options):
        return Counting(parameters, lr=0.1, **options)

    train(alone(), tmp_path, make, stop_at=5, seen=leave_training)
    _, resumed = train(alone(), tmp_path, lambda p: make(p, momentum=0.8, weight_decay=0.1))
    group = resumed.param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.8, 0.1)
    assert group["mode"] == "eval"  # which only the optimizer itself sets


def test_the_state_of_an_optimizer_inside_of_another_is_told_or_goes_on(tmp_path, caplog):
    def make(parameters):
        return Slow(torch.optim.Adam(parameters, lr=0.1))

    whole, _ = train(alone(), tmp_path / "whole", make)
    told = "Slow has another optimizer in its attribute 'inner', whose state a resumed run lacks"
    assert told in caplog.text
    caplog.clear()
    for stop_at in (5, 0):
        weights, optimizer = train(
            alone(), tmp_path / "cut", make, stop_at=stop_at, among=lambda one: one.inner
        )
    assert torch.equal(weights, whole)
    assert optimizer.inner.param_groups is optimizer.param_groups
    assert "another optimizer" not in caplog.text
    assert "state_dict() of Slow also returns 'times', which a resumed run lacks" in caplog.text


@pytest.mark.mpi(min_size=2)
def test_groups_that_differ_between_ranks_are_told_and_left_out(job, together, caplog):
    def differ(optimizer):
        optimizer.param_groups[0]["last"] += job.world.rank

    train(job, together, lambda p: Counting(p, lr=0.1), seen=differ, stop_at=5)
    told = "Counting keeps 'k', 'last', 'lr', 'seen', 'sum' in its param_groups, which differs"
    assert (told in caplog.text) == (job.world.rank == 0)
    _, resumed = train(job, together, lambda p: Counting(p, lr=0.1))
    assert resumed.param_groups[0]["k"] == 3, "it is not in the checkpoint"


class Odd(torch.optim.Optimizer):
    """Takes options as they come, fails at times, and keeps values of odd types."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, {"learning_rate": 0.1, **options})
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of memory")
        self.param_groups[0] |= {"n": np.int64(self.calls), "odd": torch.Generator()}


def test_options_of_an_odd_optimizer_stay_the_programs_choice(tmp_path, caplog):
    values = GroupValues(Odd([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    group = values.optimizer.param_groups[0]
    for _ in range(3):
        values.before_step()
        with suppress(RuntimeError):
            values.optimizer.step()
            values.after_step()
        group["lr"] /= 2  # by the program
    assert values.present() == [{"n": 3}]
    assert values.unsaved == {"odd"}
