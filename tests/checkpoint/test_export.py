"""Weights for other programs: names of tied tensors, and what is beside tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpc_train.checkpoint import Checkpoints, TrainingState
from hpc_train.checkpoint.export import export_model
from hpc_train.collectives import connect
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group


class Scaled(nn.Linear):
    """With a number beside its tensors."""

    scale = 1

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = Scaled(3, 5)
        self.head.weight = self.embedding.weight


@pytest.fixture
def model():
    made = Tied()
    made.head.scale = 3
    return made


@pytest.fixture
def saved(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Checkpoints(tmp_path / "run", connect(Group()), TrainingState(model, optimizer))
    return made.save(1)


def test_a_model_takes_its_state_dict_with_what_modules_keep_beside_tensors(tmp_path, model, saved):
    export_model(saved, tmp_path / "model.pt")
    other = Tied()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert other.head.scale == 3
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("patterns", [{"include": ["head.*"]}, {"exclude": ["embedding.*"]}])
def test_a_tied_tensor_has_the_names_that_are_chosen(tmp_path, model, saved, suffix, patterns):
    target = tmp_path / f"model{suffix}"
    export_model(saved, target, **patterns)
    is_pt = suffix == ".pt"
    got = torch.load(target, weights_only=True) if is_pt else load_file(target)
    extra = {"head._extra_state"} if is_pt else set()
    assert got.keys() == {"head.weight", "head.bias"} | extra
    assert torch.equal(got["head.weight"], model.embedding.weight)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_refused(tmp_path, saved, option):
    with pytest.raises(ConfigError, match=f"--{option}: the model has no tensor haed"):
        export_model(saved, tmp_path / "model.pt", **{option: ["head.*", "haed.*"]})
