"""What is known of the save before is used again, and never where something has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints, restore, routes
from hpc_train.checkpoint.catalogue import name_of
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group
from tests.checkpoint.test_store import make, store, train

pytestmark = pytest.mark.usefixtures("small_extents")


def saved(directory, step):
    tensors = restore.Tensors(directory / name_of(step))
    return {name: tensors[name] for name in tensors.names}


def found(model, optimizer):
    """What a checkpoint has to hold."""
    named = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                named[f"optim.{name}.{slot}"] = value
    return {name: value.detach().clone() for name, value in named.items()}


def frozen(model, optimizer):
    model.a.weight.requires_grad_(False)


def transposed(model, optimizer):
    """In place: the same memory, of the same shape."""
    model.b.weight.data.t_()


def channels_last(model, optimizer):
    memory = torch.empty_strided((4, 4), (1, 4), dtype=model.b.weight.dtype)
    model.b.weight.data = memory.copy_(model.b.weight.data)


def other_memory(model, optimizer):
    model.b.weight.data = model.b.weight.data * 2


def other_parameter(model, optimizer):
    optimizer.state.pop(model.b.weight)
    model.b.weight = nn.Parameter(model.b.weight.detach() * 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def another_buffer(model, optimizer):
    model.register_buffer("more", torch.arange(5))


def other_slot(model, optimizer):
    slots = optimizer.state[model.b.weight]
    slots["exp_avg"] = slots["exp_avg"] + 1


def number_in_a_slot(model, optimizer):
    optimizer.state[model.b.weight]["note"] = optimizer.state[model.b.weight].get("note", 0) + 1


CHANGES = [
    frozen,
    transposed,
    channels_last,
    other_memory,
    other_parameter,
    another_buffer,
    other_slot,
    number_in_a_slot,
]


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x):
        return self.b(self.norm(self.a(x).tanh()))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_saves_is_in_the_next_one(tmp_path, change, background):
    torch.manual_seed(0)
    model = Square()
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = store(tmp_path, model, optimizer)
    for step in range(1, 5):
        train(model, optimizer, 1, first=step)
        if step == 3:
            change(model, optimizer)
        expected = found(model, optimizer)
        checkpoints.save(step, background=background)
        train(model, optimizer, 1, first=10)
        checkpoints.finish()
        have = saved(tmp_path, step)
        assert have.keys() == expected.keys()
        assert all(torch.equal(have[name], expected[name]) for name in have)
        model.load_state_dict({n[6:]: v for n, v in expected.items() if n.startswith("model.")})
    if change is number_in_a_slot:
        values = restore.Tensors(tmp_path / name_of(4)).state()["optimizer"]
        assert values["optim.b.weight.note"] == 1


@pytest.mark.mpi
def test_a_plan_is_made_again_when_one_rank_alone_has_changed(job, together, monkeypatch):
    """All ranks have the same tensors still, one of them in other memory."""
    made = []
    real = routes.Routes

    class Counted(real):
        def __init__(self, *arguments):
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(routes, "Routes", Counted)
    model, optimizer = make()
    checkpoints = Checkpoints(together, connect(job.world), TrainingState(model, optimizer))
    for step, plans in ((1, 1), (2, 1), (3, 2), (4, 2)):
        if step == 3 and job.world.rank == job.world.size - 1:
            model.a.weight.data = model.a.weight.data.clone()
        train(model, optimizer, 1, first=step)
        checkpoints.save(step)
        assert len(made) == plans
    if job.world.rank == 0:
        other, other_optimizer = make(seed=1)
        Checkpoints(together, connect(Group()), TrainingState(other, other_optimizer)).resume()
        assert all(map(torch.equal, other.parameters(), model.parameters()))
