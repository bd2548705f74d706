"""What a job notices before its first step."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import HpcTrainError, UserError, plural
from hpc_train.job import preflight as checks
from hpc_train.job.preflight import exchange, preflight, rounds
from hpc_train.mpi.gpus import NVIDIA, Gpus
from hpc_train.mpi.runtime import Runtime

CPU = torch.device("cpu")


@given(st.integers(2, 300))
def test_each_host_meets_both_its_neighbours_and_one_at_a_time(count):
    met = set()
    for pairs in rounds(count):
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
        met |= {frozenset(pair) for pair in pairs}
    assert met == {frozenset((i, (i + 1) % count)) for i in range(count)}


@pytest.fixture
def messages(job, caplog):
    """What rank 0 logs of a preflight."""

    def run(directory: Path, needed: int = 0, job: Runtime = job) -> str:
        with caplog.at_level("INFO", logger="hpc_train"):
            preflight(job, directory, CPU, needed)
        return caplog.text

    return run


@pytest.mark.mpi(min_size=2)
def test_a_sound_job_has_a_table_without_a_warning(job, messages, together):
    text = messages(together)
    assert f"preflight of {plural(job.world.size, 'rank')} on 1 host" in text
    for what in (
        "versions",
        "torch",
        "clocks",
        "run.dir",
        "memory",
        "devices",
        "compute",
        "inside hosts",
    ):
        assert what in text
    job.world.barrier()
    assert not list(together.iterdir()), "nothing is left there"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["torch", "MPI"])
def test_a_rank_with_another_version_is_named(job, monkeypatch, messages, together, what):
    last = job.world.rank == job.world.size - 1
    mine = {**checks.versions(), **({what: "0.1"} if last else {})}
    monkeypatch.setattr(checks, "versions", lambda: mine)
    with pytest.raises(UserError) as caught:
        messages(together)
    assert f"rank {job.world.size - 1} (" in str(caught.value)
    assert f"the version of {what} differs" in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_a_slow_rank_is_named(job, monkeypatch, messages, together):
    factor = 3.0 if job.world.rank == 1 else 1.0
    monkeypatch.setattr(checks, "multiply", lambda device: 0.001 * factor)
    text = messages(together)
    if job.world.rank == 0:
        trial = "33.6 GFLOP/s per rank in a trial with 256 x 256 matrices"
        assert f"compute: {trial}; slower: rank 1 (" in text


@pytest.mark.mpi(min_size=2)
def test_a_slow_clock_is_told(job, monkeypatch, messages, together):
    now = checks.time.time
    ahead = 60.0 if job.world.rank == 1 else 0.0
    monkeypatch.setattr(checks.time, "time", lambda: now() + ahead)
    text = messages(together)
    assert job.world.rank or "clocks: within 60." in text


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_hosts_do_not_share_is_refused(job, monkeypatch, together):
    """Each rank is a host of its own here, the last one with a folder of its own."""
    hosts = [f"host{rank}" for rank in range(job.world.size)]
    monkeypatch.setattr(type(job.world), "host", property(lambda group: hosts[job.world.rank]))
    directory = together
    if job.world.rank == job.world.size - 1:
        directory = together / "own"
        directory.mkdir()
    job.world.barrier()
    with pytest.raises(UserError) as caught:
        checks.shared_directory(job.world, job.world, directory, 0)
    assert "is not the folder that host" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("hosts", ["one", "each"])
def test_one_rank_of_each_host_looks_for_one_file(job, monkeypatch, together, hosts):
    world, looked = job.world, []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path.name) or exists(path))
    leaders = world
    if hosts == "each":
        names = [f"host{rank}" for rank in range(world.size)]
        monkeypatch.setattr(type(world), "host", property(lambda group: names[world.rank]))
    else:
        split = world.split(int(world.rank > 0), world.rank)
        leaders = split if world.rank == 0 else None
    checks.shared_directory(world, leaders, together, 0)
    assert len([name for name in looked if name.startswith(".preflight-")]) == (leaders is not None)


@pytest.mark.mpi(min_size=2)
def test_too_little_space_for_a_checkpoint_is_told(job, monkeypatch, messages, together):
    usage = namedtuple("usage", "total used free")(2 << 30, 1 << 30, 1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    text = messages(together, needed=5 << 30)
    assert job.world.rank or "less than a checkpoint's 5 GiB" in text


@pytest.mark.mpi(min_size=2)
def test_a_disk_that_does_not_tell_its_space_ends_all_ranks_alike(job, monkeypatch, together):
    def failing(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(shutil, "disk_usage", failing)
    with pytest.raises(HpcTrainError, match="Input/output error"):
        checks.shared_directory(job.world, None, together, 0)


@pytest.mark.ranks(2, 3, 4)
def test_hosts_exchange_with_their_neighbours(group):
    assert 0 < exchange(group) < 10


def test_a_process_alone_has_nothing_to_compare(job, tmp_path, caplog):
    preflight(job, tmp_path, CPU, 0)
    assert not caplog.text


@pytest.mark.mpi(min_size=2)
def test_gpus_that_idle_are_told_before_the_first_step(job, messages, together):
    text = messages(together, job=dataclasses.replace(job, gpus=Gpus(4, NVIDIA)))
    assert job.world.rank or "4 NVIDIA GPUs are idle, because torch finds none" in text
