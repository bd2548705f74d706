"""Any layout is saved and any other loads it; `reshard.py` beside it draws them."""

from __future__ import annotations

import pytest

from tests.programs import python, run
from tests.system.checkpoint.reshard import try_many


@pytest.mark.mpi
@pytest.mark.usefixtures("small_extents")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))]
)
def test_what_some_ranks_save_in_parts_others_load_in_other_parts(job, together, seed):
    wrong = try_many(together, job.world, cases=100 if seed else 40, seed=seed)
    assert not wrong


@pytest.mark.slow("eight ranks")
def test_eight_ranks_save_and_load_in_any_parts():
    words = ["mpirun", "-np", "8", *python("-m", "tests.system.checkpoint.reshard")]
    done = run(*words, "--cases", "50", "--seed", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 cases on up to 8 ranks, 0 wrong" in done.stdout
