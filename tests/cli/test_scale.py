"""`hpc-train scale` as a user calls it, with a scheduler that takes notes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from hpc_train.cli import main
from tests.cli.desk import Desk
from tests.programs import ENVIRON, hear_ctrl_c, hpc_train, only_line
from tests.scaling.studies import write_run
from tests.waiting import PATIENCE

CONFIG = "run: {dir: runs/my, steps: 100}\ndata: {batch: 16}\n"


@pytest.fixture
def desk(tmp_path):
    made = Desk(tmp_path)
    (tmp_path / "my.yaml").write_text(CONFIG)
    made.scheduler("sbatch")
    made.scheduler("squeue", says="")
    return made


def scale(desk, *words, **environ):
    return desk.run("scale", "my.yaml", "--steps", "4", *words, **environ)


def submitted(desk):
    """The run directories in the order of their jobs."""
    return [line.split("/")[-2] for line in desk.calls("sbatch")]


def test_runs_are_submitted_in_turn_and_finished_ones_are_used(desk):
    words = ["--nodes", "4,1,2", "--repeats", "2", "--no_wait", "--time", "00:10:00"]
    done = scale(desk, *words)
    assert done.returncode == 0, done.stderr
    assert "no run has a result yet" in done.stderr
    order = [f"nodes-{n}-run-{repeat}" for repeat in (1, 2) for n in (1, 2, 4)]
    assert submitted(desk) == order
    script = (desk.folder / "runs/my-scale/nodes-4-run-2/job.sh").read_text()
    for part in (
        "#SBATCH --nodes=4\n",
        "#SBATCH --time=00:10:00\n",
        "requeue_by=never",
        "--run.performance_test 4 ",
        "--data.batch 16 ",
        "--parallel.dp 4",
    ):
        assert part in script
    for name in order[:-1]:
        write_run(desk.folder / "runs/my-scale" / name, int(name.split("-")[1]), 0.5)
    done = scale(desk, *words)
    assert done.returncode == 0, done.stderr
    assert "5 runs are finished already" in done.stderr
    assert submitted(desk) == [*order, order[-1]]
    assert done.stdout.startswith("The training my was run on 1, 2 and 4 nodes")
    assert done.stdout == (desk.folder / "runs/my-scale/scale.txt").read_text()
    assert (desk.folder / "runs/my-scale/scale.html").exists()


@pytest.mark.parametrize(
    ("scheduler", "submit", "says", "asked"),
    [
        ("lsf", "bsub", "Job <7> is submitted to queue <q>.", ["#BSUB -n 6", "-R span[ptile=3]"]),
        ("flux", "flux", "f7", ["# flux: --nodes=2", "# flux: --cores-per-slot=3"]),
        ("pbs", "qsub", "7.pbs", ["#PBS -l select=2:ncpus=3:mpiprocs=3"]),
    ],
)
def test_runs_of_other_schedulers_ask_for_their_nodes(desk, scheduler, submit, says, asked):
    desk.scheduler(submit, says=says)
    words = ["--nodes", "2", "--repeats", "1", "--no_wait", "--ranks_per_node", "3"]
    done = scale(desk, *words, "--scheduler", scheduler, "--data.batch", "18")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is submitted as job") == 1
    script = (desk.folder / "runs/my-scale/nodes-2-run-1/job.sh").read_text()
    for part in (*asked, "--run.performance_test 4 ", "--data.batch 18 ", "--parallel.dp 6"):
        assert part in script.replace('"', ""), script
    assert "requeue_by=never" in script


def test_a_run_in_the_queue_is_not_submitted_again(desk):
    words = ["--nodes", "1", "--repeats", "1", "--no_wait"]
    assert scale(desk, *words).returncode == 0
    desk.scheduler("squeue", says="1|RUNNING|||0:01|node1|")
    done = scale(desk, *words)
    assert done.returncode == 0, done.stderr
    assert len(submitted(desk)) == 1


def test_a_run_that_fails_is_named_with_its_cause_and_the_page_is_made_of_the_others(desk):
    folder = desk.folder / "study"
    write_run(folder / "nodes-1-run-1", 1, 1.0)
    write_run(folder / "nodes-2-run-1", 2, 0.6)
    failing = folder / "nodes-4-run-1"
    ended = json.dumps({"event": "ended", "job": "1", "code": 2, "next": ""})
    told = "hpc-train: error: data.path is not given: give it"
    desk.command(
        "sbatch", f"echo '{told}' > {failing}/x.out; echo '{ended}' > {failing}/ended; echo 1"
    )
    words = hpc_train(
        *["scale", "my.yaml", "--steps", "4", "--nodes", "1,2,4", "--repeats", "1"],
        *["--out", str(folder)],
    )
    process = subprocess.Popen(
        words,
        cwd=desk.folder,
        env=ENVIRON | {"PATH": f"{desk.folder}/bin"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while "is submitted" not in process.stderr.readline():
        assert process.poll() is None
    with (failing / "jobs.jsonl").open("a") as file:
        file.write((failing / "ended").read_text())
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    assert "nodes-4-run-1 has failed: data.path is not given: give it" in errors
    assert "run on 1 and 2 nodes" in out


def test_ctrl_c_leaves_the_jobs_and_the_same_command_continues(desk):
    words = hpc_train("scale", "my.yaml", "--nodes", "1,2", "--steps", "4", "--repeats", "1")
    process = subprocess.Popen(
        words,
        cwd=desk.folder,
        env=ENVIRON | {"PATH": f"{desk.folder}/bin"},
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    )
    while "nodes-2-run-1 is submitted" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert "the same command continues" in errors


def test_a_dry_run_lists_the_runs_and_starts_nothing(desk):
    done = scale(desk, "--nodes", "1,2", "--weak", "--dry_run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert "--data.batch 32" in lines[1]
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--nodes"),
        (["--nodes", "1,x"], "is not a list of numbers of nodes"),
        (["--nodes", "0"], "is not a list of numbers of nodes"),
        (["--nodes", "1,3"], "on 3 nodes data.batch 16 is not divisible"),
        (["--nodes", "1", "--weak", "--strong"], "not allowed with"),
        (["--nodes", "1", "--warmup", "4"], "give more steps"),
        (["--nodes", "1", "--steps", "1", "--warmup", "0"], "--steps is 1: give 2 or more"),
        (["--nodes", "1", "--run.dir", "x"], "leave it out; --out names the folder"),
        (["--nodes", "1", "--sweep", "run.seed=1,2"], "--sweep cannot be given to scale"),
        (["--nodes", "1", "--requeue_by", "submit"], "--requeue_by cannot be given"),
        (["--nodes", "1", "--least_efficiency", "2"], "is not a share between 0 and 1"),
        (
            ["--nodes", "1", "--scheduler", "local", "--out", "x", "--queue", "q"],
            "--queue means nothing",
        ),
        (["--nodes", "1", "--scheduler", "local", "--out", "x", "--no_wait"], "started here"),
        (["--nodes", "1", "--cores", "4"], "--cores is for runs that are started here"),
        (["--nodes", "1", "--nonsense", "2"], "--nonsense"),
        (["--nodes", "1", "--run.sede", "2"], "did you mean --run.seed"),
        (["--nodes", "1", "--", "python", "x.py"], "no command after --"),
    ],
)
def test_mistakes_are_one_line(desk, monkeypatch, capsys, words, message):
    monkeypatch.chdir(desk.folder)
    assert main(["scale", "my.yaml", "--steps", "4", *words]) == 2
    assert message in only_line(capsys.readouterr().err)
    assert not (desk.folder / "runs").exists()
    assert not (desk.folder / "x").exists()


def test_a_job_has_too_few_nodes_for_the_study(desk):
    done = scale(desk, "--nodes", "1,4", SLURM_JOB_NODELIST="n[1-2]", SLURM_TASKS_PER_NODE="1(x2)")
    assert done.returncode == 2, done.stderr
    assert "--nodes has 4, and this job has 2 nodes" in only_line(done.stderr)
