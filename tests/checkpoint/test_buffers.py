"""Buffers that a model makes or changes in its first forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints, TrainingState
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.collectives import connect
from hpc_train.errors import CheckpointMismatch, UserError
from hpc_train.mpi.group import Group


class Late(nn.Module):
    """Its buffers come late; one takes any shape that is loaded, as torch's observers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("waves", None)
        self.register_buffer("cache", torch.zeros(1))  # state_dict leaves it out

    def forward(self, x):
        self.cache = x
        if self.mean is None:
            self.waves = torch.fft.fft(x[0].double())
            self.mean, self.seen, self.least = x.mean(0), x.sum(1), x.amin(0)
        return self.linear(x - self.mean)

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        del state[f"{prefix}cache"]

    def _load_from_state_dict(self, state, prefix, *others):
        self.least.resize_(state[f"{prefix}least"].shape)
        super()._load_from_state_dict(state, prefix, *others)


def store(directory, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpoints(directory, connect(Group()), TrainingState(model, optimizer))


def test_buffers_of_the_first_forward_pass_are_restored(tmp_path):
    model = nn.Sequential(Late())
    first = store(tmp_path, model)
    model(torch.randn(4, 3))
    first.poll()
    first.save(1)
    resumed = nn.Sequential(Late())
    again = store(tmp_path, resumed)
    assert again.resume() == 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0)
    again.poll()


def test_statistics_that_the_model_does_not_track_stay_away(tmp_path):
    store(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).save(1)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(CheckpointMismatch, match="only the checkpoint has model.1.num_batches"):
        store(tmp_path, other).resume()


def added(model):
    model.register_buffer("more", torch.ones(2))


def grown(model):
    model.queue = torch.ones(5)


def lost(model):
    model.queue = None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (added, "buffer more was not there before the first step and is float32 .2. now"),
        (grown, "buffer queue was float32 .3. before the first step and is float32 .5. now"),
        (lost, "buffer queue was float32 .3. before the first step and is None now"),
    ],
)
def test_a_buffer_that_no_start_could_restore_is_refused(tmp_path, change, line):
    model = nn.Linear(2, 2)
    model.register_buffer("queue", torch.ones(3))
    made = store(tmp_path, model)
    change(model)
    for method in (made.poll, lambda: made.save(1), made.poll):
        with pytest.raises(UserError, match=line):
            method()
    assert not find_checkpoints(tmp_path, "auto")


def test_a_buffer_that_the_first_step_makes_is_refused_also_after_a_save(tmp_path):
    model = nn.Linear(2, 2)
    made = store(tmp_path, model)
    made.save(1)
    added(model)
    with pytest.raises(UserError, match="buffer more was not there before the first step"):
        made.poll()
