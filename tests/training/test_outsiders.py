"""Optimizers that step in a loop which was never given what they train."""

from __future__ import annotations

import pytest
import torch
from torch.optim import optimizer as of_torch

from hpc_train.gradients import average_gradients
from hpc_train.mpi.group import Group
from tests.training.test_loop_mistakes import make
from tests.training.test_loop_options import BATCH, data, sgd


@pytest.mark.parametrize("way", ["forgotten", "registered", "averaged"])
def test_an_optimizer_of_what_the_loop_lacks_is_told_once(tmp_path, caplog, way):
    model, optimizer, loop = make(tmp_path)
    critic = torch.nn.Linear(3, 1).to(next(model.parameters()).dtype)
    others = [sgd(critic.parameters()) for _ in range(2)]
    if way == "registered":
        loop.register("critic", critic)
    if way == "averaged":
        average_gradients(critic, others[0], Group())
    for _, batches in loop.epochs(data(), batch=BATCH, epochs=1):
        for inputs, _ in batches:
            critic(model(inputs)).square().mean().backward()
            for one in (optimizer, *others):
                one.step()
                one.zero_grad()
    loop.close()
    told = caplog.text.count("an optimizer (SGD) steps 2 parameters that the loop's model lacks")
    assert told == (way == "forgotten")
    assert not of_torch._global_optimizer_pre_hooks
