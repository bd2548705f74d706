"""Sums of many buckets that are under way at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hpc_train.collectives import connect
from hpc_train.collectives.coroutines import CoroutineScheduler, drive
from hpc_train.collectives.halving import Halving
from hpc_train.collectives.node import sum_into
from hpc_train.collectives.ring import Library, Ring
from hpc_train.gradients import autotune
from hpc_train.gradients.autotune import compressed_cross, way, ways
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.division import Reach
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.sums import LevelSums
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from tests.system.test_same import levels_of

pytestmark = pytest.mark.mpi
ROUNDS = 50


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", [Ring, Library])
def test_each_bucket_meets_itself_on_the_other_nodes(job, kind):
    """However late the ranks of a node fill their buckets, all nodes sum them in one order."""
    world = job.world
    levels = levels_of(world, tuple(2 * rank // world.size for rank in range(world.size)))
    buckets = [Bucket([Parameter(torch.empty(7, dtype=torch.float64))]) for _ in range(32)]
    sums = LevelSums(levels, buckets, kind(levels.cross) if levels.owns else None)
    wrong = []
    for round_ in range(ROUNDS):
        scheduler = CoroutineScheduler()
        for number, flat in enumerate(sums.flats):
            flat.fill_(number * 1000 + world.rank)
            scheduler.start(sums.begin(number))
            scheduler.advance()
        scheduler.finish(polite=True)
        ranks = world.size * (world.size - 1) // 2
        for number, flat in enumerate(sums.flats):
            if flat.unique().tolist() != [number * 1000 * world.size + ranks]:
                wrong.append((round_, number))
    sums.close()
    assert not wrong


def test_ranks_with_unlike_cores_sum_in_one_way(job, monkeypatch):
    """Where collectives read a device's memory: whether sums begin early is agreed on."""
    world = job.world
    monkeypatch.setattr(autotune, "reaches", lambda device: True)
    monkeypatch.setattr(autotune, "fastest", lambda group, there, device: "GPU memory")
    cores = torch.get_num_threads() + (world.rank > 0)
    make, closing = way(Levels.flat(world), AveragingOptions(cores=cores), torch.device("cpu"))
    early = make([]).early
    for close in closing:
        close()
    assert not early


def test_collectives_are_not_tried_unless_all_ranks_have_them(job, monkeypatch):
    monkeypatch.setattr(autotune, "reaches", lambda device: job.world.rank > 0)
    tried = []
    monkeypatch.setattr(
        autotune, "fastest", lambda group, there, device: tried.extend(there) or tried[0]
    )
    _, closing = way(Levels.flat(job.world), AveragingOptions(), torch.device("cpu"))
    assert "GPU memory" not in tried
    assert not closing


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (16, ["two levels, ring", "two levels, MPI", "ring", "MPI"]),
        (64, ["two levels, ring", "two levels, MPI", "MPI"]),
        (512, ["two levels, MPI", "MPI"]),
    ],
)
def test_a_ring_that_cannot_win_is_not_tried(nodes, expected):
    levels = Levels(Group(0, 16 * nodes), Group(0, 16), Group(0, nodes), 16, nodes)
    assert list(ways(levels, connect(Group()), "auto")) == expected
    assert compressed_cross(nodes) is Halving
    assert compressed_cross(2) is Ring


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reach", Reach)
def test_all_ranks_of_a_larger_node_add_up_its_buffers(group, monkeypatch, reach):
    """Also those that stand for no part when nodes communicate."""
    added = []

    def counted(parts, targets):
        added.append(len(parts[0]) * len(parts))
        sum_into(parts, targets)

    monkeypatch.setattr("hpc_train.gradients.sums.sum_into", counted)
    levels = levels_of(group, (0, 0, 0, 1))
    bucket = Bucket([Parameter(torch.empty(size, dtype=torch.float64)) for size in (700, 1, 199)])
    cross = Ring(levels.cross) if levels.owns else None
    sums = LevelSums(levels, [bucket], cross, reach=[reach])
    for _ in range(3):
        sums.flats[0].copy_(torch.arange(900) * (group.rank + 1))
        drive(sums.begin(0), polite=True)
    result = sums.flats[0].clone()
    begin, end = (0, 900) if reach is Reach.RANK else sums.division.own(0)
    sums.close()
    levels.close()
    assert torch.equal(result[begin:end], torch.arange(begin, end) * 10.0)
    owned = group.comm.allgather(end - begin)
    assert sum(owned) == {Reach.RANK: 3600, Reach.NODE: 1800, Reach.JOB: 900}[reach]
    assert sum(added) == (3 * 3 * 300 if group.rank < 3 else 0)
