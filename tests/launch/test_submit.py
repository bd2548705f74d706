"""`hpc-train submit` and `cancel` as a user calls them, with a scheduler that takes notes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

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
        assert f". {sys.prefix}/bin/activate\n" in text, "whether or not it is activated here"


def test_a_dry_run_queues_and_writes_nothing(desk):
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", "--nodes", "2", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash -l\n#PBS -N my\n#PBS -l select=2:ncpus=1:mpiprocs=1")
    assert not (desk.folder / "runs").exists()


def test_a_chain_waits_for_the_job_before(desk):
    desk.scheduler("sbatch")
    done = desk.run("submit", "my.yaml", "--chain", "3")
    assert done.stdout.split() == ["1", "2", "3"]
    assert "again=never" in (desk.folder / "runs/my/job.sh").read_text()
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
        (["--scheduler", "pbs", "--chain", "2"], "--chain is SLURM's"),
        (["--scheduler", "slurm", "--time", "1h"], "--time is '1h'"),
        (["--scheduler", "slurm", "--nodes", "0"], "nodes"),
        (["--scheduler", "slurm", "--name", "a b"], "'a b' cannot stand"),
        (["--scheduler", "slurm", "--sweep", "run.sed=1"], "did you mean run.seed"),
        (["--scheduler", "slurm", "--sweep", "run.seed"], "write section.key=VALUE,VALUE"),
        (["--scheduler", "slurm", "--run.sede", "1"], "did you mean run.seed"),
        (["--site", "nowhere"], "no site profile nowhere: there are aurora"),
        (["--site", "frontier"], "give --account"),
        (["--site", "frontier", "--scheduler", "pbs", "--account", "x"], "frontier has slurm"),
    ],
)
def test_mistakes_are_one_line(desk, words, message):
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)
    assert not (desk.folder / "runs").exists()


def test_what_the_scheduler_refuses_is_told(desk):
    desk.scheduler("qsub", code=1)
    done = desk.run("submit", "my.yaml")
    assert done.returncode == 1
    assert "qsub" in only_line(done.stderr)
    assert "invalid account" in only_line(done.stderr)


def test_a_profile_of_ones_own(desk):
    (desk.folder / "here.yaml").write_text(
        "scheduler: pbs\nthreads: 4\nresources: 'nodes={nodes}:cores={cores}'\n"
        "start: [mpiexec, -n, '{ranks}']\n"
    )
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--nodes", "3", "--dry_run")
    assert "#PBS -l nodes=3:cores=12\n" in done.stdout
    assert "start=(mpiexec -n 3)\n" in done.stdout
    (desk.folder / "here.yaml").write_text("scheduler: pbs\nthread: 4\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--dry_run")
    assert done.returncode == 2
    assert "unknown key thread: take threads" in only_line(done.stderr)


def test_cancel_stops_a_run_for_good(program):
    """A run is not begun again while the file is there."""
    run_dir = program.root / "run"
    run_dir.mkdir()
    assert run(*hpc_train("cancel", str(program.root / "none"))).returncode == 2
    done = run(*hpc_train("cancel", str(run_dir)))
    assert done.returncode == 0
    assert "STOP" in done.stdout
    done = program.train("run")
    assert done.returncode == 2
    assert "remove it" in only_line(done.stderr)
    (run_dir / "STOP").unlink()
    assert program.train("run", "--run.steps", "2").returncode == 0
