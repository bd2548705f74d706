"""The memory of the training state, against the formulas of ZeRO."""

from __future__ import annotations

import pytest

from hpc_train.planning import state
from hpc_train.planning.state import Dividing, state_bytes

STAGES = [100.0, 40.0, 40.0, 40.0, 20.0]
WHOLE = sum(STAGES)


@pytest.mark.parametrize(
    ("zero", "scope", "parameters", "gradients", "moments"),
    [
        (0, "all", 1, 1, 1),
        (1, "node", 1 / 2, 1, 1 / 2),
        (1, "all", 1 / 2, 1, 1 / 8),
        (2, "node", 1 / 2, 1 / 2, 1 / 2),
        (2, "all", 1 / 2, 1 / 8, 1 / 8),
        (3, "node", 1 / 2, 1 / 2, 1 / 2),
    ],
)
def test_stages_of_zero_on_four_nodes_of_two(zero, scope, parameters, gradients, moments):
    pool = 4 * 10 if zero > 1 else 0
    found = state_bytes(STAGES, 2, Dividing(zero=zero, scope=scope, nodes=4, ranks=2, bucket=10))
    assert found.parameters == parameters * WHOLE
    assert found.gradients == pytest.approx(gradients * WHOLE + pool)
    assert found.optimizer == pytest.approx(2 * moments * WHOLE)
    assert found.total == found.parameters + found.gradients + found.optimizer


def test_stage_3_has_a_nodes_chunks_and_two_stages():
    by = Dividing(zero=3, nodes=4, ranks=2, bucket=10)
    found = state_bytes(STAGES, 2, by)
    assert found.parameters == pytest.approx((WHOLE / 4 + 140 * 3 / 4) / 2)
    assert found.optimizer == 2 * WHOLE / 8


def test_only_stage_3_divides_what_is_not_trained():
    frozen, by = [0.0, 60.0, 60.0, 60.0], {"nodes": 4, "ranks": 2, "bucket": 10}
    found = {zero: state_bytes(STAGES, 2, Dividing(zero=zero, **by), frozen) for zero in (2, 3)}
    assert found[2].parameters == WHOLE / 2 + 180
    assert found[3].parameters == pytest.approx(((WHOLE + 180) / 4 + 200 * 3 / 4) / 2)
    for zero in (2, 3):
        alone = state_bytes(STAGES, 2, Dividing(zero=zero, **by))
        assert found[zero].optimizer == alone.optimizer
        assert found[zero].gradients == alone.gradients


def test_a_node_keeps_its_sum_over_the_passes():
    by = Dividing(zero=2, nodes=4, ranks=2, passes=3, bucket=10)
    assert state_bytes(STAGES, 2, by).gradients == WHOLE / 2 + 40


@pytest.mark.parametrize("zero", [1, 2])
def test_a_gpu_has_staged_parameters_and_the_node_has_the_rest(zero, monkeypatch):
    monkeypatch.setattr(state, "GRADIENTS_ON_GPU", 30)
    frozen, by = [0.0, 60.0, 60.0, 60.0], {"zero": zero, "nodes": 4, "ranks": 2, "bucket": 10}
    found = state_bytes(STAGES, 2, Dividing(staged=True, **by), frozen)
    divided = state_bytes(STAGES, 2, Dividing(**by))
    assert found.total == divided.total, "what is not trained has no copy on the host"
    assert found.on_gpu == WHOLE + 180 + 30 + 100
    assert divided.on_gpu == 0
    monkeypatch.setattr(state, "GRADIENTS_ON_GPU", 1 << 20)
    assert state_bytes(STAGES, 2, Dividing(staged=True, **by)).on_gpu == 2 * WHOLE
