from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime

pytestmark = pytest.mark.mpi(min_size=2)

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
ADASUM = {"engine": "horovod", "reduction": "adasum"}


def failure_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  # a test that fails must let the other ranks go on
        return str(error)
    return "none"


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "options",
    [{"average_every": 3}, {"zero": 1}, pytest.param(ADASUM, marks=needs_horovod)],
    ids=str,
)
def test_torchs_scaler_is_refused_on_all_ranks(job, options, fused):
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    options = AveragingOptions(**options, hang_timeout=20)
    averager = average_gradients(model, optimizer, job.world, options)
    scaler = torch.amp.GradScaler("cpu")
    inputs = torch.ones(4, 3).double() * (math.inf if job.world.rank == 1 else 1.0)
    scaler.scale(model(inputs).square().mean()).backward()
    failure = failure_of(lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    model(torch.ones(4, 3).double()).square().mean().backward()
    without = failure_of(lambda: torch.amp.GradScaler("cpu", enabled=False).step(optimizer))
    averager.close()
    assert "torch's GradScaler looks at each rank's own gradients" in failure
    assert without == "none"
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused
