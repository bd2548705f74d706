"""Checkpoints of tensors that the ranks of a replica hold in parts."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch

from hpc_train.checkpoint import engines, exchange, fileformat, restore
from hpc_train.checkpoint import save as saving
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.errors import CheckpointError
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec
from tests.checkpoint.states import save_tensors
from tests.checkpoint.test_save import Broken

pytestmark = pytest.mark.mpi(min_size=4)

STATE = b'{"step": 3}'
PARTS = {"first.rows": 0, "first.columns": 1, "last.rows": 0, "last.middle": 1}


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", 4096)


def whole(seed=0):
    """All tensors: of each stage parts of rows and columns, and what both tensor ranks have."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        "first.rows": torch.randn(60, 31, generator=generator).double(),
        "first.columns": torch.randn(33, 40, generator=generator),
        "first.norm": torch.randn(7, generator=generator),
        "last.rows": torch.randn(2, generator=generator).to(torch.bfloat16),
        "last.middle": torch.randn(9, 64, 5, generator=generator),
        "last.steps": torch.tensor(5 + seed),
        "empty": torch.empty(0, 3),
    }
    return made | {f"last.many.{i}": torch.full((3,), i % 2 == 0) for i in range(40)}


@pytest.fixture(params=["tp 2 x pp 2", "dp 2 x tp 2"])
def place(request, job):
    """This rank's replica, its tensor-parallel rank, and whether it has a stage."""
    rank = job.world.rank
    if request.param.startswith("tp"):
        yield job.world, rank % 2, lambda name: name.startswith("last") == (rank >= 2)
    else:
        replica = job.world.split(rank // 2, rank)
        yield replica, rank % 2, lambda _: True
        replica.close()


def held_at(place, tensors):
    """This rank's parts."""
    _, index, mine = place
    found = {}
    for name, tensor in tensors.items():
        if mine(name) and name in PARTS:
            spec = SliceSpec.part(tuple(tensor.shape), PARTS[name], index, 2)
            part = tensor.narrow(spec.dim, spec.start, spec.stop - spec.start).contiguous()
            found[name] = LocalTensor(part, spec)
        elif mine(name):
            spec = SliceSpec.whole(tuple(tensor.shape))
            found[name] = LocalTensor(tensor.clone(), spec, owned=index == 0)
    return found


def assert_loaded(path, place, group, tensors):
    """What `load` fills this rank's parts with is what was saved. Collective."""
    wanted = held_at(place, tensors)
    found = held_at(place, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    reader = restore.open_together(path, group)
    restore.load_tensors(reader, found, group)
    state = restore.load_state(reader, group)
    for name, part in wanted.items():
        assert torch.equal(found[name].tensor, part.tensor), name
    assert state == {"step": 3}


@pytest.mark.parametrize("engine", ["mpiio", "mpiio_collective", "posix"])
def test_parts_make_the_bytes_that_one_rank_writes_of_the_whole(job, together, place, engine):
    path, group = together / "parts", job.world
    save_tensors(path, held_at(place, whole()), STATE, group, engine, replica=place[0])
    if group.rank == 0:
        everything = {name: LocalTensor.whole(tensor) for name, tensor in whole().items()}
        save_tensors(together / "alone", everything, STATE, Group())
    group.barrier()
    alike = path.read_bytes() == (together / "alone").read_bytes()
    assert_loaded(path, place, group, whole())
    assert alike


def test_a_rank_alone_reads_what_four_wrote_and_four_what_one_wrote(job, together, place):
    group = job.world
    save_tensors(together / "parts", held_at(place, whole()), STATE, group, replica=place[0])
    if group.rank == 0:
        found = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
        everything = {name: LocalTensor.whole(tensor) for name, tensor in found.items()}
        restore.load_tensors(restore.CheckpointReader.open(together / "parts"), everything, Group())
        alike = all(torch.equal(found[name], tensor) for name, tensor in whole().items())
        saved = {name: LocalTensor.whole(tensor) for name, tensor in whole(1).items()}
        save_tensors(together / "alone", saved, STATE, Group())
    group.barrier()
    assert_loaded(together / "alone", place, group, whole(1))
    assert group.rank > 0 or alike


def test_only_the_bytes_of_a_parts_owner_are_saved(job, together, place):
    parts = held_at(place, whole())
    for part in parts.values():
        if not part.owned and part.tensor.is_floating_point():
            part.tensor.fill_(torch.nan)
    save_tensors(together / "parts", parts, STATE, job.world, replica=place[0])
    assert_loaded(together / "parts", place, job.world, whole())


@pytest.mark.parametrize(
    ("name", "index", "count"),
    [("first.columns", 0, 660), ("first.norm", 0, 0), ("first.norm", 1, 14)],
    ids=["a part nobody's", "nobody's", "owned twice"],
)
def test_what_is_not_owned_once_is_refused(job, together, place, name, index, count):
    parts = held_at(place, whole())
    if name in parts and place[1] == index:
        parts[name] = replace(parts[name], owned=not parts[name].owned)
    with pytest.raises(CheckpointError, match=f"own {count} elements of {name} ") as error:
        save_tensors(together / "parts", parts, STATE, job.world, replica=place[0])
    job.world.barrier()
    assert error.value.agreed
    assert list(together.iterdir()) == []


@pytest.mark.parametrize("how", [errno.ENOSPC, "silent", RuntimeError("of any kind")])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_failure_on_one_rank_is_raised_on_all_and_nobody_waits(
    job, together, monkeypatch, place, how, call, rank
):
    group, path = job.world, together / "checkpoint"
    save_tensors(path, held_at(place, whole()), STATE, group, replica=place[0])
    before = path.read_bytes()
    counter = [call if group.rank == rank else -1]
    real = engines.open_writer

    class Failing(Broken):
        def __getattr__(self, name):
            if isinstance(how, Exception) and self.counter[0] == 1:
                raise how
            return super().__getattr__(name)

    monkeypatch.setattr(saving, "open_writer", lambda *a: Failing(real(*a), counter, how))
    error = None
    try:
        save_tensors(path, held_at(place, whole(1)), STATE, group, replica=place[0])
    except Exception as raised:  # noqa: BLE001  # which it is is asserted below
        error = raised
    group.barrier()
    assert error is not None
    assert error.agreed
    assert isinstance(error, CheckpointError) != isinstance(how, Exception)
    assert f"rank {rank}" in str(error) or how == "silent"
    assert path.read_bytes() == before
    assert [entry.name for entry in together.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_memory_for_messages_is_an_error_of_all(
    job, together, monkeypatch, place, rank
):
    def none(self, nbytes):
        raise MemoryError

    with monkeypatch.context() as patch:
        if job.world.rank == rank:
            patch.setattr(exchange.Scratch, "__call__", none)
        with pytest.raises(CheckpointError, match=f"rank {rank} .*there is no memory for extents"):
            save_tensors(
                together / "parts", held_at(place, whole()), STATE, job.world, replica=place[0]
            )
    save_tensors(together / "parts", held_at(place, whole()), STATE, job.world, replica=place[0])
    assert_loaded(together / "parts", place, job.world, whole())
