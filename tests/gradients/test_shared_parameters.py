"""Which modules wait for parameters that are on their way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.gradients.shared_parameters import users_of_parameters


class Shares(nn.Module):
    """A compiled block, and a head that has a layer of the block."""

    def __init__(self, *, head_first):
        super().__init__()
        block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        block.forward = torch.compile(block.forward, backend="eager")
        head = nn.ModuleDict({"layer": block[0]})
        for name, one in sorted({"block": block, "head": head}.items(), reverse=head_first):
            setattr(self, name, one)
        self.own = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("head_first", [True, False])
def test_a_layer_of_a_compiled_block_that_is_called_elsewhere_waits_too(head_first):
    model = Shares(head_first=head_first)
    found = dict(users_of_parameters(model))
    assert found.keys() == {model, model.block, model.block[0]}
    assert found[model] == [model.own]
    assert len(found[model.block]) == 4
