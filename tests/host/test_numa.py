"""NUMA nodes, from what Linux says of them."""

from __future__ import annotations

import pytest

from hpc_train.host.numa import read_numa


@pytest.fixture
def system(tmp_path):
    """Makes a /sys/devices/system of NUMA nodes: the CPUs and the distances of each."""

    def make(nodes):
        for number, (cpus, distances) in nodes.items():
            folder = tmp_path / f"node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cpus}\n")
            (folder / "distance").write_text(f"{distances}\n")
        return read_numa(tmp_path)

    return make


def test_distances_count_from_the_nearest_node_of_the_cores(system):
    numa = system({0: ("0-1", "10 12 32"), 1: ("2,3", "12 10 30"), 2: ("4-5", "32 30 10")})
    assert numa.reach([0]) == {0: 10, 1: 12, 2: 32}
    assert numa.reach([1, 2]) == {0: 10, 1: 10, 2: 30}
    assert numa.reach(range(6)) == {0: 10, 1: 10, 2: 10}


def test_nodes_that_are_only_memory_have_a_distance_and_no_cores(system):
    numa = system({0: ("0-3", "10 21 13"), 2: ("", "21 10 23"), 8: ("4-7", "13 23 10")})
    assert set(numa.cpus) == {0, 8}
    assert numa.reach([5]) == {0: 13, 2: 23, 8: 10}


def test_a_node_is_nearest_to_itself_where_the_firmware_tells_no_distances(system):
    numa = system({0: ("0", ""), 1: ("1", "")})
    reach = numa.reach([1])
    assert reach[1] < reach[0]


def test_the_parts_of_a_machine_are_equal_and_follow_its_nodes(system):
    """Some firmware numbers the cores of two sockets in turn."""
    numa = system({0: ("0,2,4,6", "10 20"), 1: ("1,3,5,7", "20 10")})
    assert [numa.part(rank, 4) for rank in range(4)] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert [len(numa.part(rank, 3)) for rank in range(3)] == [2, 3, 3]


def test_where_linux_tells_nothing_there_are_none(tmp_path):
    numa = read_numa(tmp_path)
    assert not numa.cpus
    assert numa.reach([0, 1]) == {}
