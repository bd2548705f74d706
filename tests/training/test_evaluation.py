"""Evaluations whose result depends on the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.training.loop import Loop


@pytest.mark.mpi
@pytest.mark.parametrize("tracks", [False, True])
def test_layers_that_take_the_statistics_of_a_part_of_the_batch_are_told(
    job, together, caplog, tracks
):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=tracks))
    loop = Loop(job, together, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        loop.evaluate(TensorDataset(torch.ones(16, 2)), lambda batch: model(batch[0]).sum(1))
    loop.close()
    told = [r for r in caplog.records if "layer 1 has no running statistics" in r.message]
    assert len(told) == (not tracks and job.world.rank == 0 and job.world.size > 1)
