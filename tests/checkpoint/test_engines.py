"""How files are written, and where they lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train import files
from hpc_train.checkpoint.engines import MpiWriter, Ways
from hpc_train.checkpoint.plan import shift
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import fail
from tests.checkpoint.states import found, save, save_tensors, store
from tests.checkpoint.test_save import held, state_of

LFS = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$1 $2" in
"getstripe -d") case "$3" in *lustre*) exit 0;; *) exit 1;; esac ;;
"getstripe -c") echo 1 ;;
"setstripe -c") touch "$6" ;;
esac
"""


def test_a_process_alone_and_a_thread_use_posix_calls():
    assert Ways("auto", Group()).next() == "posix"
    assert Ways("auto", Group(0, 2), background=True).next() == "posix"
    for engine in ("mpiio", "mpiio_collective"):
        with pytest.raises(ConfigError, match=f"checkpoint.engine is {engine}, but .* without MPI"):
            Ways(engine, Group())


@pytest.mark.mpi(min_size=2)
def test_auto_tries_each_way_twice_and_stays_with_the_fastest(job):
    seconds = {"posix": [9.0, 2.0], "mpiio": [3.0, 3.0]}
    ways = Ways("auto", job.world)
    tried = []
    for _ in range(4):
        tried.append(ways.next())
        ways.note(tried[-1], seconds[tried[-1]].pop(0))
    assert sorted(tried) == ["mpiio", "mpiio", "posix", "posix"]
    assert ways.next() == "posix"
    assert Ways("mpiio", job.world).next() == "mpiio"
    with pytest.raises(ConfigError, match=r"thread of checkpoint.background makes no MPI calls"):
        Ways("mpiio", job.world, background=True)


@pytest.mark.mpi(min_size=2)
def test_auto_goes_on_by_posix_calls_where_mpi_io_fails(job, together, monkeypatch):
    made = store(together / "run", job.world, "auto")
    real = files.call

    def broken(name, function, *arguments):
        return fail(name, function) if name == "mpi_open" else real(name, function, *arguments)

    monkeypatch.setattr(files, "call", broken)
    for step in range(1, 6):
        save(made, step)
    assert found(together / "run", job.world) == 5


def test_a_rank_reads_back_what_another_host_wrote_where_there_is_one():
    hosts = {"packed": "aabb", "dealt": "abab", "uneven": "aaab", "one": "aaaa", "alone": "a"}
    for name, letters in hosts.items():
        partners = [(rank + shift(letters)) % len(letters) for rank in range(len(letters))]
        assert sorted(partners) == list(range(len(letters)))
        crossing = sum(letters[a] != letters[b] for a, b in enumerate(partners))
        assert crossing == {"packed": 4, "dealt": 4, "uneven": 2, "one": 0, "alone": 0}[name]


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif("OMPI_MCA_io" in os.environ, reason="somebody has chosen the component")
def test_romio_is_preferred_and_told_not_to_read_what_it_writes(job, together):
    path = together / str(job.world.rank)
    path.touch()
    writer = MpiWriter(path)
    info = writer._file.Get_info()
    assert info.Get("romio_ds_write") == "disable"
    assert info.Get("romio_cb_write") == "disable"
    info.Free()
    writer.close()


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Path:
    """What a program `lfs` was asked; it knows of Lustre in folders named so."""
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(LFS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program.with_name("asked")


def test_on_lustre_a_file_is_made_with_stripes_which_are_read_back(tmp_path, asked):
    path = tmp_path / "lustre" / "c.safetensors"
    save_tensors(path, held(state_of()), b"{}", Group())
    partial = path.with_name(".c.safetensors.partial")
    assert asked.read_text().splitlines() == [
        f"getstripe -d {path.parent}",
        f"setstripe -c 1 -S {16 << 20} {partial}",
        f"getstripe -c {partial}",
    ]
    assert path.is_file()


def test_elsewhere_it_is_not(tmp_path, asked):
    path = tmp_path / "other" / "c.safetensors"
    save_tensors(path, held(state_of()), b"{}", Group())
    assert asked.read_text().splitlines() == [f"getstripe -d {path.parent}"]
    assert path.is_file()
