"""Which jobs the scheduler still has, as SLURM and PBS tell."""

from __future__ import annotations

import sys

import pytest

from hpc_train.checkpoint.owner import ProcessPlace
from hpc_train.job import jobs
from hpc_train.launch import protocol

SLURM = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c"}


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Have a program answer so, and nothing else be there."""

    def answer(name, text, code=0):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return answer


def test_where_a_process_stands():
    launched = {protocol.LAUNCH: "abc", protocol.RESTARTS: "2", "SLURM_RESTART_COUNT": "1"}
    assert jobs.own_place(SLURM | launched) == ProcessPlace("slurm:c:7", 1, "abc", 2)
    assert jobs.own_place({"PBS_JOBID": "7[2].server"}) == ProcessPlace("pbs::7[2].server")
    assert jobs.own_place({"LSB_JOBID": "7", "LSB_JOBINDEX": "2"}) == ProcessPlace("lsf::7[2]")
    assert jobs.own_place({}) == ProcessPlace()


def test_a_job_that_waits_in_the_queue_writes_nothing(answers):
    answers("squeue", "7 RUNNING\n8 PENDING\n9 COMPLETING\n10 SUSPENDED")
    assert jobs.ask_jobs(SLURM) == {"slurm:c:7", "slurm:c:9", "slurm:c:10"}


def test_pbs_names_its_jobs(answers):
    answers("qselect", "7.server\n9.server")
    assert jobs.ask_jobs({"PBS_JOBID": "7.server"}) == {"pbs::7.server", "pbs::9.server"}


@pytest.mark.parametrize(("text", "code"), [("8 RUNNING", 0), ("", 0), ("7 RUNNING", 1)])
def test_an_answer_without_this_job_is_none(answers, text, code):
    answers("squeue", text, code)
    assert jobs.ask_jobs(SLURM) is None


def test_the_schedulers_answer_from_before_mpi_started_is_kept_with_its_age(answers, monkeypatch):
    answers("squeue", "7 RUNNING")
    for name, value in (SLURM | {jobs.JOBS: ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs.time, "time", lambda: 1000.0)
    jobs.note_jobs()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
    answers("squeue", "8 RUNNING")
    monkeypatch.setattr(jobs.time, "time", lambda: 1030.0)
    assert jobs.known() == (frozenset({"slurm:c:7"}), 30.0)


def test_without_a_scheduler_nothing_is_known(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
    monkeypatch.setenv(jobs.JOBS, "")
    assert jobs.known() is None
