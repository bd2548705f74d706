"""What schedulers answer, as their manuals and tests record it; and jobs without a scheduler."""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import psutil
import pytest

from hpc_train.errors import HpcTrainError
from hpc_train.launch.queued import record_queued, still_queued
from hpc_train.launch.schedulers import QueuedJob, scheduler_of
from hpc_train.launch.schedulers.local import BASH
from tests.programs import ENVIRON, hpc_train, only_line, run
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Put a command into the PATH that answers in a certain way; returns the arguments it got."""

    def put(name, text="", errors="", code=0):
        path, calls = tmp_path / name, tmp_path / f"{name}.calls"
        path.write_text(
            f'#!/bin/sh\necho "$*" >> {calls}\nprintf %s {shlex.quote(text)}\n'
            f"printf %s {shlex.quote(errors)} >&2\nexit {code}\n"
        )
        path.chmod(0o755)
        return calls

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return put


LSF_ROWS = (
    "764220165^0^PEND^New job is waiting for scheduling^-^-\n"
    "764254593^2^RUN^-^120 second(s)^lxbsu2710:lxbsu2711\n"
    "764213236^0^EXIT^-^61 second(s)^b681e480bd\n"
    "764213237^0^DONE^-^61 second(s)^b681e480bd\n"
    "764213238^0^SSUSP^-^61 second(s)^b681e480bd\n"
)


def test_lsf_says_which_jobs_there_are(answers):
    calls = answers("bjobs", LSF_ROWS, "Job <5> is not found\n", 255)
    ids = ["764220165", "764254593", "764213236", "764213237", "764213238", "5"]
    assert scheduler_of("lsf").queued(ids) == [
        QueuedJob("764220165", "PENDING", "New job is waiting for scheduling", "", ""),
        QueuedJob("764254593[2]", "RUNNING", "", "120 second(s)", "lxbsu2710:lxbsu2711"),
        QueuedJob("764213238", "SUSPENDED", "", "61 second(s)", "b681e480bd"),
    ]
    assert calls.read_text().split()[-6:] == ids


@pytest.mark.parametrize(
    ("scheduler", "answer", "job"),
    [
        ("slurm", "123\n", "123"),
        ("slurm", "sbatch: assigned to partition 7\n123;cluster a\nbye 5\n", "123"),
        ("slurm", "Submitted batch job 77\n", "77"),
        ("pbs", "INFO: 3 jobs left\n123.server-1\n", "123.server-1"),
        ("pbs", "123[].server\n", "123[].server"),
        ("torque", "7\n", "7"),
        ("lsf", "note\nJob <8> is submitted to default queue <q>.\n", "8"),
        ("flux", "note: 5 left\nf2hA\n", "f2hA"),
    ],
)
def test_the_id_of_a_job_is_found_in_the_answer(scheduler, answer, job):
    assert scheduler_of(scheduler).id_of(answer) == job
    for other in ("", "hello you\n"):
        with pytest.raises(HpcTrainError, match="says no job id"):
            scheduler_of(scheduler).id_of(other)


def test_a_warning_of_pbs_beside_its_answer_is_no_failure(answers):
    answers("qstat", "Job Id: 7.x\n    job_state = R\n", "qstat: warning: slow\n")
    assert [job.state for job in scheduler_of("pbs").queued(["7.x"])] == ["RUNNING"]
    answers("qstat", "", "qstat: warning: slow\ncannot connect\n", 1)
    with pytest.raises(HpcTrainError, match="does not say whether"):
        scheduler_of("pbs").queued(["7.x"])


LONG = """Job Id: 7.x
    job_state = R
    exec_host = node1/0*2+node2/0*2+no
\tde3/0*2
    Variable_List = A=1,SAYS=Job Id: 8.x,
\tB=2
"""


def test_pbs_wraps_long_values(answers):
    answers("qstat", LONG)
    hosts = "node1/0*2+node2/0*2+node3/0*2"
    assert scheduler_of("pbs").queued(["7.x"]) == [QueuedJob("7.x", "RUNNING", "", "", hosts)]


def test_flux_says_which_jobs_there_are(answers):
    rows = "fA|SCHED|eta:3.2m|0.0s|\nfB|RUN||2.1m|node[1-2]\nfC|TIMEOUT||1.0m|node1\n"
    answers("flux", rows, "JobID fD unknown\n")
    assert scheduler_of("flux").queued(["fA", "fB", "fC", "fD"]) == [
        QueuedJob("fA", "PENDING", "eta:3.2m", "0.0s", ""),
        QueuedJob("fB", "RUNNING", "", "2.1m", "node[1-2]"),
    ]


@pytest.mark.parametrize(
    ("name", "command", "errors"),
    [
        ("lsf", "bjobs", "Cannot connect to LSF. Please wait ...\n"),
        ("flux", "flux", "flux-jobs: ERROR: Unable to connect to Flux\n"),
    ],
)
def test_a_scheduler_that_is_away_says_nothing(answers, name, command, errors):
    answers(command, "", errors, 1)
    with pytest.raises(HpcTrainError, match="does not say"):
        scheduler_of(name).queued(["1"])


@pytest.mark.parametrize(
    ("name", "command", "answer", "job"),
    [
        (
            "lsf",
            "bsub",
            "Job is submitted to <cpp> project.\nJob <77> is submitted to queue <q>.",
            "77",
        ),
        ("lsf", "bsub", "Job <78> is submitted to default queue <batch>.", "78"),
        ("flux", "flux", "fM7Zq9AKHno\n", "fM7Zq9AKHno"),
    ],
)
def test_the_id_of_a_new_job_is_recorded(answers, tmp_path, name, command, answer, job):
    answers(command, answer)
    words = ["submit", "--scheduler", name, "--run.dir", "r", "--account", "p1", "--", "python"]
    done = run(*hpc_train(*words), cwd=tmp_path, environ={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == job
    record = json.loads((tmp_path / "r/jobs.jsonl").read_text())
    assert (record["job"], record["scheduler"]) == (job, name)


@pytest.mark.parametrize(("name", "command"), [("slurm", "sbatch"), ("lsf", "bsub")])
def test_a_job_that_another_job_submits_has_counts_of_its_own(tmp_path, name, command):
    """By themselves these schedulers give a job all variables of who submits it."""
    (tmp_path / command).write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\nexit 1\n")
    (tmp_path / command).chmod(0o755)
    told = ("HPC_TRAIN_QUEUED", "HPC_TRAIN_TASK", "HPC_TRAIN_RESTARTS", "SLURM_RESTART_COUNT")
    users = ("HPC_TRAIN_SILENCE", "HPC_TRAIN_ROOT", "SLURM_CLUSTERS", "OMP_PROC_BIND")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **dict.fromkeys([*told, *users], "2")}
    words = ["submit", "--scheduler", name, "--run.dir", "r", "--account", "p1", "--", "python"]
    run(*hpc_train(*words), cwd=tmp_path, environ=environ)
    seen = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen >= {*users}
    assert not seen & {*told}


def test_each_task_of_a_sweep_is_a_job_where_there_are_no_arrays(answers, tmp_path):
    calls = answers("flux", "fA\n")
    (tmp_path / "my.yaml").write_text("run: {dir: r}\n")
    words = ["submit", "my.yaml", "--scheduler", "flux", "--sweep", "run.seed=1,2,3"]
    done = run(*hpc_train(*words), cwd=tmp_path, environ={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == [f"batch {tmp_path}/r/job.sh"] * 3


def test_slurm_ends_tasks_that_wait_by_the_number_of_their_array(answers):
    """scancel refuses the id that squeue prints for them."""
    calls = answers("scancel")
    scheduler_of("slurm").delete(["7_[2-8:2%2]", "7_0", "8", "9_1"])
    assert calls.read_text() == "7 8 9_1\n"


def test_a_job_that_has_ended_already_is_no_error_to_lsf(answers):
    answers("bkill", "Job <13298296>: LaunchedJob has already finished\n", "", 255)
    scheduler_of("lsf").delete(["13298296"])
    answers("bkill", "", "Job <1>: User permission denied\n", 255)
    with pytest.raises(HpcTrainError, match="permission denied"):
        scheduler_of("lsf").delete(["1"])


# A program that stops early until its third start. It saves something new each time.
STOPS = """
import os, pathlib, sys, time
folder = pathlib.Path('r/checkpoints')
folder.mkdir(exist_ok=True)
number = len(list(folder.iterdir()))
(folder / f'step-{number:09}.safetensors').write_text('')
print('start', number, flush=True)
if 'wait' in sys.argv: time.sleep(60)
sys.exit(75 if number < 2 else 0)
"""


@pytest.fixture
def local(tmp_path):
    """Submit a program to this machine; returns what `submit` has done."""
    (tmp_path / "it.py").write_text(STOPS)

    def submit(*words, options=(), **environ):
        command = ["--", "python", "it.py", *words]
        done = run(
            *hpc_train("submit", "--scheduler", "local", "--run.dir", "r", *options, *command),
            cwd=tmp_path,
            environ={**ENVIRON, **environ},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return submit


def events(folder):
    path = folder / "r/jobs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_without_a_scheduler_starts_again_until_it_is_done(local, tmp_path):
    (job,) = local(HOSTNAME="elsewhere")  # some shells export it, for all hosts
    wait_until(
        lambda: any(event.get("code") == 0 and not event["next"] for event in events(tmp_path))
    )
    record = events(tmp_path)
    assert [event["event"] for event in record] == ["queued", "ended", "ended", "ended"]
    assert [event["job"] for event in record[1:]] == [job, record[1]["next"], record[2]["next"]]
    output = (tmp_path / "r/r.out").read_text()
    assert [line for line in output.splitlines() if line.startswith("start")] == [
        "start 0",
        "start 1",
        "start 2",
    ]
    done = run(*hpc_train("status", "r"), cwd=tmp_path)
    assert "no job in the queue" in done.stdout
    assert "start 2" in run(*hpc_train("logs", "r"), cwd=tmp_path).stdout


def test_a_job_without_a_scheduler_has_nothing_of_the_job_around_it(local, tmp_path):
    told = {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_ID": "5", "PBS_NODEFILE": "/x"}
    told |= {"LSB_MCPU_HOSTS": "n1 4", "FLUX_ENCLOSING_ID": "f1"}
    words = "env | grep -E '^(SLURM|PBS|LSB|FLUX)_'; echo listed; exit 3"
    local(options=["--setup", words], SLURM_TMPDIR="/t", **told)
    wait_until(lambda: [event for event in events(tmp_path) if event["event"] == "ended"])
    assert (tmp_path / "r/r.out").read_text().startswith("SLURM_TMPDIR=/t\nlisted\n")


def test_a_job_that_has_ended_on_another_host_need_not_be_asked_about(tmp_path):
    record_queued(tmp_path, "local", "1-2@elsewhere")
    with pytest.raises(HpcTrainError, match=r"started on elsewhere.*jobs\.jsonl"):
        still_queued(tmp_path)
    with (tmp_path / "jobs.jsonl").open("a") as file:
        file.write('{"event": "ended", "job": "1-2@elsewhere", "code": 1, "next": ""}\n')
    assert still_queued(tmp_path)[1] == []


def test_a_job_without_a_scheduler_has_module_whichever_shell_submits_it(local, tmp_path):
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { echo "has loaded $2"; }\n')
    options = ["--setup", "module load a", "--requeue_by", "never"]
    local(options=options, MODULESHOME=str(tmp_path))
    wait_until(lambda: [event for event in events(tmp_path) if event["event"] == "ended"])
    assert (tmp_path / "r/r.out").read_text().startswith("has loaded a\n")


def test_a_job_without_a_scheduler_can_be_watched_and_cancelled(local, tmp_path):
    (job,) = local("wait")
    wait_until(lambda: "start 0" in (tmp_path / "r/r.out").read_text())
    done = run(*hpc_train("status", "r"), cwd=tmp_path)
    assert f"job {job} RUNNING" in done.stdout
    again = hpc_train("submit", "--scheduler", "local", "--run.dir", "r", "--", "python", "it.py")
    assert "has a job already" in only_line(run(*again, cwd=tmp_path).stderr)
    assert run(*hpc_train("cancel", "--now", "r"), cwd=tmp_path).returncode == 0
    wait_until(lambda: events(tmp_path)[-1]["event"] == "ended")
    assert not events(tmp_path)[-1]["next"]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in processes.stdout


def test_the_shell_of_a_job_without_a_scheduler_begins_as_any_other(tmp_path):
    """It ignores no further signals, and modules in the user's folder are not those of Python."""
    (tmp_path / "struct.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "job.sh").write_text('grep SigIgn /proc/$$/status; echo "$0"')
    ours, plain = (run(*words, "job.sh", cwd=tmp_path) for words in (BASH, ["bash"]))
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)


@pytest.mark.parametrize("whole", [False, True], ids=["script", "job"])
def test_a_job_whose_process_is_killed_leaves_no_ranks(local, tmp_path, whole):
    (job,) = local("wait")
    wait_until(lambda: "start 0" in (tmp_path / "r/r.out").read_text().splitlines())
    started = psutil.Process(int(job.partition("-")[0]))
    (script,) = started.children()
    (launch,) = script.children()
    mpirun = launch.children()
    (started if whole else script).kill()
    assert not psutil.wait_procs([script, launch, *mpirun], timeout=PATIENCE)[1]
    assert "asked to stop" in (tmp_path / "r/r.out").read_text()


def test_a_job_without_a_scheduler_ends_at_its_time_limit(local, tmp_path):
    local("wait", options=["--time", "4s", "--requeue_by", "never"])
    wait_until(lambda: events(tmp_path)[-1]["event"] == "ended")
    assert not events(tmp_path)[-1]["next"]


def test_a_job_that_a_rank_submits_is_no_rank_itself(tmp_path):
    """mpirun refuses to start from a rank."""
    show = "import os; print(*(f'{name}={os.environ[name]}' for name in sorted(os.environ)))"
    line = ["submit", "--scheduler", "local", "--run.dir", "r", "--", "python", "-c", show]
    told = {"HPC_TRAIN_QUEUED": "7", "HPC_TRAIN_WARM": "launch-x", "OMPI_MCA_btl": "^openib"}
    done = run("mpirun", "-np", "1", *hpc_train(*line), cwd=tmp_path, environ={**ENVIRON, **told})
    assert done.returncode == 0, done.stderr
    wait_until(lambda: events(tmp_path)[-1]["event"] == "ended")
    output = (tmp_path / "r/r.out").read_text()
    assert events(tmp_path)[-1]["code"] == 0, output
    assert "OMPI_MCA_btl=^openib" in output
    assert "start 0" in output
    assert "HPC_TRAIN_QUEUED" not in output
    assert "launch-x" not in output
