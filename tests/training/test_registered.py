"""What a loop registers, where a rank has too little memory for copies of it."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from hpc_train.errors import CheckpointError
from hpc_train.training.registered import Registered


@pytest.mark.mpi
def test_a_rank_that_cannot_copy_an_average_ends_the_save_on_all_ranks(job, monkeypatch):
    """Then `checkpoint.on_error` decides whether training goes on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"copied": True, "owned": True, "own_gradients": False, "scaled": False}
    registered = Registered(job.world, optimizer, model, {}, **options)
    registered.add("ema", AveragedModel(model))

    def without_memory(tensor, **how):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB")

    with monkeypatch.context() as patch:
        if job.world.rank == job.world.size - 1:
            patch.setattr(torch.Tensor, "clone", without_memory)
        told = "no memory for copies of the registered objects of a checkpoint"
        with pytest.raises(CheckpointError, match=told):
            registered.collect()
