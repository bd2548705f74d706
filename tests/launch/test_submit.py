"""`hpc-train submit` and `cancel` as a user calls them, with a scheduler that takes notes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.programs import hpc_train, only_line, run


class Desk:
    """A folder with a configuration, and schedulers' commands in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "my.yaml").write_text("run: {dir: 'runs/my', steps: 5}\n")
        (folder / "bin").mkdir()

    def scheduler(self, name: str, code: int = 0) -> None:
        path = self.folder / "bin" / name
        path.write_text(
            f'#!/bin/sh\necho "$*" >> {self.folder}/{name}.calls\n'
            f"if [ {code} != 0 ]; then echo 'invalid account' >&2; exit {code}; fi\n"
            f"/usr/bin/wc -l < {self.folder}/{name}.calls\n"
        )
        path.chmod(0o755)

    def run(self, *words: str):
        return run(*hpc_train(*words), cwd=self.folder, environ={"PATH": f"{self.folder}/bin"})

    def calls(self, name: str) -> list[str]:
        return (self.folder / f"{name}.calls").read_text().splitlines()


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_a_job_is_queued_with_its_script_beside_its_outputs(desk):
    desk.scheduler("sbatch")
    options = ["--nodes", "2", "--ranks_per_node", "4", "--time", "00:10:00", "--run.seed", "3"]
    done = desk.run("submit", "my.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    script = desk.folder / "runs/my/job.sh"
    assert desk.calls("sbatch") == [f"--parsable {script}"]
    text = script.read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    command = next(line for line in text.splitlines() if line.startswith("command="))
    words = shlex.split(command.removeprefix("command=(").removesuffix(")"))
    assert words[-4:] == ["train", "my.yaml", "--run.seed", "3"]
    assert os.access(script, os.X_OK)
    if sys.prefix != sys.base_prefix:
        assert f". {sys.prefix}/bin/activate || return\n" in text, (
            "whether or not it is activated here"
        )


def test_a_dry_run_queues_and_writes_nothing(desk):
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", "--nodes", "2", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash -l\n#PBS -N my\n#PBS -l select=2:ncpus=1:mpiprocs=1")
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("time", ["36:00:00", "1-12:00:00", "36h", "1d12h"])
def test_a_time_limit_has_several_forms(desk, time):
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", "--time", time, "--dry_run")
    assert "#SBATCH --time=36:00:00\n" in done.stdout


def test_a_chain_waits_for_the_job_before(desk):
    desk.scheduler("sbatch")
    done = desk.run("submit", "my.yaml", "--chain", "3")
    assert done.stdout.split() == ["1", "2", "3"]
    assert "requeue_by=never" in (desk.folder / "runs/my/job.sh").read_text()
    waits = "--parsable --dependency=afternotok:{} --kill-on-invalid-dep=yes"
    assert desk.calls("sbatch")[1].startswith(waits.format(1))
    assert desk.calls("sbatch")[2].startswith(waits.format(2))


def test_a_sweep_is_an_array(desk):
    words = ["--sweep", "optimizer.lr=1e-3,1e-4", "run.seed=1,2", "--scheduler", "slurm"]
    done = desk.run("submit", "my.yaml", *words, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-3\n" in done.stdout
    assert "    2) command+=(--optimizer.lr 1e-4 --run.seed 1) ;;\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither sbatch nor qsub is here"),
        (["--scheduler", "slurm"], "sbatch is not here"),
        (["--scheduler", "lsf"], "--scheduler"),
        (["--scheduler", "mpijob"], "give --image"),
        (["--scheduler", "pbs", "--chain", "2"], "--chain means nothing to pbs"),
        (["--scheduler", "slurm", "--chain", "2", "--sweep", "run.seed=1,2"], "--sweep"),
        (["--scheduler", "slurm", "--chain", "2", "--requeue_by", "submit"], "--requeue_by"),
        (["--scheduler", "torque", "--requeue_by", "requeue"], "give --requeue_by submit"),
        (
            ["--scheduler", "slurm", "--requeue_by", "never", "--max_requeues", "3"],
            "--max_requeues",
        ),
        (["--scheduler", "slurm", "--chain", "2", "--max_requeues", "3"], "--max_requeues"),
        (["--scheduler", "slurm", "--image", "x"], "--image means nothing to slurm"),
        (["--scheduler", "mpijob", "--image", "x", "--time", "01:00:00"], "--time"),
        (["--scheduler", "mpijob", "--image", "x", "--account", "me"], "--account"),
        (["--scheduler", "mpijob", "--image", "x", "--setup", "true"], "--setup"),
        (["--scheduler", "mpijob", "--image", "x", "--sweep", "run.seed=1"], "--sweep"),
        (["--scheduler", "slurm", "--launcher", "srun", "--max_restarts", "2"], "--max_restarts"),
        (["--scheduler", "slurm", "--time", "soon"], "--time is 'soon'"),
        (["--scheduler", "slurm", "--time", "30"], "--time is '30': give HH:MM:SS, D-HH:MM:SS or"),
        (["--scheduler", "slurm", "--time", "00:00:00"], "--time is '00:00:00'"),
        (["--scheduler", "slurm", "--nodes", "0"], "nodes"),
        (["--scheduler", "slurm", "--name", "a b"], "'a b' cannot be used"),
        (["--scheduler", "slurm", "--sweep", "run.sed=1"], "did you mean run.seed"),
        (["--scheduler", "slurm", "--sweep", "run.seed"], "write section.key=VALUE,VALUE"),
        (["--scheduler", "slurm", "--sweep", "run.dir=a,b"], "a directory of its own"),
        (["--scheduler", "slurm", "--sweep", "run.seed=1,2", "run.seed=3"], "twice"),
        (["--scheduler", "slurm", "--sweep", "optimizer.lr=1e-3,abc"], "optimizer.lr"),
        (["--scheduler", "pbs", "--sweep", "run.seed=1"], "a single task"),
        (
            ["--scheduler", "pbs", "--launcher", "srun"],
            "srun is for SLURM, and the scheduler is pbs",
        ),
        (["--scheduler", "torque", "--launcher", "mpirun", "--threads", "2"], "slots are cores"),
        (["--site", "lumi", "--account", "x", "--threads", "2"], "--threads is 7"),
        (["--scheduler", "slurm", "--run.sede", "1"], "did you mean run.seed"),
        (["--site", "nowhere"], "there is no site profile nowhere: take aurora"),
        (["--site", "frontier"], "give --account"),
        (["--site", "frontier", "--scheduler", "pbs", "--account", "x"], "frontier has slurm"),
    ],
)
def test_mistakes_are_one_line(desk, words, message):
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)
    assert not (desk.folder / "runs").exists()


def test_an_mpijob_is_written(desk):
    words = ["--scheduler", "mpijob", "--image", "x:1", "--nodes", "2", "--ranks_per_node", "4"]
    done = desk.run(
        "submit", "my.yaml", *words, "--threads", "3", "--max_requeues", "7", "--dry_run"
    )
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    assert spec["slotsPerWorker"] == 4
    assert spec["runPolicy"]["backoffLimit"] == 7
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 2
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == 12


def test_slots_of_torque_are_cores(desk):
    words = ["--scheduler", "torque", "--nodes", "4", "--ranks_per_node", "2", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words, "--threads", "3")
    assert "#PBS -l nodes=4:ppn=6\n" in done.stdout
    start = next(line for line in done.stdout.splitlines() if line.startswith("launcher="))
    assert "launch --ranks_per_node 2 --max_restarts 3" in start


def test_horovodrun_is_supervised_too(desk):
    words = ["--scheduler", "slurm", "--launcher", "horovodrun", "--max_restarts", "7", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert "launch --launcher horovodrun --max_restarts 7 --)" in done.stdout, done.stderr


def test_what_a_user_gives_wins_over_the_site(desk):
    words = ["--site", "frontier", "--account", "p1", "--threads", "3", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert "#SBATCH --cpus-per-task=3\n" in done.stdout
    assert "--cpus-per-task=3 " in done.stdout
    assert "export OMP_NUM_THREADS=3\n" in done.stdout
    done = desk.run("submit", "my.yaml", "--site", "gadi", "--account", "p1", "--dry_run")
    assert "#PBS -P p1\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: foo", "scheduler"),
        ("scheduler: slurm\nthreads: many", "threads"),
        ("scheduler: slurm\nranks_per_node: 0", "ranks_per_node"),
        ("scheduler: slurm\nneeds: account", "needs"),
        ("scheduler: slurm\nneeds: [foo]", "needs"),
        ("scheduler: slurm\nlauncher: srun -n 3", "launcher"),
        ("scheduler: slurm\nlauncher: ['{foo}']", "foo"),
        ("scheduler: pbs\nresources: '{nope}'", "nope"),
        ("scheduler: slurm\nresources: 'select=1'", "resources"),
        ("scheduler: slurm\naccount_option: -P", "account_option"),
        ("scheduler: slurm\nenviron: {'A B;id': '1'}", "variable"),
    ],
)
def test_mistakes_in_a_profile_are_one_line(desk, text, message):
    (desk.folder / "here.yaml").write_text(text + "\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--dry_run")
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)


def test_what_the_scheduler_refuses_is_told(desk):
    desk.scheduler("qsub", code=1)
    done = desk.run("submit", "my.yaml")
    assert done.returncode == 1
    assert "qsub" in only_line(done.stderr)
    assert "invalid account" in only_line(done.stderr)


def test_a_profile_of_ones_own(desk):
    (desk.folder / "here.yaml").write_text(
        "scheduler: pbs\nthreads: 4\nresources: 'nodes={nodes}:cores={cores}'\n"
        "launcher: [mpiexec, -n, '{ranks}']\n"
    )
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--nodes", "3", "--dry_run")
    assert "#PBS -l nodes=3:cores=12\n" in done.stdout
    assert "launcher=(mpiexec -n 3)\n" in done.stdout
    (desk.folder / "here.yaml").write_text("scheduler: pbs\nthread: 4\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--dry_run")
    assert done.returncode == 2
    assert "here.yaml: unknown key thread: did you mean threads?" in only_line(done.stderr)


def test_cancel_stops_a_run_for_good(program):
    """A run is not begun again while the file is there."""
    run_dir = program.root / "run"
    (run_dir / "task-0").mkdir(parents=True)
    assert run(*hpc_train("cancel", str(program.root / "none"))).returncode == 2
    done = run(*hpc_train("cancel", str(run_dir)))
    assert done.returncode == 0
    assert "STOP" in done.stdout
    assert (run_dir / "task-0/STOP").exists(), "of a sweep all tasks stop"
    done = program.train("run")
    assert done.returncode == 2
    assert "remove it" in only_line(done.stderr)
    (run_dir / "STOP").unlink()
    assert run(*hpc_train("cancel", "/etc")).returncode == 2, "a folder, but no run"
    assert program.train("run", "--run.steps", "2").returncode == 0
