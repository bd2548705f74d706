"""What the supervisor makes of an attempt that has failed."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from hpc_train.config import DataSection, ParallelSection, RunConfig
from hpc_train.launch.attempt import Attempt, Outcome
from hpc_train.launch.command import shrinking
from hpc_train.launch.launchers import Line
from hpc_train.launch.protocol import JobProgress
from hpc_train.launch.supervise import cause_of

NOTICED = "mpirun noticed that process rank 3 with PID 0 on node {} exited on signal 9 (Killed)."


@pytest.mark.parametrize(
    ("host", "starved", "expected"),
    [
        (socket.gethostname(), True, "was ended by SIGKILL: its host ran out of memory"),
        (socket.gethostname(), False, "was ended by SIGKILL, perhaps for lack of memory"),
        ("elsewhere", True, "was ended by SIGKILL, perhaps for lack of memory"),
    ],
)
def test_a_kernel_that_has_ended_a_rank_for_memory_is_told(host, starved, expected):
    outcome = Outcome(137, [NOTICED.format(host)], 0.0, JobProgress(5, 0.0), starved)
    assert cause_of(outcome) == f"rank 3 ({host}) {expected}"


def test_silence_is_named_as_the_cause():
    outcome = Outcome(-9, [], 61.0, JobProgress(5, 60.0))
    assert cause_of(outcome).startswith("no progress for 61 s after step 5")


@pytest.mark.parametrize(
    ("batch", "micro_batch", "tp", "slots", "ranks"),
    [
        (16, 2, 1, 7, 4),
        (16, None, 1, 7, 4),
        (12, None, 1, 7, 6),
        (16, 2, 2, 7, 4),
        (16, 2, 4, 3, 0),
        (3, None, 1, 2, 1),
    ],
)
def test_a_job_shrinks_to_what_its_batch_can_be_divided_by(batch, micro_batch, tp, slots, ranks):
    config = RunConfig(
        data=DataSection(batch=batch, micro_batch=micro_batch), parallel=ParallelSection(tp=tp)
    )
    assert shrinking(config)(slots) == (ranks, [])
    given = RunConfig(data=config.data, parallel=ParallelSection(tp=tp, dp=8))
    options = ["--parallel.dp", str(ranks // tp)] if ranks else []
    assert shrinking(given)(slots) == (ranks, options)


def test_a_job_that_never_begins_is_given_up(tmp_path):
    line = Line([sys.executable, "-c", "import time; time.sleep(60)"], {})
    attempt = Attempt(line, os.environ, tmp_path / "progress.json", start_limit=1.0)
    outcome = attempt.watch()
    assert outcome.silent > 1
    assert cause_of(outcome).startswith("no sign of training for 1 s")


def test_any_other_program_takes_what_is_left():
    assert shrinking(None)(7) == (7, [])
