"""Sums in a node's memory and over a ring, against those of MPI."""

from __future__ import annotations

import pytest
import torch

from hpc_train.collectives.coroutines import drive
from hpc_train.collectives.halving import Halving
from hpc_train.collectives.node import NodeMemory, sum_into
from hpc_train.collectives.ring import Library, Ring
from hpc_train.errors import SetupError
from hpc_train.mpi.levels import Levels

pytestmark = pytest.mark.mpi


def numbers(rank: int, count: int, dtype=torch.float64):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(size: int, count: int, dtype=torch.float64):
    return sum(numbers(rank, count, dtype) for rank in range(size))


KINDS = [Ring, Library, Halving]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 3, 1000, 300_001])
def test_a_ring_sums(group, kind, count):
    ring = kind(group)
    flat = numbers(group.rank, count)
    drive(ring.sum_(flat, 3))
    assert torch.allclose(flat, total(group.size, count), rtol=1e-13, atol=1e-13)
    everyone = group.comm.allgather(flat.numpy().tobytes())
    assert len(set(everyone)) == 1, "not the same bits on all ranks"
    ring.close()


def some_cuts(size, count):
    """Parts of unequal sizes, one of them empty."""
    return sorted([0, count, *((7919 * rank) % (count + 1) for rank in range(1, size))])


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 3, 1000, 300_001])
def test_the_halves_of_a_sum(group, kind, count):
    """Ranks get the sums of their parts, and then all parts."""
    ring, cuts = kind(group), some_cuts(group.size, count)
    flat = numbers(group.rank, count)
    drive(ring.reduce_scatter_(flat, cuts, 3))
    mine = slice(cuts[group.rank], cuts[group.rank + 1])
    expected = total(group.size, count)
    assert torch.allclose(flat[mine], expected[mine], rtol=1e-13, atol=1e-13)
    drive(ring.all_gather_(flat, cuts, 4))
    assert torch.allclose(flat, expected, rtol=1e-13, atol=1e-13)
    assert len(set(group.comm.allgather(flat.numpy().tobytes()))) == 1
    short = flat.to(torch.bfloat16)
    short[: cuts[group.rank]] = short[cuts[group.rank + 1] :] = 0
    drive(ring.all_gather_(short, cuts, 5))
    assert torch.equal(short, flat.to(torch.bfloat16))
    ring.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_half_of_a_sum_sends_half_of_its_bytes(group, kind):
    ring, flat = kind(group), numbers(group.rank, 8 * group.size)
    cuts = [8 * r for r in range(group.size + 1)]
    drive(ring.reduce_scatter_(flat, cuts, 0))
    assert ring.bytes_sent == (group.size - 1) * 8 * 8
    drive(ring.all_gather_(flat, cuts, 0))
    assert ring.bytes_sent == 2 * (group.size - 1) * 8 * 8
    ring.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_sends_what_is_optimal(group, kind):
    ring, flat = kind(group), numbers(group.rank, 8 * group.size)
    drive(ring.sum_(flat, 0))
    assert ring.bytes_sent == 2 * (group.size - 1) * flat.nbytes // group.size
    ring.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [None, 1, 2])
def test_several_sums_are_under_way_at_once(job, kind, slots):
    """Also more of them than MPI has tags for."""
    world = job.world
    ring = kind(world)
    ring.slots = slots or ring.slots
    flats = [numbers(world.rank + 10 * n, 5000) for n in range(5)]

    def all_of_them():
        yield [ring.sum_(flat, number) for number, flat in enumerate(flats)]

    drive(all_of_them())
    for number, flat in enumerate(flats):
        expected = sum(numbers(rank + 10 * number, 5000) for rank in range(world.size))
        assert torch.allclose(flat, expected, rtol=1e-13, atol=1e-13)
    ring.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", [Ring, Halving])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 10_001, 300_001])
def test_what_16_bits_lose_is_kept(group, kind, dtype, count):
    """The sum and all that was lost are the sum of what went in: nothing disappears."""
    ring = kind(group)
    flat, lost = numbers(group.rank, count), torch.zeros(count, dtype=torch.float64)
    drive(ring.sum_16_(flat, dtype, lost, 0))
    everyone = group.comm.allgather(flat.numpy().tobytes())
    everything = lost.clone()
    group.comm.Allreduce(lost.numpy(), everything.numpy())
    ring.close()
    assert torch.allclose(flat, total(group.size, count), rtol=0.02, atol=0.05)
    assert torch.allclose(flat + everything, total(group.size, count), rtol=1e-12, atol=1e-12)
    assert len(set(everyone)) == 1, "not the same bits on all ranks"


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", [Ring, Halving])
def test_a_ring_gathers_any_type_and_finds_the_largest(group, kind):
    ring = kind(group)
    payload = torch.full((3, 2), group.rank, dtype=torch.uint8)
    whole = drive(ring.gather(payload, 1))
    most = drive(ring.largest(group.rank / 2))
    ring.close()
    assert whole.dtype == torch.uint8
    assert [int(row[0, 0]) for row in whole] == list(range(group.size))
    assert most == (group.size - 1) / 2


class Limited:
    """A communicator that refuses large counts, as MPI-3 does from 2 ** 31 on."""

    def __init__(self, comm, nbytes):
        self.comm, self.nbytes = comm, nbytes

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Iallreduce(self, place, buffer, op):  # noqa: N802  # mpi4py's name
        assert buffer[0].nbytes <= self.nbytes
        return self.comm.Iallreduce(place, buffer, op=op)


@pytest.mark.mpi(min_size=2)
def test_sums_by_the_library_are_split_where_counts_would_be_too_large(job, monkeypatch):
    world = job.world
    monkeypatch.setattr("hpc_train.collectives.mpi.LARGEST_MESSAGE", 800)
    ring = Library(world)
    comm, ring.comm = ring.comm, Limited(ring.comm, 800)
    flats = [numbers(world.rank + 10 * n, 1001) for n in range(3)]

    def all_of_them():
        yield [ring.sum_(flat, number) for number, flat in enumerate(flats)]

    drive(all_of_them())
    ring.comm = comm
    ring.close()
    for number, flat in enumerate(flats):
        expected = sum(numbers(rank + 10 * number, 1001) for rank in range(world.size))
        assert torch.allclose(flat, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.mpi(min_size=2)
def test_ranks_see_what_others_wrote_before_they_told(job):
    world = job.world
    memory = NodeMemory(world, 800, signals=1)
    for value in range(1, 50):
        memory.parts[world.rank].view(torch.int64)[:100] = value

        def others(value=value):
            memory.tell(0, 2 * value - 1)
            yield lambda: memory.told(0, 2 * value - 1, range(world.size))
            found = [int(part.view(torch.int64)[:100].min()) for part in memory.parts]
            memory.tell(0, 2 * value)
            yield lambda: memory.told(0, 2 * value, range(world.size))
            return found

        assert drive(others(), polite=True) == [value] * world.size
    memory.close()


@pytest.mark.mpi(min_size=2)
def test_too_little_shared_memory_is_told_and_not_a_bus_error(job):
    with pytest.raises(SetupError, match="/dev/shm of .* has .*B free"):
        NodeMemory(job.world, 1 << 60, signals=1)


@pytest.mark.parametrize("count", [1, 7, 100_003])
@pytest.mark.parametrize("several", [2, 3, 5])
def test_sums_block_by_block(count, several):
    parts = [numbers(n, count, torch.float32) for n in range(several)]
    expected = parts[0] + parts[1]
    for part in parts[2:]:
        expected += part
    sum_into(parts, [parts[-1], parts[0]])
    assert torch.equal(parts[0], expected)
    assert torch.equal(parts[-1], expected)


def test_levels_of_one_machine_are_one_node(job):
    levels = Levels.of(job.world)
    assert (levels.node.size, levels.nodes, levels.owners) == (job.world.size, 1, job.world.size)
    assert levels.owns
    levels.close()


@pytest.mark.ranks(4)
def test_nodes_with_unlike_numbers_of_ranks(group):
    node = group.split(color=int(group.rank == 3), key=group.rank)
    levels = Levels.join(group, node, group.split(color=node.rank, key=group.rank))
    assert (levels.owners, levels.nodes) == (1, 2)
    assert levels.owns == (group.rank in (0, 3))
    levels.close()
