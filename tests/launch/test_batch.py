"""Batch scripts: the recorded ones, what they do, and that no value can run a command."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.launch import TEMPLATES, sites
from hpc_train.launch.batch import BatchJob, text
from hpc_train.launch.containers import Container
from hpc_train.launch.resources import Resources
from hpc_train.launch.schedulers import scheduler_of
from hpc_train.launch.staged import Staging
from tests.launch.job_shell import ARRAYS, PLAIN, SAVES, Shell
from tests.programs import run
from tests.waiting import PATIENCE

SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
RECORDED = Path(__file__).parent / "scripts"
CONTAINER = Container(
    "apptainer", "/project/it.sif", ["--bind", "/opt/cray"], ["/home/me", "/scratch/me"], "/home/me"
)
BATCHES = {
    "slurm.sh": PLAIN,
    "slurm-array.sh": replace(
        PLAIN,
        sweep=[["--optimizer.lr", "1e-3"], ["--optimizer.lr", "1e-4"]],
        resources=replace(PLAIN.resources, seconds=60),
    ),
    "slurm-srun.sh": replace(PLAIN, launcher=["srun", "--kill-on-bad-exit=1"], requeue_by="submit"),
    "pbs.sh": replace(PLAIN, scheduler="pbs", requeue_by="submit"),
    "pbs-array.sh": replace(
        PLAIN,
        scheduler="pbs",
        requeue_by="submit",
        sweep=[["--run.seed", "1"], ["--run.seed", "2"]],
    ),
    "torque.sh": replace(PLAIN, scheduler="torque", requeue_by="submit"),
    "lsf.sh": replace(PLAIN, scheduler="lsf", requeue_by="submit"),
    "lsf-array.sh": replace(
        PLAIN,
        scheduler="lsf",
        requeue_by="submit",
        sweep=[["--run.seed", "1"], ["--run.seed", "2"]],
    ),
    "flux.sh": replace(PLAIN, scheduler="flux", requeue_by="submit"),
    "local.sh": replace(
        PLAIN, scheduler="local", requeue_by="submit", resources=Resources(1, 2, 1, 60)
    ),
    "slurm-stage.sh": replace(
        PLAIN,
        staging=Staging(
            ["srun", "--nodes", "4", "--ntasks", "4", "--ntasks-per-node=1"],
            ["/home/me/venv/bin/python", "-m", "hpc_train", "stage", "--to", "$LOCAL_DISK"],
            "/home/me/venv",
        ),
    ),
    "slurm-image.sh": replace(
        PLAIN,
        launcher=["srun", "--kill-on-bad-exit=1"],
        command=CONTAINER.command(["python3", "-m", "hpc_train", "train", "my.yaml"], 8),
        environ={"HPC_TRAIN_WARM": "off"},
    ),
    "pbs-image.sh": replace(
        PLAIN,
        scheduler="pbs",
        requeue_by="submit",
        launcher=[*PLAIN.launcher[:-1], *CONTAINER.as_options, "--"],
    ),
    "mpijob.yaml": replace(
        PLAIN,
        scheduler="mpijob",
        image="registry.example.org/it:1",
        configuration="run: {steps: 5}\n",
        resources=Resources(4, 2, 3, gpus=2, memory_gb=64, gpu_option="nvidia.com/gpu"),
    ),
}
# The scripts in jobscripts/, which are ready to be copied.
COPIES = {
    f"{scheduler}.sh": BatchJob(
        scheduler=scheduler,
        name="hpc_train",
        resources=Resources(2, 4, 8, 7200),
        command=["hpc-train", "train", "my.yaml"],
        run_dir="runs/my",
        launcher=[
            *("hpc-train", "launch", "--max_restarts", "3"),
            *scheduler_of(scheduler).launch_words(Resources(2, 4, 8), {}),
            "--",
        ],
        script="job.sh",
        requeue_by="requeue" if scheduler == "slurm" else "submit",
        setup=[
            "module load python openmpi",
            "# shellcheck source=/dev/null",
            ". ~/hpc/bin/activate",
        ],
        here=True,
    )
    for scheduler in ("slurm", "pbs", "lsf", "flux")
}
SCHEDULERS = ["slurm", "pbs", "lsf", "flux"]


def of(scheduler, **fields):
    """The plain job, for another scheduler."""
    return replace(PLAIN, scheduler=scheduler, **fields)


def with_resources(batch, **fields):
    return replace(batch, resources=replace(batch.resources, **fields))


def files():
    """The path and the batch of each recorded script."""
    yield from ((RECORDED / name, batch) for name, batch in BATCHES.items())
    yield from ((TEMPLATES / name, batch) for name, batch in COPIES.items())


def recorded(batch):
    """The script, with a Python that does not depend on the machine."""
    return text(batch).replace(sys.executable, "python")


@pytest.mark.parametrize(("path", "batch"), list(files()), ids=str)
def test_scripts_are_the_recorded_ones(path, batch):
    """To record them anew after a change: python -m tests.launch.test_batch."""
    assert recorded(batch) == path.read_text()


@pytest.mark.parametrize("path", [*TEMPLATES.glob("*.sh"), *RECORDED.glob("*.sh")], ids=str)
def test_shellcheck_finds_nothing(path):
    done = run(SHELLCHECK, str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", sites.names())
def test_every_site_has_a_script(name, tmp_path):
    site = sites.load_site(name)
    config = tmp_path / "my.yaml"
    config.write_text("run: {dir: runs/my}\n")
    words = ["submit", str(config), "--site", name, "--account", "p1", "--nodes", "2", "--dry_run"]
    words += [word for begin in site.needs_directives for word in ("--directive", f"{begin}x")]
    words += ["--queue", "q"] if "queue" in site.needs else []
    done = run(sys.executable, "-m", "hpc_train", *words)
    assert done.returncode == 0, done.stderr
    assert {*site.needs} <= {"account", "queue"}
    assert "{" not in "".join(line for line in done.stdout.splitlines() if line.startswith("#"))
    script = tmp_path / "job.sh"
    script.write_text(done.stdout)
    checked = run(SHELLCHECK, str(script))
    assert checked.returncode == 0, checked.stdout
    about = (sites.SITES / f"{name}.yaml").read_text().replace("\n# ", " ").lower()
    assert "not run there" in about


ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@settings(max_examples=40)
@given(words=st.lists(ANY_TEXT, min_size=1, max_size=4), run_dir=ANY_TEXT, value=ANY_TEXT)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_shell_words_arrive_as_they_are(scheduler, words, run_dir, value):
    """Up to the launcher's line the script is run, with a program in its place that tells them."""
    batch = of(scheduler, command=words, environ={"SOME": value})
    batch = replace(batch, script=run_dir, setup=[], launcher=["printf", "%s\\0"])
    script = text(batch).partition("# The rest need not be changed.")[0]
    script += '"${launcher[@]}" "${command[@]}" "$script" "$SOME"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={})
    assert done.stdout.decode().split("\0")[:-1] == [*words, run_dir, value]


@given(ANY_TEXT)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("field", ["name", "account", "queue", "run_dir"])
def test_directives_take_plain_words_only(scheduler, field, value):
    own, sign = {field: value}, scheduler_of(scheduler).sign
    try:
        batch = of(scheduler)
        made = replace(batch, **own) if hasattr(batch, field) else with_resources(batch, **own)
        script = text(made)
    except UserError as error:
        assert "cannot be used" in str(error)
        return
    directives = [line for line in script.splitlines() if line.startswith(sign)]
    usual = text(of(scheduler)).splitlines()
    assert len(directives) == sum(line.startswith(sign) for line in usual)
    # SLURM reads %% in the name of an output as %.
    assert any(value in line.replace("%%", "%") or value in line for line in directives)
    assert not set(value) & set(" \t\n\r;&$`'\"\\<>(){}!#\x0b\x0c\x85\u2028")


def test_lsf_would_put_numbers_into_the_name_of_a_run_directory():
    """It replaces %J and the like in the name of an output, and knows no sign for % itself."""
    with pytest.raises(UserError, match="LSF puts numbers in place of %"):
        text(of("lsf", run_dir="runs/50%J"))


@pytest.mark.parametrize("directive", ["--wrap=`id`", "-q a\n#PBS -q b", "$(id)", "a;b'", ""])
def test_strange_directives_are_refused(directive):
    with pytest.raises(UserError, match="cannot be a directive"):
        text(with_resources(PLAIN, directives=[directive]))


SCHEMA = yaml.safe_load(Path(__file__).with_name("mpijob-schema.yaml").read_text())


@pytest.mark.parametrize("path", [TEMPLATES / "mpijob.yaml", RECORDED / "mpijob.yaml"], ids=str)
def test_mpijobs_fit_their_operators_schema(path):
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


def test_an_mpijob_has_what_was_asked_for():
    tree = yaml.safe_load(text(BATCHES["mpijob.yaml"]))
    jsonschema.validate(tree, SCHEMA)
    spec = tree["spec"]
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    assert spec["slotsPerWorker"] * worker["replicas"] == 8
    container = launcher["template"]["spec"]["containers"][0]
    assert container["command"] + container["args"] == [*PLAIN.launcher, *PLAIN.command]
    pods = [launcher["template"]["spec"], worker["template"]["spec"]]
    for pod in pods:
        assert pod["containers"][0]["image"] == "registry.example.org/it:1"
        mounts = {
            mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]
        }
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "configMap" in volumes[mounts["/etc/hpc_train/job.yaml"]], "ranks read it"
        assert {"name": "OMP_NUM_THREADS", "value": "3"} in pod["containers"][0]["env"]
    limits = pods[1]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": 6, "memory": "64G", "nvidia.com/gpu": 2}
    for wrong in ("My_run", "a b", "-a"):
        with pytest.raises(UserError, match="Kubernetes"):
            text(replace(BATCHES["mpijob.yaml"], name=wrong))


def test_kubernetes_reads_strings_and_leaves_dollars_alone():
    """It reads YAML 1.2, and replaces $(NAME) and $$ in words and in variables."""
    words = ["1e-3", "1e3", "0o17", "y", "0x1f", "1_0", "2026-01-01", "~", "$$", "$(HOME)", "ö\n"]
    batch = replace(BATCHES["mpijob.yaml"], launcher=words, command=words)
    written = text(replace(batch, environ={"RATE": "1e-3", "HERE": "$(HOME)"}))
    assert written.isascii()
    for word in words[:8]:
        assert written.count(f'- "{word}"\n') == 2
    pod = yaml.safe_load(written)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == [*words[:8], "$$$$", "$$(HOME)", "ö\n"]
    assert container["command"] == container["args"]
    assert [variable["value"] for variable in container["env"]] == ["3", "1e-3", "$$(HOME)"]
    assert 'value: "1e-3"' in written


@pytest.fixture(params=SCHEDULERS)
def shell(request, tmp_path):
    return Shell(tmp_path, request.param)


@pytest.mark.parametrize("scheduler", ["pbs", "lsf"])
def test_the_time_of_the_login_shell_counts_for_the_jobs_end(tmp_path, scheduler):
    """These schedulers count from the shell's start. It reads the profile before the script."""
    shell = Shell(tmp_path, scheduler)
    done = shell.run("echo end $HPC_TRAIN_DEADLINE", {"SECONDS": "60"}, seconds=600)
    end = int(re.search("^end ([0-9]+)$", done.stdout, re.MULTILINE)[1])
    assert 500 < end - time.time() < 542, "the shell has begun 60 seconds ago"


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_a_job_is_queued_again_only_if_it_stopped_early(shell, code):
    done = shell.run(f"exit {code}")
    assert done.returncode == (0 if code == 75 else code), done.stderr
    assert len(shell.calls) == (code == 75)
    if code == 75:
        script = f"{shell.folder}/job.sh"
        words = {
            "slurm": f"sbatch --parsable --export=ALL {script} queued=1",
            "pbs": f"qsub -v HPC_TRAIN_QUEUED=1,HPC_TRAIN_TASK= {script} queued=",
            "lsf": "bsub  queued=1",
            "flux": f"flux --parent batch {script} queued=1",
        }
        assert shell.calls == [words[shell.scheduler]]
    if code == 75 and shell.scheduler in ("pbs", "lsf"):
        assert (shell.folder / "again.sh").read_text() == (shell.folder / "job.sh").read_text()


def test_a_job_is_not_queued_again_more_often_than_it_may(shell):
    assert shell.run("exit 75", {"HPC_TRAIN_QUEUED": "2"}, max_requeues=3).returncode == 0
    assert len(shell.calls) == 1
    done = shell.run("exit 75", {"HPC_TRAIN_QUEUED": "3"}, max_requeues=3)
    assert "not" in done.stdout.splitlines()[-1]
    assert len(shell.calls) == 1


def test_a_file_stop_ends_it_for_good(shell):
    assert shell.run("mkdir -p run; touch run/STOP; exit 75").returncode == 75
    assert not shell.calls
    done = shell.run("echo never")
    assert done.returncode == 75
    assert "run/STOP is there" in done.stdout
    assert "never" not in done.stdout
    assert shell.records[-1]["why"] == "run/STOP is there"
    assert not shell.calls


def test_a_job_that_is_cancelled_as_it_starts_ends_as_a_cancelled_one(tmp_path):
    """The training refuses a run that has STOP."""
    shell = Shell(tmp_path, "slurm")
    assert shell.run("touch run/STOP; exit 2").returncode == 75
    assert shell.records[-1]["why"] == "run/STOP is there"


def test_a_watch_that_cannot_start_is_tried_less_and_less_often(tmp_path):
    shell = Shell(tmp_path, "slurm")
    commands = {
        **dict.fromkeys(("squeue", "scontrol"), "echo node2"),
        "srun": "exit 1",
        "sleep": 'echo "$1" >>slept; exec /bin/sleep 0.01',
    }
    for name, line in commands.items():
        (shell.folder / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (shell.folder / "bin" / name).chmod(0o755)
    start = "until grep -q 300 slept; do /bin/sleep 0.02; done"
    script = shell.script(start, requeue_by="requeue")
    script.write_text(script.read_text().replace("no_kill=\n", "no_kill=yes\n"))
    environ = shell.environ
    subprocess.run(["bash", script], cwd=tmp_path, env=environ, check=True, timeout=PATIENCE)
    pauses = [word for word in (shell.folder / "slept").read_text().split() if word != "0.2"]
    assert pauses[:7] == ["5", "10", "20", "40", "80", "160", "300"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_launcher_and_its_code_the_script(shell, number):
    process = shell.start(SAVES.format(seconds=0.3))
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE)
    assert "saved" in text
    assert shell.records[-1]["code"] == process.returncode
    assert process.returncode == (0 if number == signal.SIGUSR1 else 75)
    assert len(shell.calls) == (number == signal.SIGUSR1)


def test_a_signal_that_comes_too_early_loses_nothing(shell):
    """During the setup, and before the program has a handler."""
    done = shell.run("echo never", setup=["kill -USR1 $$"])
    assert done.returncode == 0
    assert "never" not in done.stdout
    (shell.folder / "new").rmdir()
    done = shell.run("kill -USR1 $PPID; sleep 10")
    assert done.returncode == 0
    assert len(shell.calls) == 2, "it is queued again"


def test_a_signal_that_ends_a_command_of_the_setup_queues_again(shell):
    """A scheduler may signal all processes of a job."""
    done = shell.run("echo never", setup=["kill -USR1 $$; false"])
    assert done.returncode == 0
    assert "never" not in done.stdout
    assert len(shell.calls) == 1


STAGES = """case "$*" in
    *--clean) rm -r copies; echo removed ;;
    *) [ ! -e full ] && mkdir -p copies && echo 'export HPC_TRAIN_STAGED=copies' >copies/activate ;;
esac"""
STAGING = Staging(["bash", "-c", STAGES], ["bash", "-c", "echo copies"], "/env")


def test_staged_programs_run_from_the_copies_which_are_removed_at_the_end(shell):
    start = 'echo "$0 of $HPC_TRAIN_STAGED, $(cat copies/activate)"'
    done = shell.run(start, staging=STAGING, command=["/env/bin/it"])
    assert done.returncode == 0, done.stderr
    assert "copies/environment/bin/it of copies, export" in done.stdout
    assert done.stdout.endswith("removed\n")


def test_the_copies_are_removed_before_slurm_requeues_the_job(tmp_path):
    """`scontrol requeue` ends the script at once."""
    shell = Shell(tmp_path, "slurm")
    stages = STAGES.replace("rm -r copies;", "cat told 2>/dev/null; rm -r copies;")
    staging = replace(STAGING, launcher=["bash", "-c", stages])
    environ = {"SLURM_JOB_END_TIME": "2000000000"}
    start = "echo end $HPC_TRAIN_DEADLINE; exit 75"
    done = shell.run(start, environ, staging=staging, requeue_by="requeue")
    assert any("requeue" in call for call in shell.calls)
    assert done.stdout.count("removed\n") == 1
    assert "requeue" not in done.stdout.partition("removed")[0]
    assert "end 1999999990\n" in done.stdout, "there is time for it"


def test_a_job_says_which_copies_it_could_not_remove(shell):
    stages = STAGES.replace("rm -r copies;", "exit 1;")
    done = shell.run("true", staging=replace(STAGING, launcher=["bash", "-c", stages]))
    assert "the copies were not removed from all nodes: look for copies there" in done.stdout
    assert not (shell.folder / "copies").exists()


def test_copies_that_cannot_be_removed_soon_do_not_keep_slurm_from_requeueing(tmp_path):
    """After its time limit a job is killed soon, 30 seconds later as SLURM is installed."""
    shell = Shell(tmp_path, "slurm")
    staging = replace(
        STAGING, launcher=["bash", "-c", STAGES.replace("rm -r", "exec sleep 70; rm")]
    )
    begin = time.monotonic()
    done = shell.run("exit 75", staging=staging, requeue_by="requeue", patience="1")
    assert done.returncode == 0
    assert time.monotonic() - begin < 20
    assert len(shell.calls) == 1


def test_a_staging_that_fails_is_told_and_nothing_is_started(shell):
    (shell.folder / "full").touch()
    done = shell.run("echo started", staging=STAGING)
    assert done.returncode == 1
    assert "the staging failed: nothing is started" in done.stdout
    assert "started\n" not in done.stdout.replace("nothing is started\n", "")
    assert shell.records[-1]["why"] == "the staging failed"


@pytest.mark.parametrize("number", range(3))
def test_each_line_of_the_setup_has_to_work(shell, number):
    """A module that is not there must not be hidden by the next line."""
    setup = ["true", ": # a comment", "if true; then true; fi"]
    setup.insert(number, "false # here")
    done = shell.run("echo never", setup=setup)
    assert done.returncode == 1
    assert done.stdout == "the setup failed: nothing is started\n"
    assert shell.records[-1]["why"] == "the setup failed"
    assert shell.records[-1]["code"] == 1


@pytest.mark.parametrize("text", ["false\n:", "false\n:\n", ":\nfalse\nif :; then\n:\nfi\n:"])
def test_each_line_of_a_text_in_the_setup_has_to_work(shell, text):
    done = shell.run("echo never", setup=[text])
    assert done.returncode == 1
    assert done.stdout == "the setup failed: nothing is started\n"


@pytest.mark.parametrize(
    "text",
    [
        "cat <<EOF >/dev/null\nif\nEOF\na=1",
        "if true; then\n  a=1\nfi\n",
        "a=0\n\n# and then\nf() {\n  a=1\n}\nf",
        "export \\\n  a=1",
        "true &&\na=1",
        "a='1\n'\na=1",
    ],
)
def test_a_text_in_the_setup_may_have_commands_of_several_lines(shell, text):
    done = shell.run("echo $a; exit 0", setup=["export a", text])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1"


@pytest.mark.parametrize("line", ["# no more", "true; ", "sleep 0 &", "a=1 # b", "true && true"])
def test_setup_lines_of_any_form_are_run(shell, line):
    done = shell.run("echo $a; exit 0", setup=["export a", line])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == ("1" if "a=1" in line else "")


@pytest.mark.parametrize(
    "line", ["if true; then", "echo 'a", "a() {", "cat <<EOF", "true\nfi", "true \\"]
)
def test_a_setup_line_that_is_no_command_is_refused(line):
    with pytest.raises(UserError, match="no command by itself"):
        text(replace(PLAIN, setup=[line]))


def test_warnings_of_a_starting_shell_refuse_no_setup_line(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/not/there.so")
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    line = ": this line has not been checked before"
    assert line in text(replace(PLAIN, setup=[line]))
    with pytest.raises(UserError, match="no command by itself"):
        text(replace(PLAIN, setup=["cat <<ANOTHER"]))


@pytest.mark.parametrize(
    ("launcher", "survives"),
    [
        (["hpc-train", "launch", "--"], True),
        (["/v/bin/python", "-m", "hpc_train", "launch", "--launcher", "horovodrun", "--"], True),
        (["srun", "--mpi=pmix"], False),
        (["mpirun", "-np", "8"], False),
    ],
)
def test_slurm_keeps_a_job_that_has_lost_a_node_only_for_a_launcher_that_goes_on(
    launcher, survives
):
    script = text(replace(PLAIN, launcher=launcher))
    assert ("#SBATCH --no-kill" in script) == survives
    assert ("no_kill=yes" in script) == survives
    assert "#SBATCH --requeue" in script, "without it SLURM queues the job again"


def test_slurms_restarts_and_ours_are_added_up(tmp_path):
    shell = Shell(tmp_path, "slurm")
    counts = {"HPC_TRAIN_QUEUED": "1", "SLURM_RESTART_COUNT": "2"}
    assert shell.run("exit 75", counts, max_requeues=4).returncode == 0
    assert shell.calls[0].endswith("queued=4")
    assert shell.run("exit 75", counts, max_requeues=3).returncode == 75
    assert len(shell.calls) == 1


def test_a_file_stop_ends_all_tasks_of_an_array(shell):
    variable = ARRAYS.get(shell.scheduler, "HPC_TRAIN_TASK")
    (shell.folder / "run").mkdir()
    (shell.folder / "run/STOP").touch()
    done = shell.run("echo never", {variable: "0"}, sweep=[["--run.seed", "1"]])
    assert done.returncode == 75
    assert "run/STOP is there" in done.stdout
    assert "never" not in done.stdout


def test_tasks_of_an_array_have_directories_of_their_own_and_go_on_alone(shell):
    variable = ARRAYS.get(shell.scheduler, "HPC_TRAIN_TASK")
    first = scheduler_of(shell.scheduler).first_task
    sweep = [["--run.seed", str(task + 1)] for task in (first, first + 1)]
    (shell.folder / "run/task-1").mkdir(parents=True)  # as the training does
    done = shell.run('echo "$@"; exit 75', {variable: "1"}, sweep=sweep, tasks_at_once=2)
    assert "--run.seed 2 --run.dir run/task-1" in done.stdout.splitlines()
    if shell.scheduler == "slurm":
        assert "--array=1" in shell.calls[0]
    if shell.scheduler not in ("pbs", "lsf"):
        return
    script = (shell.folder / "again.sh").read_text()
    assert "#PBS -J" not in script
    assert "[1-2]" not in script
    assert "%2" not in script
    if shell.scheduler == "pbs":
        assert "HPC_TRAIN_TASK=1" in shell.calls[0]
    again = subprocess.run(
        ["bash", str(shell.folder / "again.sh")],
        env=shell.environ | {"HPC_TRAIN_TASK": "1"},
        cwd=shell.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--run.seed 2 --run.dir run/task-1" in again.stdout.splitlines()


def test_pbs_tells_the_program_its_deadline(tmp_path):
    begin = int(time.time())
    done = Shell(tmp_path, "pbs").run("echo $HPC_TRAIN_DEADLINE")
    assert 0 <= int(done.stdout.splitlines()[-1]) - begin - PLAIN.resources.seconds < 30


@pytest.mark.parametrize("name", ["slurm", "pbs", "lsf", "flux"])
def test_the_scripts_run_as_they_are(tmp_path, name):
    """A user's copy, with nothing edited but the launcher."""
    shell = Shell(tmp_path, name)
    raw = (TEMPLATES / f"{name}.sh").read_text()
    lines = [line for line in raw.splitlines() if not line.startswith("launcher=")]
    at = next(i for i, line in enumerate(lines) if line.startswith("requeue_by="))
    lines.insert(at, f"launcher=({shlex.join(['echo', 'started'])}); module() {{ :; }}")
    script = "\n".join(lines).replace(". ~/hpc/bin/activate", ":")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=shell.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "started hpc-train train my.yaml"


if __name__ == "__main__":
    for path, batch in files():
        path.write_text(recorded(batch))
