"""How files are written, and where they lie."""

from __future__ import annotations

import errno
import logging
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_train import files
from hpc_train.checkpoint.engines import EngineChoice, MpiWriter, create_striped
from hpc_train.checkpoint.fileformat import EXTENT_BYTES, Contents, header, parse_header
from hpc_train.checkpoint.routes import reader_shift
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group
from tests.checkpoint.faults import fail
from tests.checkpoint.states import found, save, save_tensors, store
from tests.checkpoint.test_save import held, state_of

LAYOUT = struct.Struct("=II16xIHH")
"""Magic number, pattern, bytes of a stripe, stripes, first server: `lov_user_md_v1` of Lustre."""


def test_a_process_alone_and_a_thread_use_posix_calls():
    assert EngineChoice("auto", Group()).next() == "posix"
    assert EngineChoice("auto", Group(0, 2), background=True).next() == "posix"
    for engine in ("mpiio", "mpiio_collective"):
        with pytest.raises(ConfigError, match=f"checkpoint.engine is {engine}, but .* without MPI"):
            EngineChoice(engine, Group())


@pytest.mark.mpi(min_size=2)
def test_auto_tries_each_way_twice_and_stays_with_the_fastest(job):
    seconds = {"posix": [9.0, 2.0], "mpiio": [3.0, 3.0]}
    ways = EngineChoice("auto", job.world)
    tried = []
    for _ in range(4):
        tried.append(ways.next())
        ways.note(tried[-1], seconds[tried[-1]].pop(0))
    assert sorted(tried) == ["mpiio", "mpiio", "posix", "posix"]
    assert ways.next() == "posix"
    assert EngineChoice("mpiio", job.world).next() == "mpiio"
    with pytest.raises(ConfigError, match=r"thread of checkpoint.background makes no MPI calls"):
        EngineChoice("mpiio", job.world, background=True)


@pytest.mark.mpi(min_size=2)
def test_auto_falls_back_to_posix_calls_where_mpi_io_fails(job, together, monkeypatch):
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
        partners = [(rank + reader_shift(letters)) % len(letters) for rank in range(len(letters))]
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


class Lustre:
    """The calls by which Lustre tells and takes stripes, in folders named so."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.asked: dict[Path, tuple[int, ...]] = {}

    def get(self, path: Path, name: str) -> bytes:
        if name != "lustre.lov" or "lustre" not in path.parts:
            raise OSError(errno.EOPNOTSUPP, "no such attributes")
        if path not in self.asked:
            raise OSError(errno.ENODATA, "the default stripes")
        magic, pattern, size, count, _ = self.asked[path]
        return LAYOUT.pack(magic, pattern, size, min(count, self.servers), 0)

    def set(self, path: Path, name: str, value: bytes) -> None:
        if self.servers == 0:
            raise OSError(errno.EPERM, "not here")
        assert name == "lustre.lov"
        assert path.stat().st_size == 0
        self.asked[path] = LAYOUT.unpack(value)


@pytest.fixture
def lustre(tmp_path, monkeypatch) -> Lustre:
    made = Lustre(servers=4)
    monkeypatch.setattr(os, "getxattr", made.get)
    monkeypatch.setattr(os, "setxattr", made.set)
    (tmp_path / "lustre").mkdir()
    return made


def test_on_lustre_a_file_is_made_with_stripes(tmp_path, lustre):
    path = tmp_path / "lustre" / "c.safetensors"
    save_tensors(path, held(state_of()), b"{}", Group())
    partial = path.with_name(".c.safetensors.partial")
    assert lustre.asked == {partial: (0x0BD10BD0, 1, 16 << 20, 1, 0xFFFF)}
    assert path.is_file()


def test_larger_files_ask_for_more_stripes_and_log_if_they_get_fewer(tmp_path, lustre, caplog):
    caplog.set_level(logging.INFO, "hpc_train")
    asked = []
    for number, nbytes in enumerate((10**9, 10**9 + 1, 10**10 + 1, 10**11 + 1)):
        path = tmp_path / "lustre" / str(number)
        assert create_striped(path, nbytes)
        asked.append(lustre.asked[path][3])
    assert asked == [1, 8, 24, 72]
    assert "has 4 stripes, 8 were asked for" in caplog.text
    assert len(caplog.records) == 3


@pytest.mark.parametrize(("folder", "servers"), [("other", 4), ("lustre", 0)])
def test_off_lustre_or_where_it_refuses_files_have_no_stripes(tmp_path, lustre, folder, servers):
    lustre.servers = servers
    path = tmp_path / folder / "c.safetensors"
    save_tensors(path, held(state_of()), b"{}", Group())
    assert not lustre.asked
    assert path.is_file()


def test_an_extent_of_a_striped_file_lies_in_one_stripe():
    for size, striped in ((1000, False), (3 * 10**8, True)):
        layout = Contents.of({"model.a": (torch.float32, (size,))}).layout(10)
        assert (layout.file_bytes > 10**9) == striped
        assert (layout.data_start % EXTENT_BYTES == 0) == striped
        assert layout.data_start % (1 << 20) == 0


def test_large_files_of_earlier_releases_are_read():
    layout = Contents.of({"model.a": (torch.float32, (3 * 10**8,))}).layout(10)
    earlier = replace(layout, data_start=1 << 20)
    found, _ = parse_header(header(earlier, b""), earlier.file_bytes)
    assert found == earlier
