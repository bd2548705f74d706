"""Set-up: what is missing is told in one line with its remedy; what is there is not made again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.build import horovod as horovod_build
from hpc_train.build import toolchain
from hpc_train.errors import SetupError
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
MADE_BY_SET_UP = pytest.mark.skipif(
    not (ROOT / ".venv" / "ready").exists(), reason="this environment was not made by make"
)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that set-up reads, without an environment."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("bootstrap.py", "constraints.txt", "setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "hpc_train", copy / "hpc_train")
    return copy


def set_up(checkout, python=sys.executable, **environ):
    return subprocess.run(
        [python, "bootstrap.py"],
        cwd=checkout,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def refused(done):
    """The one line of a set-up that ended as it should where something is missing."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_no_compiler(checkout):
    line = refused(set_up(checkout, CXX="/no/such/c++"))
    assert line == (
        "bootstrap: error: no C++ compiler (/no/such/c++): install g++ (Debian: apt install g++) "
        "or load a compiler module, then run this again"
    )


def test_a_compiler_that_cannot(checkout):
    assert "does not compile C++17" in refused(set_up(checkout, CXX="false"))


def test_no_network(checkout, tmp_path):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    empty = {"PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    line = refused(set_up(checkout, **nowhere, **empty))
    assert "pip could not install" in line
    assert "check the network" in line
    assert not (checkout / ".venv" / "ready").exists()


@MADE_BY_SET_UP
def test_a_second_set_up_does_nothing():
    before = (ROOT / ".venv" / "ready").stat().st_mtime_ns
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(f for f in folders if not Path(f).is_relative_to(ROOT / ".venv"))
    done = set_up(ROOT, python=ROOT / ".venv" / "bin" / "python", PATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (ROOT / ".venv" / "ready").stat().st_mtime_ns == before


def test_no_disk(tmp_path):
    with pytest.raises(SetupError, match=r"MiB free, \d+ MiB are needed: free some space"):
        toolchain.check_disk(tmp_path, 1 << 62)


def test_no_python_headers(monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: "/no/include")
    with pytest.raises(SetupError, match=r"no Python.h.*: install them .*-dev"):
        toolchain.check_headers()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH that holds only what a test puts there, in place of this environment's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(horovod_build, "search_path", lambda: str(folder))

    def add(name):
        (folder / name).symlink_to(shutil.which(name))

    return add


def test_no_cmake(tmp_path, programs):
    with pytest.raises(SetupError, match="cmake is missing: `pip install cmake` or load"):
        horovod_build.check_tools(tmp_path)


def test_no_make(tmp_path, programs):
    programs("cmake")
    with pytest.raises(SetupError, match="make is missing: install GNU make"):
        horovod_build.check_tools(tmp_path)


def test_no_mpi_compiler(programs):
    with pytest.raises(SetupError, match="no MPI compiler: mpicxx is not on the PATH: load"):
        horovod_build.find_mpi()


def test_no_mpi_headers(tmp_path, monkeypatch):
    wrapper = tmp_path / "mpicxx"
    wrapper.write_text("#!/bin/sh\necho 'fatal error: mpi.h: No such file' >&2; exit 1\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("MPICXX", str(wrapper))
    with pytest.raises(SetupError, match=r"finds no mpi.h: fatal error.*libopenmpi-dev"):
        horovod_build.find_mpi()


def test_another_archive_is_not_built(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with pytest.raises(SetupError, match="no such archive"):
        horovod_build.unpack_archive(archive, tmp_path)
    archive.write_bytes(b"something else")
    with pytest.raises(SetupError, match="is not the published horovod-0.28.1.tar.gz"):
        horovod_build.unpack_archive(archive, tmp_path)


def test_each_combination_has_a_wheel_of_its_own(monkeypatch):
    mpi = horovod_build.Mpi(Path("/opt/mpi/bin/mpicxx"), "Open MPI 4.1.8", "-lmpi")
    folders = {horovod_build.wheel_directory(mpi, "2.13.0")}
    folders.add(horovod_build.wheel_directory(mpi, "2.13.0+cpu"))
    folders.add(horovod_build.wheel_directory(mpi._replace(label="MPICH 5.0.2"), "2.13.0"))
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    folders.add(horovod_build.wheel_directory(mpi, "2.13.0"))
    assert len(folders) == 4
    moved = mpi._replace(wrapper=Path(sys.prefix, "bin", "mpicxx"))
    assert moved.key == moved._replace(flags="elsewhere").key, "its run path is relative"
