"""The loss of a micro-batch on one rank."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from hpc_train.training.batch_loss import BatchLoss


def test_stages_draw_other_dropout_and_the_first_one_that_of_no_pipeline():
    def draws(pp: int, stage: int, virtual_stage: int) -> list[float]:
        grid = SimpleNamespace(pp=pp, coordinate=SimpleNamespace(pp=stage))
        made = SimpleNamespace(grid=grid, model=nn.Identity())
        micro_batch = SimpleNamespace(part=SimpleNamespace(first=8, places=[8]))
        BatchLoss(SimpleNamespace(loss=nn.Identity()), made, 1).seed(3, micro_batch, virtual_stage)
        return torch.rand(4).tolist()

    stages = [draws(2, stage, part) for part in range(2) for stage in range(2)]
    assert stages[0] == draws(1, 0, 0)
    assert all(one not in stages[:number] for number, one in enumerate(stages))
