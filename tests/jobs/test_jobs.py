"""Jobs from Python, with schedulers that take notes, and for real without a scheduler."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from hpc_train import jobs
from hpc_train.errors import UserError
from hpc_train.jobs import Job
from hpc_train.launch.queued import tasks_of
from tests.cli.desk import Desk
from tests.waiting import Clock


@pytest.fixture
def desk(tmp_path, monkeypatch):
    made = Desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    made.scheduler("sbatch", says="7")
    made.scheduler("squeue", says="")
    return made


def ended(folder, **fields):
    record = {"time": int(time.time()), "event": "ended", "job": "7", "code": 75, "next": ""}
    record |= fields
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "jobs.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_options_are_those_of_the_command_line(desk):
    keys = {"optimizer.lr": 1e-3, "run.epochs": None, "data.path": [{"path": "a b", "weight": 2}]}
    options = {"nodes": 2, "time": "2h", "exclusive": True, "directive": ["--qos=a", "-l b"]}
    job = jobs.submit("my.yaml", keys, scheduler="slurm", account=None, **options)
    assert job == Job(job.run) == Job(str(job.run))
    assert job.ids == ["7"]
    script = (job.run_dir / "job.sh").read_text()
    for line in ("--nodes=2", "--time=02:00:00", "--exclusive", "--qos=a", "-l b"):
        assert f"#SBATCH {line}\n" in script
    path = """'[{'"'"'path'"'"': '"'"'a b'"'"', '"'"'weight'"'"': 2}]'"""
    assert f"--optimizer.lr 0.001 --run.epochs null --data.path {path})" in script


def test_another_program_runs_on_each_rank(desk):
    job = jobs.submit(["python", Path("my.py"), "a b"], {"run.dir": "runs/it"}, scheduler="slurm")
    assert "command=(python my.py 'a b')" in (job.run_dir / "job.sh").read_text()


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ({}, {"nods": 2}, "nods"),
        ({}, {"nodes": 0}, "nodes"),
        ({"lr": 1}, {}, "'lr' is not a key"),
        ({"optimizer.lrr": 1}, {}, "did you mean --optimizer.lr"),
        ({"optimizer.lrr": None}, {}, "did you mean --optimizer.lr"),
        ({"checkpoint.resume": None}, {}, "checkpoint.resume is None: leave it out"),
    ],
)
def test_mistakes_are_those_of_the_command_line(desk, keys, options, message):
    with pytest.raises(UserError, match=message):
        jobs.submit("my.yaml", keys, scheduler="slurm", **options)


def test_a_second_submission_of_a_run_is_refused(desk):
    jobs.submit("my.yaml", scheduler="slurm")
    desk.command("squeue", "echo '7|7|7|RUNNING|None|3:07|n1'")
    with pytest.raises(UserError, match="has a job already"):
        jobs.submit("my.yaml", scheduler="slurm")


def test_states_follow_a_run_from_job_to_job(desk):
    job = jobs.submit("my.yaml", scheduler="slurm")
    desk.command("squeue", "echo '7|7|7|PENDING|Priority|0:00|'")
    assert (job.state, job.exit_code) == ("queued", None)
    with pytest.raises(TimeoutError, match="runs/my has not ended within 0"):
        job.wait(timeout=0, poll=0.01)
    desk.command("squeue", "echo '7|7|7|RUNNING|None|0:10|n1'")
    assert job.state == "running"
    ended(job.run_dir, code=0, next="8")
    desk.command("squeue", "echo '8|8|8|PENDING|Priority|0:00|'")
    assert (job.state, job.ids) == ("queued", ["7", "8"])
    desk.command("squeue", "true")
    ended(job.run_dir, job="8", code=0)
    assert (job.state, job.wait()) == ("finished", 0)
    ended(job.run_dir, job="9", code=75)
    assert (job.state, job.wait()) == ("stopped", 75)
    ended(job.run_dir, job="10", code=1)
    assert (job.state, job.wait()) == ("failed", 1)


def test_a_job_that_the_queue_shows_again_has_not_ended(desk, monkeypatch):
    """Between the two jobs of a chain the queue is empty, and the last record comes late."""
    job = jobs.submit("my.yaml", scheduler="slurm")
    looks = iter([[], ["7"], ["7"], ["7"], ["7"], [], []])

    def look(_):
        found = next(looks, None)
        if found is None:
            ended(job.run_dir, code=0)
        return "slurm", found or []

    monkeypatch.setattr(jobs, "still_queued", look)
    monkeypatch.setattr(jobs, "time", Clock())
    assert job.wait(poll=jobs.LATE_SECONDS / 3) == 0


def test_a_job_that_left_no_record_has_failed(desk, monkeypatch):
    job = jobs.submit("my.yaml", scheduler="slurm")
    monkeypatch.setattr(jobs, "time", Clock())
    assert (job.state, job.wait()) == ("failed", None)


@pytest.mark.parametrize(
    ("job", "tasks"),
    [
        ("7", []),
        ("7.server", []),
        ("7_3", [3]),
        ("7_[0-2,5%2]", [0, 1, 2, 5]),
        ("7_[0-8:4,9]", [0, 4, 8, 9]),
        ("7[4].server", [4]),
        ("7[].server", []),
        ("4711-12@node1", []),
        ("4711-12@node_3", []),
    ],
)
def test_an_id_tells_its_tasks(job, tasks):
    assert tasks_of(job) == tasks


def test_tasks_are_told_apart(desk):
    first, second, third = jobs.map(
        "my.yaml", [{"run.seed": seed} for seed in (1, 2, 3)], scheduler="slurm"
    )
    assert [task.run_dir.name for task in (first, second, third)] == ["task-0", "task-1", "task-2"]
    script = (first.run / "job.sh").read_text()
    assert "    2) command+=(--run.seed 3) ;;" in script
    rows = "'7_0|8|7|RUNNING|None|1:00|n1\\n7_[1-2%%1]|7|7|PENDING|None|0:00|\\n'"
    desk.command("squeue", f'[ "$SLURM_BITSTR_LEN" = 0 ] && printf {rows}')  # else it cuts lists
    assert [task.state for task in (first, second, third)] == ["running", "queued", "queued"]
    ended(first.run_dir, job="7_0", code=0)
    ended(second.run_dir, job="7_1", code=0, next="9_1")
    desk.command("squeue", "echo '9_1|9|9|RUNNING|None|1:00|n1'")
    assert [task.state for task in (first, second)] == ["finished", "running"]
    assert third.state == "failed"
    desk.scheduler("scancel", says="")
    assert "task-1/STOP written" in second.cancel()
    assert not (first.run_dir / "STOP").exists()
    assert "ended or removed" in second.cancel(now=True)


def test_a_sweep_has_finished_if_all_of_its_tasks_have(desk):
    desk.scheduler("sbatch", says="7")
    desk.command("squeue", "true")
    first, second = jobs.map("my.yaml", [{"run.seed": seed} for seed in (1, 2)], scheduler="slurm")
    whole = jobs.Job(first.run)
    ended(second.run_dir, job="7_1", code=0)
    assert (whole.exit_code, whole.state) == (None, "failed"), "the first task left no record"
    ended(first.run_dir, job="7_0", code=2)
    assert (whole.exit_code, whole.state) == (2, "failed")
    ended(first.run_dir, job="8_0", code=75)
    assert (whole.exit_code, whole.state) == (75, "stopped")
    ended(first.run_dir, job="9_0", code=0)
    assert (whole.exit_code, whole.state) == (0, "finished")
    with pytest.raises(UserError, match="another sweep, whose task 0 has --run.seed 1"):
        jobs.map("my.yaml", [{"run.seed": 3}, {"run.seed": 2}], scheduler="slurm")


def test_the_end_of_an_earlier_job_is_not_that_of_a_later_one(desk):
    desk.command("squeue", "true")
    job = jobs.submit("my.yaml", scheduler="slurm")
    ended(job.run_dir, code=0)
    again = jobs.submit("my.yaml", scheduler="slurm")
    assert again.exit_code is None


def test_the_end_of_a_task_is_told_by_the_order_of_records_and_by_no_clock(desk):
    desk.command("squeue", "true")
    (task,) = jobs.map("my.yaml", [{"run.seed": 1}], scheduler="slurm")
    ended(task.run_dir, time=int(time.time()) - 2, job="8", code=0)
    assert (task.exit_code, task.state) == (0, "finished"), "the node's clock is behind"
    jobs.map("my.yaml", [{"run.seed": 1}], scheduler="slurm")
    assert task.exit_code is None, "it was submitted again"
    ended(task.run_dir, time=1, job="9", code=75)
    assert (task.exit_code, task.ids) == (75, ["7", "8", "9"])


def test_a_task_without_an_array_has_its_own_job(desk):
    desk.command("flux", 'case "$1" in batch) wc -l < flux.calls ;; esac')
    tasks = jobs.map("my.yaml", [{"run.seed": 1}, {"run.seed": 2}], scheduler="flux")
    assert [task.ids for task in tasks] == [["1"], ["2"]]
    rows = shlex.quote("2|RUN||1.0s|node1\n")
    desk.command("flux", f"printf %s {rows}; echo 'JobID 1 unknown' >&2")
    assert [task.state for task in tasks] == ["failed", "running"]


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [("run.dir", {}, "leave it out"), ("run.seed", {"sweep": ["run.seed=1,2"]}, "leave it out")],
)
def test_tasks_have_directories_of_their_own_and_no_sweep_beside_them(desk, key, options, message):
    with pytest.raises(UserError, match=message):
        jobs.map("my.yaml", ({key: value} for value in range(2)), scheduler="slurm", **options)


def test_no_tasks_are_no_jobs(desk):
    assert jobs.map("my.yaml", []) == []


def test_a_task_that_fails_at_once_has_its_cause_in_the_output_of_the_run(desk):
    (task,) = jobs.map("my.yaml", [{"run.seed": 1}], scheduler="slurm")
    (task.run / "slurm-7_0.out").write_text("hpc-train: error: there is no data\n")
    assert "there is no data" in task.logs()


def test_logs_are_the_newest_output(desk):
    job = jobs.submit("my.yaml", scheduler="slurm")
    with pytest.raises(UserError, match="no job of the run has begun"):
        job.logs()
    (job.run_dir / "my-7.out").write_text("hello\n")
    assert job.logs() == "hello\n"
    (job.run_dir / "logs").mkdir()
    (job.run_dir / "logs/rank-001.log").write_text("one\n")
    assert job.logs(rank=1) == "one\n"
