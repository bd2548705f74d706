from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpc_train.config import RunConfig
from hpc_train.training import step_costs


@pytest.mark.mpi
def test_the_peaks_of_more_gpus_than_64_bits_hold_are_summed(job, monkeypatch):
    monkeypatch.setattr(step_costs, "peak_flops", lambda *what: 5e18)
    made = SimpleNamespace(grid=SimpleNamespace(world=job.world), flops=1.0, device="cpu")
    costs = step_costs.StepCosts(RunConfig(), made, 0)
    costs.measure_peak()
    assert costs.peak == 5e18 * job.world.size
