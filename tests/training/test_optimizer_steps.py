"""Steps whose norm is looked at one step later, as on GPUs, are those of steps that wait for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.inspection import differences
from hpc_train.config.file import load
from hpc_train.errors import NotFiniteError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import assemble, optimizer_steps
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer

STEPS = 9
KEYS = {
    "run.steps": STEPS,
    "run.log_every": 4,
    "run.preflight": "false",
    "data.batch": 4,
    "optimizer.lr": 0.05,
    "memory.zero": 0,
}


@pytest.fixture
def unwaited(monkeypatch):
    """Let processors take steps as GPUs do."""

    def asked(config, optimizer, device):
        return optimizer_steps.is_unwaited(config, optimizer, torch.device("cuda"))

    monkeypatch.setattr(assemble, "is_unwaited", asked)


def trained(folder, model=None, *, bad=(), group=Group(), **more):  # noqa: B008
    """A trainer that has taken its steps; the loss of those in `bad` is infinite."""
    words = [w for k, v in {**KEYS, **more, "run.dir": folder}.items() for w in (f"--{k}", str(v))]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    steps = []

    def loss(module, batch):
        steps.append(batch)
        factor = math.inf if len(steps) in bad else 1.0
        return (module(batch[0]) - batch[1]).square().mean() * factor

    trainer = Trainer(load(None, words), TrainingTask(model, data, loss), Runtime(group, group))
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [0.1, 1e9])
def test_weights_are_those_of_steps_that_wait(tmp_path, monkeypatch, optimizer, dtype, limit):
    more = {"optimizer.name": optimizer, "precision.dtype": dtype, "optimizer.clip_norm": limit}
    expected = trained(tmp_path / "waits", **more)
    monkeypatch.setattr(assemble, "is_unwaited", lambda *_: True)
    found = trained(tmp_path / "unwaited", **more)
    assert expected.assembly.steps.unwaited is None
    assert found.assembly.steps.unwaited is not None
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-5, atol=1e-7)


def test_what_is_logged_does_not_change_the_bits(tmp_path, unwaited):
    seldom = trained(tmp_path / "seldom", **{"optimizer.clip_norm": 0.1})
    often = trained(tmp_path / "often", **{"optimizer.clip_norm": 0.1, "run.log_every": 1})
    assert seldom.assembly.steps.unwaited is not None
    assert torch.equal(weights(seldom), weights(often))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("bad", [(1, 2), (6,), (7, 8), (STEPS,)])
def test_16_bit_steps_that_are_not_finite_are_skipped(tmp_path, unwaited, optimizer, bad, caplog):
    more = {"precision.dtype": "bfloat16", "optimizer.name": optimizer}
    steps = trained(tmp_path / "skipped", bad=bad, **more).assembly.steps
    assert steps.unwaited is not None
    told = [line for line in caplog.messages if "skipped: " in line]
    assert [line.split(" skipped")[0] for line in told] == [f"step {one}" for one in bad]
    assert steps.scaler.skipped_steps == len(bad)
    found = torch.cat([p.detach().flatten() for p in steps.averager.trained])
    assert bool(found.isfinite().all())


def test_a_skipped_step_changes_nothing(tmp_path, unwaited):
    more = {"precision.dtype": "bfloat16", "checkpoint.every": 1, "checkpoint.keep": 9}
    trained(tmp_path, bad=(6,), **more)
    by_step = {step_of(p): p for p in find_checkpoints(tmp_path / "checkpoints", "auto")}
    unlike = {step: names_that_differ(by_step[step - 1], by_step[step]) for step in (6, 7)}
    assert not any(name.startswith(("model.", "optim.")) for name in unlike[6])
    assert any(name.startswith("optim.") for name in unlike[7])


def names_that_differ(first, second):
    return [one.name for one in differences(first, second)]


@pytest.mark.parametrize("every", [0, 1, 5])
def test_an_infinite_norm_stops_a_run_before_its_step_is_saved(tmp_path, unwaited, every):
    more = {"optimizer.clip_norm": 1.0, "checkpoint.every": every}
    with pytest.raises(NotFiniteError, match="step 6 has gradients with a norm of (inf|nan)"):
        trained(tmp_path, bad=(6,), **more)
    steps = [step_of(path) for path in find_checkpoints(tmp_path / "checkpoints", "auto")]
    assert all(step < 6 for step in steps)
    assert (5 in steps) == bool(every)


class Late(nn.Module):
    """Its only vector, which is a group of the optimizer by itself, is used later than the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.vector = nn.Linear(6, 1, bias=False), nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) + (self.vector if self.calls > 5 else 0.0)


def test_the_first_step_of_a_late_parameter_can_be_skipped(tmp_path, monkeypatch):
    """Torch's SGD would take its momentum from memory that nobody has written."""
    empty = torch.empty_like
    filled = lambda t, **how: empty(t, **how).fill_(1e9)  # noqa: E731
    ends = []
    for asked in (False, True):
        monkeypatch.setattr(assemble, "is_unwaited", lambda *_, asked=asked: asked)
        monkeypatch.setattr(torch, "empty_like", filled)
        more = {"precision.dtype": "bfloat16", "optimizer.name": "sgd", "run.log_every": 100}
        ends.append(weights(trained(tmp_path / f"unwaited-{asked}", made(), bad=(6,), **more)))
    torch.testing.assert_close(*ends)


def made():
    torch.manual_seed(0)
    return Late()


@pytest.mark.parametrize(("limit", "waits"), [(0.0, 2 * 2), (1.0, STEPS + 2)])
def test_a_step_waits_for_a_device_only_if_its_norm_or_loss_is_asked(
    tmp_path, monkeypatch, limit, waits
):
    """In the first and the last step both are asked, because they are logged."""
    asked = []
    monkeypatch.setattr(optimizer_steps.OptimizerSteps, "wait", lambda _: asked.append(1))
    trained(tmp_path, **{"optimizer.clip_norm": limit, "run.log_every": 100})
    assert len(asked) == waits


@pytest.mark.ranks(2)
def test_an_infinite_norm_of_one_rank_in_local_steps_stops_all(group, together):
    more = {"gradients.average_every": 4, "optimizer.clip_norm": 1, "run.log_every": 8}
    with pytest.raises(NotFiniteError, match="step 2 has"):
        trained(together / "run", bad=(2,) if group.rank == 1 else (), group=group, **more)
