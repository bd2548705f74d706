"""Jobs that die while they save; `kills.py` beside it tries all calls, by hand."""

from __future__ import annotations

from random import Random

import pytest

from tests.system.checkpoint.kills import ALL, LAUNCHER, cases, try_case

RANKS, SAMPLE = 3, 1


@pytest.mark.slow("one job for each kill, and one to count the calls")
@pytest.mark.usefixtures("small_extents")
@pytest.mark.parametrize("how", [pytest.param("mpiio", marks=pytest.mark.long), "background"])
def test_a_job_that_dies_while_it_saves_leaves_one_that_is_complete(tmp_path, how):
    every = cases(RANKS, tmp_path / "counted", how)
    random = Random(0)
    tried = random.sample([case for case in every if case.who >= 0], SAMPLE)
    tried += [random.choice([case for case in every if case.who == who]) for who in (ALL, LAUNCHER)]
    for number, case in enumerate(tried):
        assert try_case(RANKS, tmp_path / str(number), case, how) in (2, 3)
