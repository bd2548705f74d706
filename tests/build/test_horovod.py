"""Horovod is built against the MPI that the build's cache and messages name."""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

from hpc_train import files
from hpc_train.build import horovod as horovod_build

ASKS = """
cmake_minimum_required(VERSION 3.13)
project(asks CXX)
set(CMAKE_CXX_STANDARD 14)
find_package(MPI REQUIRED)
file(WRITE found "${MPI_CXX_COMPILER}")
"""


def test_cmake_takes_the_mpi_of_mpicxx_and_not_the_first_of_the_path(tmp_path, monkeypatch):
    usual = shutil.which("mpicxx", path=horovod_build.search_path())
    ours = tmp_path / "bin" / "our-own-c++"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\nexec {usual} "$@"\n')
    ours.chmod(0o755)
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text(ASKS)
    (tmp_path / "horovod" / "torch" / "CMakeLists.txt").write_text("CMAKE_CXX_STANDARD 14")
    monkeypatch.chdir(ours.parent)
    monkeypatch.setenv("MPICXX", "./our-own-c++")
    horovod_build.patch(tmp_path, horovod_build.find_mpi())
    environ = {"PATH": horovod_build.search_path(), "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
    words = [horovod_build.find_cmake(), "-B", str(tmp_path / "build"), str(tmp_path)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found").read_text() == str(ours)


def test_a_damaged_wheel_is_built_again_and_installed_even_if_the_cache_takes_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mpi = horovod_build.Mpi(Path("/opt/mpi/bin/mpicxx"), "Open MPI 4.1.8", "-lmpi")
    cached = horovod_build.wheel_directory(mpi, horovod_build.torch_version())
    cached.mkdir(parents=True)
    (cached / "horovod-0.28.1.whl").write_bytes(b"cut off")

    def compile_wheel(source, out, log):
        out.mkdir()
        (out / "horovod-0.28.1.whl").write_bytes(b"built")
        return out / "horovod-0.28.1.whl"

    def full(*arguments):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    installed = []
    monkeypatch.setattr(horovod_build, "find_mpi", lambda: mpi)
    monkeypatch.setattr(horovod_build, "unpack_archive", lambda archive, folder: folder)
    monkeypatch.setattr(horovod_build, "compile_wheel", compile_wheel)
    for name in ("check_tools", "patch"):
        monkeypatch.setattr(horovod_build, name, lambda *arguments: None)
    monkeypatch.setattr(horovod_build, "install", lambda one: installed.append(one.read_bytes()))
    monkeypatch.setattr(files, "rename", full)
    assert horovod_build.main(["--archive", "horovod-0.28.1.tar.gz"]) == 0
    assert installed == [b"built"]
