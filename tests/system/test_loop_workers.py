"""A user's script with workers: the same samples on any number of ranks, stopped, killed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import programs

SCRIPT = str(Path(__file__).with_name("workers_program.py"))


def script(directory, *, ranks=0, workers=2, stop_at=0, deadly=-1, late=False, warm=False):
    words = [SCRIPT, str(directory), *map(str, (workers, stop_at, deadly)), *["late"] * late]
    start = ["mpirun", "-np", str(ranks)] if ranks else []
    python = programs.python(*words) if warm else [sys.executable, *words]
    return programs.run(*start, *python, environ=programs.own_server("workers"))


def batches(done):
    return re.findall(r"^batch (\w+)$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    done = script(tmp_path_factory.mktemp("alone"), workers=0)
    assert done.returncode == 0, done.stderr
    return batches(done)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_samples_of_all_ranks_are_those_of_one_without_workers(tmp_path, expected, ranks):
    stopped = script(tmp_path, ranks=ranks, stop_at=5)
    assert stopped.returncode == 75, stopped.stderr
    resumed = script(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert batches(stopped) + batches(resumed) == expected
    assert "threads" not in stopped.stdout


@pytest.mark.parametrize("late", [False, True], ids=["before MPI", "under MPI"])
def test_ranks_that_were_started_warm_have_workers_at_any_time(tmp_path, expected, late):
    done = script(tmp_path, ranks=2, warm=True, late=late)
    assert done.returncode == 0, done.stderr
    assert batches(done) == expected
    assert "threads" not in done.stdout


def test_ranks_that_were_started_cold_have_threads_instead(tmp_path, expected):
    done = script(tmp_path, ranks=2, late=True)
    assert done.returncode == 0, done.stderr
    assert batches(done) == expected
    assert "2 threads, and not by worker processes: hpc_train.start_workers()" in done.stdout


def test_a_worker_that_is_killed_ends_all_ranks_with_one_line(tmp_path):
    done = script(tmp_path, ranks=2, deadly=7)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpc-train: error")]
    assert len(lines) == 1, done.stderr
    assert re.search(r"rank \d .*: a worker that read samples of step \d+.* SIGKILL", lines[0])
