"""What a layer that ranks share does not take."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.mpi.group import Group
from hpc_train.parallel.linear import ParallelLinear


def test_outputs_that_were_reshaped_by_the_inputs_sizes_are_told():
    weight, over = Parameter(torch.zeros(16, 8)), AloneCollectives(Group(0, 2))
    layer = ParallelLinear(weight, None, "rowwise", over, cut=True)
    with pytest.raises(UserError, match=r"rowwise Linear\(16, 16\) takes 8 .* gets \[4, 5, 16\]"):
        layer(torch.zeros(4, 5, 16))
