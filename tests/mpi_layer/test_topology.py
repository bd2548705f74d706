"""Where ranks run: as they tell it, and as Linux tells it of their cores."""

from __future__ import annotations

import os
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.mpi.group import Group
from hpc_train.mpi.topology import NodeHardware, Topology, discover, machine, socket_of


@pytest.fixture
def system(tmp_path):
    """Makes a /sys/devices/system: packages by core, the cores of each NUMA domain."""

    def make(packages, numa):
        for core, package in enumerate(packages):
            folder = tmp_path / f"cpu/cpu{core}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{package}\n")
            (folder / "thread_siblings_list").write_text(f"{core // 2 * 2}-{core // 2 * 2 + 1}\n")
        (tmp_path / "cpu/cpufreq").mkdir()
        for number, cores in numa.items():
            (tmp_path / f"node/node{number}").mkdir(parents=True)
            (tmp_path / f"node/node{number}/cpulist").write_text(f"{cores}\n")
        return tmp_path

    return make


def test_ranks_in_one_domain_in_one_socket_and_in_none(system):
    root = system([0] * 4 + [1] * 4, {0: "0-1", 1: "2,3", 2: "4-5", 3: "6-7", 4: ""})
    assert [socket_of({core}, root) for core in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert socket_of({2, 3}, root) == 1
    first, second = socket_of({0, 1, 2, 3}, root), socket_of({5, 6}, root)
    assert first != second
    assert min(first, second) > 3  # a socket is not taken for a domain
    assert socket_of({3, 4}, root) == -1


def test_where_the_system_tells_no_domains_it_is_the_socket(system):
    root = system([0, 0, 5, 5], {})
    assert [socket_of({core}, root) for core in range(4)] == [0, 0, 5, 5]
    assert socket_of({0, 3}, root) == -1


def test_where_the_system_tells_nothing_it_is_unknown(tmp_path):
    assert socket_of({0, 1}, tmp_path) == -1
    assert machine(tmp_path) == NodeHardware(0, 0, 0)


def test_what_a_node_has_counts_hardware_threads_once(system):
    root = system([0] * 4 + [1] * 4, {0: "0-3", 1: "4-7", 2: ""})
    assert machine(root) == NodeHardware(sockets=2, numa=2, cores=4)


def test_alone_it_is_one_rank_on_this_host():
    alone = discover(Group(), Group())
    assert (alone.hosts, alone.node) == ((socket.gethostname(),), (0,))
    assert alone.socket == (socket_of(os.sched_getaffinity(0)),)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.randoms())
def test_nodes_are_told_apart_though_host_names_are_alike(sizes, rnd: random.Random):
    true = [node for node, size in enumerate(sizes) for _ in range(size)]
    rnd.shuffle(true)  # however the launcher deals the ranks
    told = [(true.index(node), "same", rank) for rank, node in enumerate(true)]
    found = Topology.of(told)
    assert found.hosts == ("same",) * len(sizes)
    assert found.size == len(true)
    firsts = [found.ranks_of(node)[0] for node in range(len(sizes))]
    assert firsts == sorted(firsts)
    for node, ranks in enumerate(map(found.ranks_of, range(len(sizes)))):
        assert ranks == [rank for rank in range(len(true)) if true[rank] == true[ranks[0]]]
        assert found.ranks_per_node[node] == len(ranks)
    assert found.socket == tuple(range(len(true)))


def test_each_host_name_is_that_of_its_node():
    found = Topology.of([(0, "a", 0), (1, "b", 0), (0, "a", 1), (1, "b", 1), (4, "c", 0)])
    assert found.hosts == ("a", "b", "c")
    assert found.node == (0, 1, 0, 1, 2)


@pytest.mark.mpi
def test_all_ranks_discover_the_same(job):
    found = discover(job.world, job.node)
    everyone = job.world.comm.allgather(found) if job.world.comm else [found]
    assert everyone == [found] * job.world.size
    assert found.size == job.world.size
    assert found.hosts == (socket.gethostname(),)
    assert found.ranks_per_node == (job.node.size,)
