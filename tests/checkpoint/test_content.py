"""What the content of checkpoints keeps in memory."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints, TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group


def test_a_second_resume_frees_the_optimizers_state_of_the_first(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = Checkpoints(tmp_path, connect(Group()), TrainingState(model, optimizer))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoints.save(1)
    old = weakref.ref(optimizer.state[model.weight]["exp_avg"])
    checkpoints.resume()
    gc.collect()
    assert old() is None
