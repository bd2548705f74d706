"""What conftest.py does for tests of several ranks: those outside of a group, and failures."""

from __future__ import annotations

import re
import sys

from tests.programs import run

SUITE = """
import pytest
from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank

@pytest.mark.ranks(2, 3)
def test_inside(group, mpi_tmp_path):
    assert RANK < group.size
    assert group.total(1) == group.size

@pytest.mark.ranks(2, everywhere=True)
def test_everywhere(group):
    assert (group is None) == (RANK == 2)

@pytest.mark.ranks(2)
def test_assertion(group):
    assert group.rank == 0

@pytest.mark.ranks(2)
def test_nothing_raised(group):
    if group.rank == 1:
        with pytest.raises(ValueError):
            pass

@pytest.mark.ranks(2)
def test_exit(group):
    raise SystemExit(group.rank)

@pytest.mark.ranks(2)
def test_skip(group):
    pytest.skip("no disk here")

@pytest.mark.ranks(4)
def test_too_many(group):
    raise AssertionError("never run")

@pytest.mark.mpi
def test_end(request):
    assert MPI.COMM_WORLD.allgather(request.session.testsfailed) == [3, 3, 3]
"""
OUTCOMES = {
    "test_inside[ranks=2]": "PASSED",
    "test_inside[ranks=3]": "PASSED",
    "test_everywhere[ranks=2]": "PASSED",
    "test_assertion[ranks=2]": "FAILED",
    "test_nothing_raised[ranks=2]": "FAILED",
    "test_exit[ranks=2]": "FAILED",
    "test_skip[ranks=2]": "SKIPPED",
    "test_too_many[ranks=4]": "SKIPPED",
    "test_end": "PASSED",
}
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
OPTIONS = ["--only-mpi", "-v", "-rN", "--color=no", "-o", "timeout=60"]


def test_a_test_that_fails_on_one_rank_fails_on_all(tmp_path):
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    done = run("mpirun", "-np", "3", *PYTEST, *OPTIONS, str(suite))
    found = dict(re.findall(r"::(\S+) (PASSED|FAILED|SKIPPED)", done.stdout))
    assert found == OUTCOMES, done.stdout + done.stderr
