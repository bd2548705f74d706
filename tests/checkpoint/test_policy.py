"""Which checkpoints are kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.policy import Retention, SavePolicy
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group
from hpc_train.training.saving import daly

STEPS = st.sets(st.integers(1, 60))
SCORES = st.dictionaries(st.integers(1, 60), st.floats(0, 9))


@given(STEPS, SCORES, st.integers(1, 5), st.integers(0, 7), st.integers(0, 5))
def test_each_rule_keeps_what_it_says_and_nothing_else_is_kept(steps, scores, newest, every, best):
    gone = Retention(newest, every, best).superfluous(steps, scores)
    kept = steps - {*gone}
    of_score = sorted((scores[step], -step) for step in steps & scores.keys())
    by_rule = {*sorted(steps)[-newest:]}
    by_rule |= {step for step in steps if every and step % every == 0}
    by_rule |= {-negative for _, negative in of_score[:best]}
    assert kept == by_rule
    assert {*gone} <= steps
    assert gone == sorted(gone)


@given(STEPS, st.sets(st.integers(1, 60)), st.integers(1, 5))
def test_the_newest_finite_one_is_never_dropped(steps, finite, newest):
    asked = []

    def is_finite(step: int) -> bool:
        asked.append(step)
        return step in finite

    gone = Retention(newest).superfluous(steps, {}, is_finite)
    kept = steps - {*gone}
    assert kept == {*sorted(steps)[-newest:], *sorted(steps & finite)[-1:]}
    assert asked == sorted(asked, reverse=True)
    assert len([step for step in asked if step in finite]) <= 1


@given(STEPS, SCORES, st.integers(0, 5))
def test_without_a_number_all_are_kept(steps, scores, best):
    assert Retention(0, 0, best).superfluous(steps, scores) == []


def store(directory, policy):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpoints(directory, connect(Group()), TrainingState(model, optimizer), policy)


def test_the_best_survive_also_in_a_run_that_was_resumed(tmp_path):
    keep = SavePolicy(keep=Retention(1, 0, 2))
    made = store(tmp_path, keep)
    for step, score in enumerate((5.0, 1.0, 4.0), start=1):
        made.scores[step] = score
        made.save(step)
    again = store(tmp_path, keep)
    assert again.resume() == 3
    for step, score in enumerate((3.0, 9.0, None), start=4):
        if score is not None:
            again.scores[step] = score
        again.save(step)
    assert sorted(map(step_of, find_checkpoints(tmp_path, "auto"))) == [2, 4, 6]


def test_a_damaged_checkpoint_is_not_the_one_kept_for_its_finite_numbers(tmp_path):
    made = store(tmp_path, SavePolicy(keep=5))
    first, second = made.save(1), made.save(2)
    made.close()
    second.write_bytes(second.read_bytes()[:100])
    again = store(tmp_path, SavePolicy(keep=1, nonfinite="warn"))
    assert again.resume() == 1
    torch.nn.init.constant_(next(again.state.model.parameters()), math.nan)
    third = again.save(3)
    assert find_checkpoints(tmp_path, "auto") == [third, first]


def test_a_score_that_is_not_a_number_is_not_the_best(tmp_path):
    made = store(tmp_path, SavePolicy(keep=Retention(1, 0, 1)))
    for step, score in enumerate((math.nan, 0.1, 0.5, 0.6), start=1):
        made.scores[step] = score
        made.save(step)
    assert sorted(map(step_of, find_checkpoints(tmp_path, "auto"))) == [2, 4]


@pytest.mark.parametrize(("save", "mtbf"), [(1, 3600), (60, 86400), (300, 3600), (10, 100)])
def test_dalys_interval_loses_least(save, mtbf):
    """Against the expected time per unit of work, which is known in closed form (Daly, eq. 20)."""

    def lost(interval: float) -> float:
        return mtbf * math.expm1((interval + save) / mtbf) / interval

    best = min((lost(3 * mtbf / 1.01**n), 3 * mtbf / 1.01**n) for n in range(1000))[1]
    assert daly(save, mtbf) == pytest.approx(best, rel=0.05)


def test_daly_with_checkpoints_longer_than_the_time_between_failures():
    assert daly(300, 100) == 100
