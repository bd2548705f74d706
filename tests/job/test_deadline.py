"""When the batch job ends, as SLURM and PBS tell."""

from __future__ import annotations

import time

import pytest

from hpc_train.errors import UserError
from hpc_train.job import deadline
from hpc_train.launch import protocol
from hpc_train.mpi.group import Group

PBS_PRO = """Job Id: 7.server
    job_state = R
    Resource_List.walltime = 02:00:00
    resources_used.walltime = 00:01:00
    estimated.start_time = Mon Jan  5 10:00:00 2026
    stime = {start}
"""
TORQUE = PBS_PRO.replace("stime", "start_time")


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Have squeue or qstat answer so, and nothing else be there."""

    def answer(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:59", 59),
        ("12:00", 720),
        ("1:02:03", 3723),
        ("2-01:00:00", 2 * 86400 + 3600),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_slurm_tells_how_much_is_left(answers, text, expected):
    answers("squeue", f"7 {text}")
    end = deadline.ask_end({"SLURM_JOB_ID": "7"})
    assert end is None if expected is None else abs(end - time.time() - expected) < 5


def test_slurm_answers_for_the_last_task_of_an_array_with_all_tasks(answers):
    """That task has the array's id, as the first component of a heterogeneous job has the job's."""
    answers("squeue", "71 9:00\n7 5:00\n8 1:00")
    assert abs(deadline.ask_end({"SLURM_JOB_ID": "7"}) - time.time() - 300) < 5


@pytest.mark.parametrize("variable", deadline.JOB_IDS)
def test_a_job_whose_end_nobody_tells_is_no_secret(monkeypatch, caplog, variable):
    monkeypatch.delenv(protocol.DEADLINE, raising=False)
    caplog.set_level("INFO")
    assert deadline.of_job(Group()) is None
    assert not caplog.messages, "there is no job"
    monkeypatch.setenv(variable, "7")
    assert deadline.of_job(Group()) is None
    assert "the end of this job is not known" in caplog.text


def test_newer_slurms_set_a_variable():
    assert deadline.ask_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9


@pytest.mark.parametrize("shape", [PBS_PRO, TORQUE])
def test_pbs_tells_start_and_length(answers, shape):
    start = time.time() - 60
    answers("qstat", shape.format(start=time.ctime(start)))
    assert abs(deadline.ask_end({"PBS_JOBID": "7"}) - start - 7200) < 2


def test_a_job_that_waits_or_a_scheduler_that_is_silent_has_no_end(answers):
    answers("qstat", "Job Id: 7\n    Resource_List.walltime = 02:00:00\n")
    assert deadline.ask_end({"PBS_JOBID": "7"}) is None
    assert deadline.ask_end({"SLURM_JOB_ID": "7"}) is None
    assert deadline.ask_end({}) is None


def test_the_more_ranks_a_job_has_the_earlier_its_training_is_over(monkeypatch):
    """Between its end and the job's, MPI, the launcher and the script end."""
    monkeypatch.setenv(protocol.DEADLINE, "1700000000")
    few, many, most = (1.7e9 - deadline.of_job(Group(0, ranks)) for ranks in (2, 1024, 8192))
    assert 5 < few < 10
    assert few + 5 < many < 60
    assert many + 30 < most < 300
    assert deadline.of_job(Group(0, 8192), 7.0) == 1.7e9 - 7, "the user knows better"


def test_an_end_that_is_no_number_is_refused(monkeypatch):
    for text in ("nan", "tomorrow"):
        monkeypatch.setenv(protocol.DEADLINE, text)
        with pytest.raises(UserError, match=f"HPC_TRAIN_DEADLINE is '{text}'"):
            deadline.of_job(Group())


def test_what_the_script_says_comes_first(answers, monkeypatch):
    answers("squeue", "7 1:00:00")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(protocol.DEADLINE, "1700000000")
    deadline.note_end()
    assert deadline.os.environ[protocol.DEADLINE] == "1700000000"
