"""A disk that is full: a small file system, under both ways of Open MPI to write files."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.programs import Program, hpc_train, only_line, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")
OPTIONS = ["--checkpoint.every", "2", "--checkpoint.keep", "0"]


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for a few checkpoints."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("component", ["ompio", pytest.param("romio321", marks=pytest.mark.long)])
def test_a_full_disk_ends_the_run_and_loses_nothing(program, small_disk, component):
    there = Program(program.config, small_disk)
    environ = {"OMPI_MCA_io": component}
    done = there.train("run", *OPTIONS, launcher="mpirun", ranks=2, environ=environ)
    assert done.returncode == 1
    told = only_line(done.stderr)
    assert "could not be written (No space left on device)" in told
    assert "older checkpoints are untouched" in told
    folder = small_disk / "run" / "checkpoints"
    assert not list(folder.glob(".step-*"))
    before = run(*hpc_train("checkpoint", "verify", "--all", str(small_disk / "run")))
    assert before.returncode == 0, before.stdout
    assert "sound" in before.stdout
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    again = there.train("run", *OPTIONS, launcher="mpirun", ranks=2, environ=environ)
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stdout
    assert len(there.losses("run")) == 12


def test_a_run_can_go_on_without_a_checkpoint(program, small_disk):
    there = Program(program.config, small_disk)
    options = [*OPTIONS, "--checkpoint.on_error", "warn"]
    done = there.train("run", *options)
    assert done.returncode == 1  # the last one does not fit, either
    assert "training goes on" in done.stdout
    assert len(there.losses("run")) == 12
    assert "older checkpoints are untouched" in only_line(done.stderr)
