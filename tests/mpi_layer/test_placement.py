"""Placement of ranks: nothing is lost, and what talks most lies nearest."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpc_train.errors import ConfigError
from hpc_train.mpi.placement import Coordinate, data_parallel, place
from hpc_train.mpi.topology import Topology


def topology(nodes, sockets=None):
    """From the node of each rank, in any numbering, and the socket of each."""
    told = [(nodes.index(node), f"host{node}", 0) for node in nodes]
    found = Topology.of(told)
    return Topology(found.hosts, found.node, tuple(sockets or [0] * len(nodes)))


def round_robin(nodes, each):
    return topology([rank % nodes for rank in range(nodes * each)])


def packed(nodes, each, sockets=1):
    local = [rank % each * sockets // each for rank in range(nodes * each)]
    return topology([rank // each for rank in range(nodes * each)], local)


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def layouts(draw):
    """A topology of uneven nodes and sockets, dealt in some way, and tp, pp that divide it."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    per_socket = draw(st.integers(1, 5))
    ranks = [(n, i // per_socket) for n, size in enumerate(sizes) for i in range(size)]
    order = draw(st.sampled_from(["packed", "round robin", "random"]))
    if order == "round robin":
        position = Counter()
        numbered = []
        for node, _ in ranks:
            numbered.append(position[node])
            position[node] += 1
        ranks = [rank for _, rank in sorted(zip(numbered, ranks, strict=True))]
    elif order == "random":
        ranks = draw(st.permutations(ranks))
    nodes, sockets = zip(*ranks, strict=True)
    unknown = draw(st.booleans())
    made = topology(list(nodes), [-1] * len(nodes) if unknown else list(sockets))
    tp = draw(st.sampled_from(divisors(made.size)))
    return made, tp, draw(st.sampled_from(divisors(made.size // tp)))


def most(counts, size):
    """How many groups of a size can be made without crossing."""
    return sum(count // size for count in counts)


@given(layouts())
def test_every_rank_has_one_place(layout):
    where, tp, pp = layout
    made = place(where, None, tp, pp)
    assert made.ranks.shape == (made.dp, pp, tp)
    assert sorted(made.ranks.ravel().tolist()) == list(range(where.size))
    for rank in range(where.size):
        at = made.coordinate(rank)
        assert made.ranks[at.dp, at.pp, at.tp] == rank


@given(layouts())
def test_as_few_tensor_groups_as_possible_cross_nodes(layout):
    where, tp, pp = layout
    made = place(where, None, tp, pp)
    inside = most(where.ranks_per_node, tp)
    assert len(made.crossing()) == where.size // tp - inside
    assert bool(made.warning()) == (inside < where.size // tp)


@given(layouts())
def test_as_many_tensor_groups_as_possible_lie_in_a_socket(layout):
    where, tp, pp = layout
    assume(-1 not in where.socket)
    made = place(where, None, tp, pp)
    sockets = Counter(zip(where.node, where.socket, strict=True)).values()
    in_socket = [g for g in made.groups()["tensor"] if made.extent(g) == "socket"]
    assert len(in_socket) >= most(sockets, tp)


@given(layouts())
def test_as_few_replicas_as_the_tensor_groups_allow_cross_nodes(layout):
    where, tp, pp = layout
    made = place(where, None, tp, pp)
    groups = [size // tp for size in where.ranks_per_node]
    whole = [g for g in made.groups()["model"] if made.extent(g) != "nodes"]
    assert len(whole) == most(groups, pp)


@given(layouts())
def test_every_axis_has_each_rank_once_and_in_order(layout):
    where, tp, pp = layout
    made = place(where, None, tp, pp)
    groups = made.groups()
    for axis in set(groups) - {"embedding"}:
        assert sorted(rank for group in groups[axis] for rank in group) == [*range(where.size)]
    for group in groups["tensor"]:
        assert list(group) == sorted(group)
        assert [made.coordinate(rank).tp for rank in group] == [*range(tp)]
    for group in groups["data"]:
        assert [made.coordinate(rank).dp for rank in group] == [*range(made.dp)]
    for group in groups["model"]:
        places = [made.coordinate(rank) for rank in group]
        assert [at.pp * tp + at.tp for at in places] == [*range(tp * pp)]
    for pipe, ends in zip(groups["pipe"], groups["embedding"], strict=True):
        assert ends == ((pipe[0], pipe[-1]) if pp > 1 else pipe)
        nodes = [where.node[rank] for rank in pipe]
        if not made.crossing():  # a pipeline does not come back to a node that it has left
            assert nodes == sorted(nodes)


@given(layouts())
def test_data_is_split_by_node_and_then_by_position(layout):
    where, tp, pp = layout
    groups = place(where, None, tp, pp).groups()
    data = {rank: group for group in groups["data"] for rank in group}
    position = {}
    for part in groups["data_node"]:
        same = [rank for rank in data[part[0]] if where.node[rank] == where.node[part[0]]]
        assert list(part) == same
        position |= {rank: index for index, rank in enumerate(part)}
    for cross in groups["data_cross"]:
        assert len({position[rank] for rank in cross}) == 1
        assert len({where.node[rank] for rank in cross}) == len(cross)
        same = {rank for rank in data[cross[0]] if position[rank] == position[cross[0]]}
        assert set(cross) == same


@pytest.mark.parametrize("where", [packed(2, 8, sockets=2), round_robin(4, 4)])
def test_tensor_groups_that_fit_a_socket_lie_in_one(where):
    made = place(where, None, 4, 2)
    assert {made.extent(group) for group in made.groups()["tensor"]} == {"socket"}


def test_tensor_groups_larger_than_a_socket_lie_in_a_node():
    made = place(packed(2, 8, sockets=2), None, 8, 1)
    assert {made.extent(group) for group in made.groups()["tensor"]} == {"node"}


def test_ranks_dealt_round_robin():
    made = place(round_robin(2, 4), 2, 2, 2)
    assert made.ranks.tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert made.coordinate(6) == Coordinate(dp=0, tp=1, pp=1)
    assert made.warning() == ""


def test_without_model_parallelism_replicas_are_the_ranks():
    made = place(topology([1, 0, 1, 0, 0], [1, 0, 0, 1, 0]), None, 1, 1)
    assert made.ranks.ravel().tolist() == [0, 1, 2, 3, 4]


def test_a_long_pipeline_passes_from_node_to_node_once():
    made = place(round_robin(2, 3), None, 1, 6)
    assert made.groups()["pipe"] == [(0, 2, 4, 1, 3, 5)]


def test_the_warning_tells_how_many_groups_cross_and_what_would_fit():
    warning = place(packed(2, 6), None, 4, 1).warning()
    assert warning.startswith("1 of 3 tensor-parallel groups of 4 ranks lie across nodes")
    assert warning.endswith("divides the ranks of each node (6)")


def test_ten_thousand_ranks():
    where = topology([rank % 79 for rank in range(10_000)])  # 46 nodes of 127 ranks, 33 of 126
    made = place(where, None, 8, 10)
    assert np.array_equal(np.sort(made.ranks.ravel()), np.arange(10_000))
    assert len(made.crossing()) == 10_000 // 8 - 79 * 15
    assert {axis: len(groups) for axis, groups in made.groups().items()}["tensor"] == 1250
    at = made.coordinate(9_999)
    assert made.ranks[at.dp, at.pp, at.tp] == 9_999


@pytest.mark.parametrize(
    ("asked", "says", "nearest"),
    [
        ((8, 3, 2, 1), "dp 3 x tp 2 x pp 1 is 6, the job has 8 ranks", "dp 4 x tp 2 x pp 1"),
        ((8, None, 3, 1), "tp 3 x pp 1 is 3, which does not divide", "dp 2 x tp 4 x pp 1"),
        ((6, None, 2, 4), "tp 2 x pp 4 is 8, which does not divide", "dp 1 x tp 2 x pp 3"),
        ((1, 2, 1, 1), "dp 2 x tp 1 x pp 1 is 2, the job has 1 rank", "dp 1 x tp 1 x pp 1"),
        ((4, None, 2.0, 1), "parallel.tp is 2.0", "give a whole number, 1 or more"),
        ((4, None, 0, 1), "parallel.tp is 0", "give a whole number, 1 or more"),
    ],
)
def test_wrong_sizes_are_refused_with_the_nearest_that_fit(asked, says, nearest):
    with pytest.raises(ConfigError) as caught:
        data_parallel(*asked)
    assert says in caught.value.cause
    assert caught.value.remedy.removeprefix("nearest that fit: ").startswith(nearest)


def test_ten_thousand_ranks_have_nearest_sizes_too():
    with pytest.raises(ConfigError, match="nearest that fit: dp 125 x tp 8 x pp 10"):
        data_parallel(10_000, 124, 8, 10)
