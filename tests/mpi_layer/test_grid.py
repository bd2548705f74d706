"""The groups of a layout on four ranks, which may pretend to be on several nodes."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from hpc_train.errors import ConfigError
from hpc_train.mpi import runtime
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.topology import Topology, discover

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
four_ranks = pytest.mark.mpi(min_size=4)

AXES = [field.name for field in fields(ParallelGrid) if field.type == "Group"]
PACKED = Topology(("a", "b"), (0, 0, 1, 1), (0, 0, 0, 0))
ROUND_ROBIN = Topology(("a", "b"), (0, 1, 0, 1), (0, 0, 0, 0))
UNEVEN = Topology(("a", "b"), (0, 0, 0, 1), (0, 0, 0, 0))


class Counting(Group):
    """Counts its splits."""

    splits = 0

    def split(self, color, key):
        Counting.splits += 1
        return super().split(color, key)


@pytest.fixture
def build(job):
    """Builds a grid over the job's ranks; the grid is closed at the end."""
    made = []

    def make(topology, **sizes):
        Counting.splits = 0
        world = Counting(job.world.rank, job.world.size, job.world.comm, job.world.waiting)
        made.append(ParallelGrid.build(world, topology, **sizes))
        return made[-1]

    yield make
    for grid in made:
        grid.close()


def members(grid):
    """The world ranks of this rank's groups, in the order of their ranks in them. Collective."""
    groups = {axis: getattr(grid, axis) for axis in AXES}
    return {
        axis: group.comm.allgather(grid.world.rank) if group.comm else [grid.world.rank]
        for axis, group in groups.items()
    }


def expected(grid):
    """The same from the placement."""
    groups = grid.placement.groups() | {"world": [tuple(range(grid.world.size))]}
    rank = grid.world.rank
    mine = {axis: [g for g in groups[axis] if rank in g] or [(rank,)] for axis in AXES}
    return {axis: list(found[0]) for axis, found in mine.items()}


@four_ranks
@pytest.mark.parametrize("topology", [PACKED, ROUND_ROBIN, UNEVEN])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_groups_have_the_ranks_of_the_placement_in_its_order(build, topology, sizes):
    tp, pp = sizes
    grid = build(topology, tp=tp, pp=pp)
    found = members(grid)
    assert found == expected(grid)
    assert (grid.dp, grid.tp, grid.pp) == (4 // tp // pp, tp, pp)
    at = grid.coordinate
    assert (grid.data.rank, grid.tensor.rank, grid.pipe.rank) == (at.dp, at.tp, at.pp)
    assert grid.model.rank == at.pp * tp + at.tp
    for axis in AXES:
        group = getattr(grid, axis)
        assert (group.size, group.comm is None) == (len(found[axis]), len(found[axis]) == 1)


@four_ranks
def test_ranks_dealt_round_robin_have_their_tensor_group_on_their_node(build):
    grid = build(ROUND_ROBIN, tp=2)
    rank = grid.world.rank
    assert members(grid)["tensor"] == [rank % 2, rank % 2 + 2]


@four_ranks
def test_data_is_split_in_nodes_and_across_them(build):
    found = members(build(ROUND_ROBIN))
    uneven = members(build(UNEVEN))
    rank = found["world"].index(found["data_node"][0])
    assert found["data_node"] == [rank % 2, rank % 2 + 2]
    assert (uneven["data_node"], uneven["data_cross"]) in [
        ([0, 1, 2], [0, 3]),
        ([0, 1, 2], [1]),
        ([0, 1, 2], [2]),
        ([3], [0, 3]),
    ]


@four_ranks
def test_the_first_and_last_stage_share_the_embedding_group(build):
    four, two = members(build(PACKED, pp=4)), members(build(PACKED, pp=2))
    rank = four["pipe"].index(four["embedding"][0])
    assert four["embedding"] == ([0, 3] if rank in (0, 3) else [rank])
    assert two["embedding"] == two["pipe"]


@four_ranks
def test_a_group_is_made_once(build):
    one_node = Topology(("a",), (0,) * 4, (0,) * 4)
    layouts = [(one_node, 1, 1), (one_node, 4, 1), (PACKED, 2, 1), (PACKED, 1, 2)]
    grids, splits = [], []
    for topology, tp, pp in layouts:
        grids.append(build(topology, tp=tp, pp=pp))
        splits.append(Counting.splits)
    data, tensor, mixed, pipe = grids
    assert splits == [0, 0, 2, 2]
    assert data.world is data.data is data.data_node
    assert data.tensor is data.pipe is data.model is data.embedding is data.data_cross
    assert tensor.world is tensor.tensor is tensor.model
    assert mixed.tensor is mixed.model
    assert mixed.data is mixed.data_cross
    assert pipe.pipe is pipe.model is pipe.embedding


@four_ranks
def test_closing_leaves_the_world(build, job):
    closed, untouched = build(ROUND_ROBIN, tp=2), build(PACKED)
    made = (closed.data.comm, closed.tensor.comm)
    closed.close()
    untouched.close()
    assert job.world.largest(job.world.rank) == 3
    assert not any(made)  # a freed communicator is null


@four_ranks
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(build):
    with pytest.raises(ConfigError, match="dp 3 x tp 1 x pp 1 is 3, the job has 4 ranks"):
        build(PACKED, dp=3)


@four_ranks
def test_rank_0_warns_of_tensor_groups_across_nodes(build, caplog):
    with caplog.at_level(logging.WARNING, logger="hpc_train"):
        rank = build(PACKED, tp=4).world.rank
    assert len(caplog.records) == (rank == 0)
    assert all("1 of 1 tensor-parallel groups" in text for text in caplog.messages)


@four_ranks
def test_process_sets_are_the_groups_of_the_whole_job(build):
    pairs = [[0, 1], [0, 2], [1, 3], [2, 3]]
    wanted = [
        (PACKED, {}, []),
        (PACKED, {"tp": 2}, pairs),
        (ROUND_ROBIN, {"tp": 2}, pairs),
        (PACKED, {"pp": 4}, [[0, 3]]),
        (ROUND_ROBIN, {"pp": 4}, [[0, 3]]),  # its stages are on ranks 0, 2, 1, 3
    ]
    found = [build(topology, **sizes).process_sets() for topology, sizes, _ in wanted]
    assert found == [sets for _, _, sets in wanted]


@needs_horovod
@four_ranks
def test_horovod_sums_over_the_groups_of_one_layout_and_then_of_another(build, job):
    import torch

    def summed(hvd, ranks):
        return hvd.allreduce(
            torch.tensor([float(job.world.rank)]),
            op=hvd.Sum,
            process_set=runtime.process_set(hvd, ranks),
            name=f"sum over {ranks}",
        ).item()

    totals = []
    for sizes in ({"pp": 4}, {"tp": 2}, {}):
        grid = build(PACKED, **sizes)
        hvd = runtime.start_horovod(job.world, grid.process_sets())
        groups = [ranks for axis, ranks in members(grid).items() if axis in ("tensor", "data")]
        groups += [[0, 3]] if job.world.rank in (0, 3) else []  # of the first layout, still there
        groups += [list(range(4))]
        totals += [(summed(hvd, ranks), sum(ranks)) for ranks in groups if len(ranks) > 1]
    assert hvd is runtime.start_horovod(job.world)
    assert runtime.process_set(hvd, [3, 0, 1, 2]) is hvd.global_process_set
    with pytest.raises(ValueError, match=r"no process set of ranks \[1, 2\]"):
        runtime.process_set(hvd, [2, 1])
    assert all(total == right for total, right in totals), totals


@four_ranks
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"dp": 1, "tp": 2, "pp": 2}])
def test_groups_on_the_real_nodes_are_as_expected(build, job, sizes):
    topology = discover(job.world, job.node)
    grid = build(topology, **sizes)
    found = members(grid)
    assert found == expected(grid)
    assert found["data_node"] == found["data"]


def test_ten_thousand_ranks_split_at_most_once_per_axis():
    class Simulated(Counting):
        def split(self, color, key):
            Counting.splits += 1
            return Group()

    Counting.splits = 0
    where = Topology(("a", "b") * 50, tuple(rank % 100 for rank in range(10_000)), (0,) * 10_000)
    grid = ParallelGrid.build(Simulated(4_321, 10_000), where, tp=5, pp=4)
    assert Counting.splits <= len(AXES) - 1
    sets = grid.process_sets()
    assert len(sets) == 2_000 + 20 + 2_500  # tensor, data, embedding


def test_alone_no_group_has_a_communicator():
    grid = ParallelGrid.build(Group(), discover(Group(), Group()))
    assert {getattr(grid, axis).comm for axis in AXES} == {None}
    assert {getattr(grid, axis).size for axis in AXES} == {1}
    assert grid.data is grid.world
    assert grid.process_sets() == []
    grid.close()
    with pytest.raises(ConfigError, match="the job's 1 rank"):
        ParallelGrid.build(Group(), discover(Group(), Group()), tp=2)
