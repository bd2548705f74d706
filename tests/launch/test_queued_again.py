"""When a job's script queues the job again, and when it leaves that to others."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpc_train.launch.batch import find_commands
from hpc_train.launch.queued import read_events, record_queued
from tests.launch.job_shell import ANSWER, ARRAYS, PLAIN, RUNNING, SAVES, Shell
from tests.waiting import PATIENCE

SCHEDULERS = ["slurm", "pbs", "lsf", "flux"]
SAVES_SOON = SAVES.format(seconds=0.1)
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")
CANCELLED = {
    "slurm": COMPLETING,
    "pbs": ANSWER["pbs"],  # PBS and LSF keep the state until the job has ended
    "lsf": ANSWER["lsf"],
    "flux": ANSWER["flux"] + '\n[  +9.2] exception type="cancel" severity=0 userid=1001',
}
TIME_LIMIT = COMPLETING.replace("Reason=None", "Reason=TimeLimit")
REQUEUED = COMPLETING.replace("Restarts=0", "Restarts=1")
PREEMPTED = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-24T02:42:40")


def with_schedulers(*hows: str) -> pytest.MarkDecorator:
    """SLURM's commands behave in all these ways, those of the others each in one or two."""
    every = [(i, j) for i in range(len(SCHEDULERS)) for j in range(len(hows))]
    later = [pytest.mark.long]
    cases = [
        pytest.param(SCHEDULERS[i], hows[j], marks=later if i and (i + j) % 3 else [])
        for i, j in every
    ]
    return pytest.mark.parametrize(("shell", "how"), cases, indirect=["shell"])


@pytest.fixture(params=SCHEDULERS)
def shell(request, tmp_path):
    return Shell(tmp_path, request.param)


@pytest.fixture
def slurm(tmp_path):
    return Shell(tmp_path, "slurm")


@pytest.fixture
def pbs(tmp_path):
    return Shell(tmp_path, "pbs")


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    """Signal a script; returns what it prints until it ends."""
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE)
    return text


def end_all(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM to all processes of a job, in whatever process groups they are."""
    script = psutil.Process(process.pid)
    for each in [*script.children(recursive=True), script]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            each.send_signal(signal.SIGTERM)


def default_mode(shell: Shell) -> str:
    return "requeue" if shell.scheduler == "slurm" else "submit"


def test_a_cancelled_job_saves_and_does_not_come_back(shell):
    process = shell.start(SAVES_SOON, requeue_by=default_mode(shell))
    shell.answer(CANCELLED[shell.scheduler])
    text = end(process)
    assert process.returncode == 75
    assert "saved" in text
    assert not shell.calls
    record = shell.records[-1]
    assert record["next"] == ""
    assert any(word in record["why"] for word in ("deleted", "cancelled", "bkill"))
    assert record["continue"] in text, "the log tells how to continue"


def test_the_command_that_continues_does(shell):
    process = shell.start(SAVES_SOON)
    shell.answer(CANCELLED[shell.scheduler])
    end(process)
    subprocess.run(["bash", "-c", shell.records[-1]["continue"]], env=shell.environ, check=True)
    assert len(shell.calls) == 1
    if shell.scheduler == "lsf":
        assert (shell.folder / "again.sh").read_text() == (shell.folder / "job.sh").read_text()
    else:
        assert str(shell.folder / "job.sh") in shell.calls[0]


@pytest.mark.parametrize("mode", ["requeue", "submit"])
def test_a_job_that_slurm_has_requeued_is_left_to_slurm(slurm, mode):
    process = slurm.start(SAVES_SOON, requeue_by=mode)
    slurm.answer(REQUEUED)
    assert "saved" in end(process)
    assert not slurm.calls
    assert slurm.records[-1]["continue"] == ""


@pytest.mark.parametrize("mode", ["requeue", "submit"])
@pytest.mark.parametrize("code", [75, 1])
def test_a_job_in_the_grace_time_of_a_preemption_stays_until_slurm_ends_it(slurm, mode, code):
    """SLURM signals the steps alone, and requeues only a job that has not ended by itself."""
    slurm.answer(PREEMPTED)
    process = slurm.start(f"echo ready; exit {code}", requeue_by=mode)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    text = end(process)
    assert process.returncode == code
    assert not slurm.calls
    assert "preempted" in slurm.records[-1]["why"]
    assert f"If it does not come back, continue by: cd {slurm.folder} && sbatch" in text


@pytest.mark.parametrize("mode", ["requeue", "submit"])
def test_sigterm_at_slurms_time_limit_queues_again(slurm, mode):
    process = slurm.start(SAVES_SOON, requeue_by=mode)
    slurm.answer(TIME_LIMIT)
    end(process)
    assert len(slurm.calls) == 1
    assert process.returncode == 0
    assert slurm.records[-1]["next"] == {"requeue": "7", "submit": "8"}[mode]


@pytest.mark.parametrize(("left", "stops"), [(100, False), (2000, True)])
def test_a_training_that_knows_its_end_is_not_stopped_by_the_early_signal(slurm, left, stops):
    """It knows how long a step and a save take, and SLURM's signal comes minutes too early."""
    environ = {"SLURM_JOB_END_TIME": str(int(time.time()) + left)}
    program = SAVES_SOON.replace("while :;", "sleep 1; [ -z $saved ] || exit; for i in {1..50};")
    program = program.replace("echo ready", "echo ready $HPC_TRAIN_DEADLINE >&2; echo ready")
    process = slurm.start(program, environ, stops_itself=True)
    text = end(process, signal.SIGUSR1)
    assert ("saved" in text) == stops, "a user may stop it at any other time"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_run_limit_of_lsf_queues_again(tmp_path, number):
    shell = Shell(tmp_path, "lsf")
    process = shell.start(SAVES_SOON, seconds=1)
    time.sleep(1 if number == signal.SIGTERM else 0)
    end(process, number)
    assert process.returncode == 0
    assert shell.calls == ["bsub  queued=1"]


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGHUP])
def test_the_time_limit_of_flux_queues_again(tmp_path, number):
    """Before version 0.73 only SIGHUP reaches a script."""
    shell = Shell(tmp_path, "flux")
    process = shell.start(SAVES_SOON)
    limit = '[  +9.2] exception type="timeout" severity=0 note="resource allocation expired"'
    shell.answer(f"{ANSWER['flux']}\n{limit}")
    end(process, number)
    assert process.returncode == 0
    assert len(shell.calls) == 1


def test_sigterm_at_the_walltime_queues_again(pbs):
    process = pbs.start(SAVES_SOON)
    pbs.walltime()
    end(process)
    assert process.returncode == 0
    assert pbs.calls == [f"qsub -v HPC_TRAIN_QUEUED=1,HPC_TRAIN_TASK= {pbs.folder}/job.sh queued="]


def test_variables_of_directives_of_pbs_are_those_of_the_next_job_too(pbs):
    """An option of qsub replaces the directives."""
    asked = replace(PLAIN.resources, directives=["-v FIRST=1", '-v "GIVEN=a b,OTHER"'])
    assert pbs.run("exit 75", resources=asked).returncode == 0
    told = "HPC_TRAIN_QUEUED=1,HPC_TRAIN_TASK=,FIRST=1,GIVEN=a b,OTHER"
    assert pbs.calls == [f"qsub -v {told} {pbs.folder}/job.sh queued="]


@pytest.mark.parametrize("change", ["job_state = R>job_state = E", "substate = 42>substate = 43"])
def test_a_job_that_pbs_ends_or_runs_again_at_its_walltime_is_left_to_pbs(pbs, change):
    process = pbs.start(SAVES_SOON)
    pbs.walltime()
    pbs.answer(ANSWER["pbs"].replace(*change.split(">")))
    end(process)
    assert process.returncode == 75
    assert not pbs.calls


def test_a_job_that_is_deleted_just_before_its_walltime_does_not_come_back(pbs):
    process = pbs.start(SAVES_SOON, seconds=1)
    time.sleep(1)
    assert "the job was deleted" in end(process)
    assert not pbs.calls


def test_a_job_that_pbs_runs_again_needs_no_command(pbs):
    process = pbs.start(SAVES_SOON)
    pbs.answer(ANSWER["pbs"].replace("substate = 42", "substate = 60"))
    assert "To continue" not in end(process)
    assert not pbs.calls
    assert pbs.records[-1]["continue"] == ""


@pytest.mark.parametrize("walltime", [False, True])
def test_a_job_that_is_deleted_while_it_is_queued_again_does_not_come_back(pbs, walltime):
    """PBS signals all processes of the job, also its qsub."""
    process = pbs.start("echo ready; exit 75")
    pbs.how("slow")
    while not (pbs.folder / "queueing").exists():
        time.sleep(0.02)
    if walltime:
        pbs.walltime()
    end_all(process)
    text, _ = process.communicate(timeout=PATIENCE)
    assert (pbs.folder / "new").exists() == walltime
    assert pbs.records[-1]["next"] == ("8" if walltime else "")
    assert ("the job was deleted: it is not queued again" in text) != walltime


def test_a_signal_to_all_processes_does_not_end_the_command_that_queues_again(shell):
    """SLURM ends a job that it requeues: `scontrol requeue` may not have its answer yet."""
    process = shell.start("echo ready; exit 75", requeue_by=default_mode(shell))
    shell.how("slow")
    while not (shell.folder / "queueing").exists():
        time.sleep(0.02)
    if shell.scheduler == "pbs":
        shell.walltime()
    end_all(process)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert shell.records[-1]["next"] == ("7" if shell.scheduler == "slurm" else "8")


def test_a_requeue_without_an_answer_is_looked_up(slurm):
    done = slurm.run("echo unanswered >how; exit 75", requeue_by="requeue")
    assert done.returncode == 0
    assert slurm.records[-1]["next"] == "7"
    assert "To continue" not in done.stdout


def test_sigterm_from_elsewhere_does_not_queue_again(slurm):
    process = slurm.start(SAVES_SOON)
    assert "not from SLURM" in end(process)
    assert not slurm.calls
    assert slurm.records[-1]["continue"]


@with_schedulers("absent", "failing", "hanging", "late")
def test_without_an_answer_a_job_that_got_sigterm_does_not_come_back(shell, how):
    fields = {"requeue_by": "requeue"} if shell.scheduler == "slurm" else {}
    if shell.scheduler == "lsf":
        fields = {"seconds": 1}
    process = shell.start(SAVES_SOON, patience="1", **fields)
    if shell.scheduler == "pbs":
        shell.walltime()
    if shell.scheduler == "slurm":
        shell.answer(TIME_LIMIT)  # told too late
    shell.how(how)
    begin = time.monotonic()
    text = end(process)
    assert time.monotonic() - begin < 2.5
    assert process.returncode == 75
    assert not shell.calls
    assert "does not say why" in text
    assert shell.records[-1]["continue"] in text
    asked = shell.folder / "asked"
    assert not asked.exists() or len(asked.read_text().splitlines()) == 1, "once"


@pytest.mark.parametrize(
    "shell",
    [SCHEDULERS[0], *(pytest.param(one, marks=pytest.mark.long) for one in SCHEDULERS[1:])],
    indirect=True,
)
def test_the_scheduler_has_five_seconds(shell):
    process = shell.start(SAVES_SOON)
    shell.how("late")  # 3 seconds
    shell.answer(CANCELLED[shell.scheduler])
    begin = time.monotonic()
    text = end(process)
    assert time.monotonic() - begin < 5
    assert "does not say why" not in text
    assert "undisturbed 5 " in (shell.folder / "job.sh").read_text()


@with_schedulers("well", "late", "failing", "hanging")
def test_usr1_queues_again_whether_or_not_the_scheduler_says_why(shell, how):
    mode = default_mode(shell)
    process = shell.start(SAVES_SOON, patience="1", requeue_by=mode)
    shell.how(how)
    text = end(process, signal.SIGUSR1)
    assert len(shell.calls) == 1, "one attempt"
    assert shell.calls[0].startswith(
        {
            "slurm": "scontrol requeue 7",
            "pbs": "qsub",
            "lsf": "bsub",
            "flux": "flux --parent batch",
        }[shell.scheduler]
    )
    if how in ("well", "late"):
        assert process.returncode == 0
        assert shell.records[-1]["next"] == ("7" if shell.scheduler == "slurm" else "8")
        return
    assert process.returncode == 75
    if how == "hanging":
        assert "no answer came, so look whether the job is in the queue" in text
        assert shell.records[-1]["continue"] == "", "the scheduler may have queued it"
    else:
        assert "failed: it is not queued again" in text
        assert shell.records[-1]["continue"] in text


@with_schedulers("well")
def test_what_a_site_prints_beside_the_id_is_no_part_of_it(shell, how):
    (shell.folder / "banner").write_text('sbatch: "hello", your project has\t12 hours left\n')
    done = shell.run("exit 75")
    assert done.returncode == 0, done.stdout
    assert shell.records[-1]["next"] == "8"


def test_an_answer_without_an_id_is_told(slurm):
    path = slurm.folder / "bin/sbatch"
    path.write_text("#!/bin/sh\nprintf 'come back\\n\"later\"\\n'\n")
    done = slurm.run("exit 75")
    assert done.returncode == 75
    assert "no job id was told, so look whether the job is in the queue: come back" in done.stdout
    assert "To continue" not in done.stdout
    assert slurm.records[-1]["why"].endswith('come back "later"')


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("set -euo pipefail", ""),
        ("set -e; false; true", "the setup failed: nothing is started"),
        ("exit 0", "the setup failed: nothing is started"),
    ],
)
def test_options_and_exits_of_the_setup_do_not_end_a_job_in_silence(slurm, setup, told):
    done = slurm.run("exit 75", setup=[setup])
    assert done.returncode == (1 if told else 0), done.stdout + done.stderr
    assert told in done.stdout
    assert [record["event"] for record in slurm.records] == ["ended"]
    assert slurm.records[-1]["next"] == ("" if told else "8")


@pytest.mark.parametrize("setup", [[], ["set -e"], ["set -euo pipefail; (kill $$; exit 1); true"]])
def test_a_signal_ends_a_setup_with_and_without_its_set_e_alike(slurm, setup):
    slurm.answer(TIME_LIMIT)
    done = slurm.run("echo never", setup=[*setup, "(kill $$; exit 1)"])
    assert done.returncode == 0, done.stdout
    assert "never" not in done.stdout
    assert len(slurm.calls) == 1


def test_the_program_runs_in_the_folder_of_the_setup_and_the_next_job_begins_in_the_old_one(slurm):
    (slurm.folder / "src").mkdir()
    (slurm.folder / "bin/sbatch").write_text(f"#!/bin/sh\npwd >{slurm.folder}/begins; echo 8\n")
    done = slurm.run("pwd; exit 75", setup=["cd src"])
    assert f"{slurm.folder}/src\n" in done.stdout
    assert (slurm.folder / "begins").read_text() == f"{slurm.folder}\n"
    done = slurm.run("exit 75", setup=["cd src"], max_requeues=0)
    assert [record["next"] for record in slurm.records] == ["8", ""]
    assert slurm.records[-1]["continue"].startswith(f"cd {slurm.folder} && ")


def test_variables_of_the_setup_are_those_of_the_program_and_not_of_the_script(shell):
    names = ["job", "task", "script", "launcher", "command", "count", "line", "name", "code"]
    setup = [f"export {name}=my-{name}" for name in names]
    setup += ["run_dir=other; export max_requeues=0", "end() { exit 3; }", "sbatch=other"]
    tell = " ".join(f"${name}" for name in names)
    done = shell.run(f'echo "{tell}"; exit 75', setup=setup)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " ".join(f"my-{name}" for name in names) in done.stdout
    assert "my-" not in shell.calls[0]
    assert shell.records[-1]["job"] == {"pbs": "7.x"}.get(shell.scheduler, "7")


def test_a_setup_may_change_settings_of_the_script(slurm):
    setup = ['launcher=(echo by me "${launcher[@]}"); command+=(--data "$PWD")', "max_requeues=0"]
    done = slurm.run("exit 75", setup=setup)
    assert f"by me bash -c exit 75 it --data {slurm.folder}\n" in done.stdout
    done = slurm.run("exit 75", setup=setup[1:])
    assert "queued again 0 times, the maximum" in done.stdout


def test_a_setup_that_fails_is_told_of_the_job_whatever_variables_it_has_set(slurm):
    done = slurm.run("exit 0", setup=["set -u; job=mine; run_dir=other; cd /; exit 1"])
    assert done.stdout == "the setup failed: nothing is started\n"
    assert slurm.records[-1]["job"] == "7"


def test_a_trap_of_the_setup_stays(slurm):
    done = slurm.run("exit 0", setup=["trap 'echo removed' EXIT"])
    assert done.returncode == 0
    assert done.stdout.endswith("removed\n")


def test_a_requeue_that_fails_is_no_reason_for_a_second_job(slurm):
    """The job may be pending already."""
    (slurm.folder / "pending").mkdir()
    done = slurm.run("exit 75", requeue_by="requeue")
    assert done.returncode == 75
    assert slurm.calls == ["scontrol requeue 7 queued="]


def test_a_job_that_slurm_may_not_requeue_is_submitted_again(slurm):
    slurm.answer(RUNNING.replace("Requeue=1", "Requeue=0"))
    done = slurm.run("exit 75", requeue_by="requeue")
    assert done.returncode == 0
    assert slurm.calls == [f"sbatch --parsable --export=ALL {slurm.folder}/job.sh queued=1"]


def test_a_task_of_an_array_requeues_itself_alone(slurm):
    """The SLURM_JOB_ID of an array's last task is the array's own number."""
    names = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    done = slurm.run("exit 75", names, requeue_by="requeue", sweep=[["--run.seed", "1"]] * 2)
    assert done.returncode == 0
    assert slurm.calls == ["scontrol requeue 7_1 queued="]
    assert "show job --oneliner 7_1" in (slurm.folder / "asked").read_text()


def test_a_task_that_is_signalled_before_it_has_a_folder_goes_on(shell):
    variable = ARRAYS.get(shell.scheduler, "HPC_TRAIN_TASK")
    sweep = [["--run.seed", "1"], ["--run.seed", "2"]]
    done = shell.run("echo never", {variable: "1"}, sweep=sweep, setup=["kill -USR1 $$"])
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert len(shell.calls) == 1
    if shell.scheduler == "pbs":
        assert shell.calls[0].split()[-2] == "run/task-1/job.sh"
        assert "setup()" in (shell.folder / "again.sh").read_text()


@pytest.mark.parametrize("scheduler", ["pbs", "lsf"])
def test_a_task_whose_script_cannot_be_written_is_not_queued_again(tmp_path, scheduler):
    """bsub and qsub take an empty script, too."""
    shell = Shell(tmp_path, scheduler)
    (tmp_path / "run/task-1").mkdir(parents=True)
    (tmp_path / "run/task-1/job.sh").symlink_to("/dev/full")
    sweep = [["--run.seed", "1"], ["--run.seed", "2"]]
    done = shell.run("exit 75", {ARRAYS[scheduler]: "1"}, sweep=sweep)
    assert done.returncode == 75
    assert "job.sh cannot be copied to run/task-1/job.sh" in done.stdout
    assert "cannot be copied" in (tmp_path / "run/task-1/jobs.jsonl").read_text()
    assert not shell.calls


def test_a_record_after_half_a_line_has_a_line_of_its_own(slurm):
    """The disk may have been full."""
    (slurm.folder / "run").mkdir()
    (slurm.folder / "run/jobs.jsonl").write_text('{"time": 17')
    slurm.run("exit 0")
    with (slurm.folder / "run/jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time"')
    record_queued(slurm.folder / "run", "slurm", "8")
    events = read_events(slurm.folder / "run")
    assert [event["event"] for event in events] == ["ended", "queued"]


def chain(shell: Shell, program: str, jobs: int = 10, **fields) -> int:
    """Run a script until it is not queued again; returns how many jobs there were."""
    for count in range(jobs):
        shutil.rmtree(shell.folder / "new", ignore_errors=True)
        if shell.run(program, {"HPC_TRAIN_QUEUED": str(count)}, **fields).returncode:
            return count + 1
    return jobs


def test_a_chain_stops_after_three_jobs_without_a_newer_checkpoint(shell):
    assert chain(shell, "exit 75") == 3
    assert [record["stalled"] for record in shell.records] == [1, 2, 3]
    assert "3 jobs have ended without a newer checkpoint" in shell.records[-1]["why"]
    assert shell.records[-1]["continue"]
    assert chain(shell, "exit 75") == 3, "who continues it by hand has three more"


@pytest.mark.parametrize("name", ["step-00000000$HPC_TRAIN_QUEUED.safetensors", "last.pt"])
def test_a_chain_with_newer_checkpoints_goes_on(shell, name):
    save = f"mkdir -p run/checkpoints; echo > run/checkpoints/{name}"
    assert chain(shell, f"{save}; exit 75", 5) == 5
    assert {record["stalled"] for record in shell.records} == {0}


def test_a_chain_of_a_loop_whose_checkpoints_are_in_the_run_directory_goes_on(slurm):
    save = "echo > run/step-00000000$HPC_TRAIN_QUEUED.safetensors"
    assert chain(slurm, f"{save}; exit 75", 4) == 4


def test_a_chain_whose_setup_changes_the_folder_goes_on(slurm):
    (slurm.folder / "src").mkdir()
    (slurm.folder / "run").mkdir()
    (slurm.folder / "run/step-times.csv").touch()  # is no checkpoint
    save = "mkdir -p run/checkpoints; echo > run/checkpoints/$HPC_TRAIN_QUEUED.pt"
    assert chain(slurm, f"{save}; sleep 0.01; exit 75", 4, setup=["cd src"]) == 4


def test_a_job_that_saves_the_same_step_again_makes_no_progress(shell):
    save = "mkdir -p run/checkpoints; echo > run/checkpoints/step-000000005.safetensors"
    assert chain(shell, f"{save}; echo x > run/checkpoints/LATEST; exit 75") == 4


def test_the_commands_of_the_submission_are_used(shell, monkeypatch):
    """In the job's PATH they may be missing, or others."""
    monkeypatch.setenv("PATH", shell.environ["PATH"])
    commands = find_commands(shell.scheduler)
    assert set(commands) == set(shell.names)
    (shell.folder / "other").mkdir()
    for name in shell.names:
        other = shell.folder / "other" / name
        other.write_text("#!/bin/sh\nexit 1\n")
        other.chmod(0o755)
    shell.environ["PATH"] = shell.environ["PATH"].replace("/bin:", "/other:", 1)
    assert shell.run("exit 75", commands=commands).returncode == 0
    assert len(shell.calls) == 1


def test_a_path_that_nodes_do_not_have_is_looked_for_by_name(shell):
    commands = {name: f"/no/such/{name}" for name in shell.names}
    assert shell.run("exit 75", commands=commands).returncode == 0
    assert len(shell.calls) == 1


def test_records_are_json_whatever_the_path(shell):
    path = shell.folder / 'a "b" \\c'
    path.mkdir()
    shell.folder, before = path, shell.folder
    for name in ("bin", "answer", "nodes"):
        (before / name).rename(path / name)
    for name in shell.names:  # the stand-ins stay in the folder before
        command = path / "bin" / name
        command.write_text("#!/bin/sh\nexit 1\n")
    shell.environ["PATH"] = f"{path}/bin:/usr/bin:/bin"
    assert shell.run("exit 75").returncode == 75
    line = shell.records[-1]["continue"]
    assert shlex.split(line)[1] == str(path)


# A small model of SLURM. Events come while the ranks save; each changes the job and may signal it.
EVENTS = ("usr1", "cancel", "requeue", "limit", "term")


class Model:
    """A job as SLURM keeps it, and how many there should be of it in the end."""

    def __init__(self, shell: Shell, works: bool) -> None:
        self.shell, self.works = shell, works
        self.state, self.known, self.term = "RUNNING", False, False

    def happen(self, event: str, process: subprocess.Popen[str]) -> None:
        """Change the job, then signal its script, as SLURM does."""
        running = self.state == "RUNNING"
        if event == "cancel" and self.state == "REQUEUED":
            self.state = "CANCELLED"
            (self.shell.folder / "pending").rmdir()
        elif event == "cancel" and running:
            self.state = "CANCELLED"
            self.shell.answer(COMPLETING)
        elif event == "requeue" and running:
            self.state = "REQUEUED"
            self.shell.answer(REQUEUED)
            (self.shell.folder / "pending").mkdir()
        elif event == "limit" and running:
            self.state = "LIMIT"
            self.shell.answer(TIME_LIMIT)
        elif event not in ("usr1", "term"):
            return
        self.term |= event != "usr1"
        self.known |= event == "usr1"
        process.send_signal(signal.SIGUSR1 if event == "usr1" else signal.SIGTERM)

    @property
    def jobs(self) -> int:
        """How many jobs there should be."""
        if self.state in ("CANCELLED", "REQUEUED"):
            return int(self.state == "REQUEUED")
        if not self.works:
            return 0
        return int(self.state == "LIMIT" or (self.known and not self.term))


def mixture(folder: Path, seed: int) -> str:
    """Let events happen to a job; returns "" if the right number of jobs is left."""
    choose = random.Random(seed)
    events = choose.choices(EVENTS, k=choose.randint(1, 3))
    how = choose.choice(["well", "well", "failing", "absent"])
    mode = choose.choice(["requeue", "submit"])
    folder.mkdir()
    shell = Shell(folder, "slurm")
    process = shell.start(SAVES.format(seconds=0.8), patience="1", requeue_by=mode)
    shell.how(how)
    model = Model(shell, how == "well")
    for event in events:
        model.happen(event, process)
        time.sleep(choose.uniform(0.1, 0.2))
    text, _ = process.communicate(timeout=PATIENCE)
    jobs = sum((folder / name).exists() for name in ("pending", "new"))
    saved = "saved" in text and bool(shell.records)
    told = jobs or model.state == "CANCELLED" or shell.records[-1]["continue"]
    if jobs == model.jobs and saved and told:
        return ""
    return f"{seed}: {events} {how} {mode}: {jobs} jobs, not {model.jobs}\n{text}"


def test_after_any_mixture_of_events_there_is_one_job_or_none(tmp_path):
    with ThreadPoolExecutor(6) as pool:
        wrong = pool.map(lambda seed: mixture(tmp_path / str(seed), seed), range(30))
        assert not "\n".join(filter(None, wrong))
