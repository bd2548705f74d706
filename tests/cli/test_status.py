"""`hpc-train status` and `logs` as a user calls them, with a scheduler that takes notes."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hpc_train.checkpoint.claim import take_claim
from hpc_train.checkpoint.owner import NOWHERE, Owner, ProcessPlace
from hpc_train.launch import status
from tests.cli.desk import QSTAT, Desk
from tests.programs import ENVIRON, hear_ctrl_c, hpc_train, only_line, run
from tests.waiting import PATIENCE

ENDED = {"event": "ended", "job": "1", "code": 75, "next": "", "why": "the job was cancelled"}


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path)
    made.scheduler("sbatch")
    made.command("squeue", "echo '1|1|1|RUNNING|None|3:07|node[1-2]'")
    assert made.run("submit", "my.yaml").returncode == 0
    run = made.folder / "runs/my"
    (run / "logs").mkdir()
    (run / "checkpoints").mkdir()
    return made


def test_the_status_of_a_run(desk):
    run = desk.folder / "runs/my"
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 3.25}\n')
    (run / "checkpoints/LATEST").write_text("step-000000002.safetensors\n")
    (run / "checkpoints/step-000000002.safetensors").touch()
    for words in (["runs/my"], []):
        done = desk.run("status", *words)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[:2] == ["runs/my", "    job 1 RUNNING 3:07 node[1-2]"]
        assert lines[2].startswith("    step 2, loss 3.25, recorded ")
        assert lines[3:] == ["    newest checkpoint: step-000000002.safetensors"]
    ahead = {"step": 3, "loss": None, "time": time.time() + 99}  # by the clock of its host
    (run / "metrics.jsonl").write_text(json.dumps(ahead))
    told = desk.run("status", "runs/my").stdout
    assert "    step 3, loss not finite, recorded 0 s ago" in told
    (run / "checkpoints/LATEST").write_bytes(b"\xff\0")
    last = desk.run("status", "runs/my").stdout.splitlines()[-1]
    assert last == "    runs/my/checkpoints/LATEST names no checkpoint that is there"


def test_the_status_for_programs(desk):
    run = desk.folder / "runs/my"
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3.5, "step_seconds": 0.5}\n{"step": 2, "loss": NaN, "node_hours": 2}\n'
    )
    (run / "checkpoints/LATEST").write_text("step-000000002.safetensors\n")
    (run / "checkpoints/step-000000002.safetensors").touch()
    (run / "tasks.json").write_text('{"0": ["optimizer.lr=1"], "1": ["optimizer.lr=2"]}')
    (run / "task-1").mkdir()
    (run / "task-1/metrics.jsonl").write_text('{"step": 7, "loss": 3.0}\n')
    done = desk.run("status", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (told["run"], told["scheduler"], told["scheduler_error"]) == ("runs/my", "slurm", None)
    assert [(job["id"], job["state"], job["hosts"]) for job in told["jobs"]] == [
        ("1", "RUNNING", "node[1-2]")
    ]
    assert (told["step"], told["loss"], told["step_seconds"]) == (2, None, 0.5)
    assert told["checkpoint"] == "runs/my/checkpoints/step-000000002.safetensors"
    assert told["costs"] == {"node_hours": 2.0, "joules": None, "metered_node_hours": None}
    assert (told["last_end"], told["stop_file"]) == (None, False)
    tasks = [(task["task"], task["options"], task["step"]) for task in told["tasks"]]
    assert tasks == [("task-0", ["optimizer.lr=1"], None), ("task-1", ["optimizer.lr=2"], 7)]
    desk.command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    (told,) = json.loads(desk.run("status", "runs/my", "--json").stdout)
    assert told["jobs"] is None
    assert told["scheduler_error"].startswith("the scheduler does not say whether")
    assert desk.run("status", "--json", "--watch", "1").returncode == 2


def test_the_status_tells_the_costs_and_the_schedulers_energy_if_no_other_is_known(desk):
    run = desk.folder / "runs/my"
    (run / "events.jsonl").write_text('{"event": "end", "step": 2, "node_hours": 1.25}\n')
    cost = "    cost: 1.25 node-hours so far; no energy was read"
    assert cost in desk.run("status", "runs/my").stdout.splitlines()  # without accounting
    desk.scheduler("sacct", says="3000000\n100000\n")  # the job was requeued once
    told = f"{cost}, and slurm accounts for 3.1 MJ (861 Wh)"
    assert told in desk.run("status", "runs/my").stdout.splitlines()
    assert "-j 1 " in desk.calls("sacct")[0]
    (run / "metrics.jsonl").write_text('{"step": 3, "node_hours": 1.5, "joules": 7.2e6}\n')
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert any(
        line.startswith("    cost: 1.5 node-hours and 7.2 MJ (2 kWh) so far") for line in lines
    )


def test_the_costs_of_a_sweep_are_those_of_its_tasks(desk):
    for number, told in enumerate(({"joules": 4e6, "metered_node_hours": 1.0}, {})):
        task = desk.folder / f"runs/my/task-{number}"
        task.mkdir()
        (task / "metrics.jsonl").write_text(json.dumps({"step": 1, "node_hours": 1.0} | told))
    cost = (
        "    cost: 2 node-hours and 4 MJ (1.11 kWh) so far; the energy was read in 50 % of the time"
    )
    assert cost in desk.run("status", "runs/my").stdout.splitlines()


def test_the_status_of_a_run_whose_job_has_ended(desk):
    run = desk.folder / "runs/my"
    with (run / "jobs.jsonl").open("a") as file:
        file.write(json.dumps(ENDED | {"continue": "cd /home/me && sbatch runs/my/job.sh"}) + "\n")
    desk.command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    desk.run("cancel", "runs/my")
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines[1:] == [
        "    no job in the queue",
        "    job 1 ended with exit code 75, the job was cancelled",
        "    to continue: cd /home/me && sbatch runs/my/job.sh",
        "    runs/my/STOP is there, which ends the run: remove it to resume",
    ]
    desk.command("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines[1].startswith("    the scheduler does not say whether")
    assert len(lines) == 5


def test_pbs_tells_state_time_hosts_and_why_a_job_waits(desk):
    desk.scheduler("qsub")
    assert desk.run("submit", "my.yaml", "--scheduler", "pbs", "--run.dir", "p").returncode == 0
    for state, told in (
        ("R", "job 1 RUNNING 00:10:00 node1/0*2+node2/0*2"),
        ("Q", "Not Running: Insufficient amount of resource"),
    ):
        desk.command("qstat", f"echo {shlex.quote(QSTAT.format(id='1', state=state))}")
        assert told in desk.run("status", "p").stdout


def test_a_folder_that_is_no_run_has_no_status(desk):
    for verb in ("status", "logs"):
        done = desk.run(verb, "bin")
        assert done.returncode == 2
        assert "bin is not a run directory" in only_line(done.stderr)
    (desk.folder / "runs/my/jobs.jsonl").unlink()
    assert "no run of `hpc-train submit`" in desk.run("status").stdout
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines == ["runs/my", "    no job of it is in the queue, and none has begun"]


def test_logs_are_the_newest_output_or_those_of_a_rank(desk):
    run = desk.folder / "runs/my"
    assert "no job of the run has begun yet" in only_line(desk.run("logs", "runs/my").stderr)
    (run / "logs/rank-000.log").touch()
    assert "there is rank-000.log" in only_line(desk.run("logs", "runs/my", "--rank", "9").stderr)
    for rank in range(2):
        (run / f"logs/rank-{rank:03d}.log").write_text(f"rank {rank}\n")
    assert desk.run("logs", "runs/my").stdout == "rank 0\n", "PBS has none before a job's end"
    for number, name in enumerate(("my-1.out", "7.pbs.OU", "my.o8")):
        (run / name).write_text(f"job {number}\n")
        assert desk.run("logs", "runs/my").stdout == f"job {number}\n"
    assert desk.run("logs", "runs/my", "--rank", "1").stdout == "rank 1\n"
    done = desk.run("logs", "runs/my", "--rank", "2")
    assert "there are rank-000.log to rank-001.log" in only_line(done.stderr)
    for rank in (999, 1000):
        (run / f"logs/rank-{rank}.log").touch()
    done = desk.run("logs", "runs/my", "--rank", "2")
    assert "there are rank-000.log to rank-1000.log" in only_line(done.stderr)


def test_logs_are_followed_from_before_their_first_line(desk):
    desk.command("squeue", "echo '1|1|1|PENDING|Resources|0:00|'")
    run = desk.folder / "runs/my"
    words = [*hpc_train("logs", "--follow", "runs/my")]
    environ = ENVIRON | {"PATH": f"{desk.folder}/bin"}
    with subprocess.Popen(
        words,
        cwd=desk.folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        try:
            assert (
                "waiting for the output of job 1 PENDING Resources" in following.stderr.readline()
            )
            (run / "my-1.out").write_text("first\n")
            assert following.stdout.readline() == "first\n"
        finally:
            following.kill()


def test_followed_logs_of_a_run_that_has_ended_end_without_a_scheduler(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-000.log").write_text("done\n")
    take_claim(tmp_path, Owner.here(NOWHERE, 0.0)).release()
    done = run(*hpc_train("logs", "--follow", str(tmp_path)))
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_followed_logs_lose_no_line_and_end_after_two_answers(tmp_path, monkeypatch, capfdbinary):
    log = tmp_path / "logs/rank-000.log"
    log.parent.mkdir()
    log.write_text("")
    answers = iter([True, False, True, True])

    def asked(run):
        with log.open("a") as file:
            file.write("more\n")  # while the scheduler takes its time
        return next(answers)

    monkeypatch.setattr(status, "_over", asked)
    for name in ("FOLLOW_SECONDS", "ASK_SECONDS", "SURE_SECONDS"):
        monkeypatch.setattr(status, name, 0.01)
    status.show_log(tmp_path, 0, follow=True)
    assert capfdbinary.readouterr().out == b"more\n" * 4


def test_followed_logs_go_on_with_the_next_job_and_end_with_the_last(desk):
    run = desk.folder / "runs/my"
    (run / "my-1.out").write_text("first\n")
    program = (
        "import sys; from hpc_train.launch import status\n"
        "status.ASK_SECONDS = status.SURE_SECONDS = 0.1\n"
        "from hpc_train.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [hpc_train()[0], "-c", program, "logs", "--follow", "runs/my"]
    environ = ENVIRON | {"PATH": f"{desk.folder}/bin"}
    following = subprocess.Popen(
        words, cwd=desk.folder, env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert following.stdout.readline() == "first\n"
        with (run / "my-1.out").open("a") as file:
            file.write("more\n")
        assert following.stdout.readline() == "more\n"
        time.sleep(0.05)
        (run / "my-2.out").write_text("second\n")
        assert following.stdout.readline() == "second\n"
        desk.command("squeue", "exit 0")
        assert following.communicate(timeout=PATIENCE)[0] == ""
    finally:
        following.kill()
        following.stdout.close()
        following.wait()
    assert following.returncode == 0


def write_measured(run):
    (run / "config.yaml").write_text("run: {steps: 100}\n")
    lines = [
        json.dumps({"step": step, "loss": 4.0 - step, "step_seconds": 6.0, "comm_seconds": 0.6})
        for step in range(1, 4)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def claim(run, owner=b""):
    """Let a job own a run, of another host unless an owner is given."""
    (run / ".claim").mkdir(exist_ok=True)
    (run / ".claim/000001").write_bytes(owner)


def test_the_status_says_what_the_run_does(desk):
    run = desk.folder / "runs/my"
    write_measured(run)
    events = [{"event": "start", "time": 1.0, "step": 0}]

    def state(*more):
        text = "".join(json.dumps(event) + "\n" for event in [*events, *more])
        (run / "events.jsonl").write_text(text)
        lines = desk.run("status", "runs/my").stdout.splitlines()
        known = lines[2] in ("    running", "    finished")
        assert ("    left: 97 of 100 steps" in lines) == (not known)
        return lines[2].strip()

    assert state() == "no job runs, and no end is recorded"
    assert state({"event": "start", "ranks": 40000 * ["h"]}).startswith("no job runs"), "many ranks"
    claim(run)
    assert state() == "running"
    with subprocess.Popen(["sleep", "60"]) as other:
        mine = dataclasses.asdict(Owner.here(ProcessPlace(), 0.0))
        ticks = int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
        claim(run, json.dumps(mine | {"process": other.pid, "begin": ticks}).encode())
        os.utime(run / ".claim/000001", (1.0, 1.0))
        assert state() == "running", "its process is there"
        other.kill()
    os.utime(run / ".claim/000001")
    assert state() == "no job runs, and no end is recorded", "it was killed on this host"
    killed = {"event": "end", "time": 2.0, "code": 137, "cause": "host b died"}
    (run / "launch.jsonl").write_text(json.dumps(killed) + "\n")
    assert state() == "failed: host b died"
    end = {"event": "end", "time": 3.0, "step": 3}
    assert state(end | {"reason": "stopped", "why": "SIGTERM"}) == "stopped: SIGTERM"
    assert state(end | {"reason": "finished"}) == "finished"
    claim(run)
    os.utime(run / ".claim/000001", (1.0, 1.0))
    assert state({"event": "start", "time": 4.0}) == "no job runs, and no end is recorded"

    def of_launcher(**record):
        (run / "launch.jsonl").write_text(json.dumps(record))

    failed = end | {"reason": "failed", "why": "no such file"}
    of_launcher(event="end", time=3.5, seconds=3.4, code=1, cause="rank 1 ended with 1")
    assert state(failed) == "failed: no such file", "the job's own words say more"
    of_launcher(event="end", time=3.5, seconds=0.4, code=1, cause="host b died")
    assert state(failed) == "failed: host b died", "an attempt after it has not trained"
    of_launcher(event="start", time=time.time() - 500, restart=1)
    assert state(failed) == "starting (attempt 2)"
    of_launcher(event="start", time=time.time() - 700, restart=1)
    assert state(failed) == "failed: no such file", "the launcher was killed"


def test_the_status_of_a_loop_has_its_checkpoint(desk):
    (desk.folder / "runs/my/LATEST").write_text("step-000000002.safetensors\n")
    (desk.folder / "runs/my/step-000000002.safetensors").touch()
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines[2:] == ["    newest checkpoint: step-000000002.safetensors"]


def test_the_status_says_the_speed_and_the_time_left_without_curves_in_a_file(desk):
    write_measured(desk.folder / "runs/my")
    claim(desk.folder / "runs/my")
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines[4:] == [
        "    speed: 6 s per step",
        "    left: 97 of 100 steps, about 9 min 42 s",
        "    waiting of rank 0: 10% for other ranks",
    ]


def test_a_terminal_shows_curves_again_and_again(desk):
    """A terminal without block characters shows none."""
    write_measured(desk.folder / "runs/my")
    assert "█" in watched(desk, "utf-8")
    assert len(desk.calls("squeue")) == 1, "a second question to the scheduler is not due"
    assert "█" not in watched(desk, "latin-1")


def watched(desk, encoding):
    """What a terminal shows of a status that is watched twice, and then left by Ctrl-C."""
    ours, theirs = pty.openpty()
    environ = {"PATH": f"{desk.folder}/bin", "TERM": "xterm", "PYTHONIOENCODING": encoding}
    with subprocess.Popen(
        hpc_train("status", "--watch", "1", "runs/my"),
        cwd=desk.folder,
        env=ENVIRON | environ | {"COLUMNS": "90", "LINES": "30"},
        stdout=theirs,
        preexec_fn=hear_ctrl_c,
    ) as watching:
        try:
            os.close(theirs)
            shown = b""
            while shown.count(b"left: 97") < 2:
                shown += os.read(ours, 1 << 16)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(PATIENCE) == 0
        finally:
            watching.kill()
            os.close(ours)
    return shown.decode(encoding, "replace")
