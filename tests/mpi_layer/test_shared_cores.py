"""Whether ranks share cores, by boot ids and cores."""

from __future__ import annotations

import pytest

from hpc_train.mpi.shared_cores import RankCores, must_share, shared_cores


def ranks(boot, host, count, cores):
    return [RankCores(boot, host, frozenset(cores))] * count


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (ranks("a", "n1", 2, "01") + ranks("b", "n2", 2, "01"), ""),
        (ranks("a", "n1", 1, "0") + ranks("a", "n1", 1, "1"), ""),
        (ranks("a", "n1", 3, "01"), "ranks share cores: n1 has 3 ranks and 2 cores"),
        (ranks("a", "n1", 2, "0"), "ranks share cores: n1 has 2 ranks and 1 core"),
        (
            ranks("a", "n1", 1, "0") + ranks("a", "n2", 1, "1"),
            "hosts share cores: n1, n2 are one machine",
        ),
        (ranks("", "n1", 1, "0") + ranks("", "n2", 1, "0"), ""),  # no boot id is known
    ],
)
def test_ranks_share_cores_or_do_not(places, why):
    assert shared_cores(places) == why


def test_of_many_hosts_some_are_named():
    many = [one for i in range(6) for one in ranks("a", f"n{i}", 1, "0")]
    assert shared_cores(many) == "hosts share cores: n0, n1, n2, n3 and 2 more are one machine"


@pytest.mark.parametrize(
    ("bound", "shared"),
    [
        (["0", "1", "2"], False),
        (["01", "01"], False),
        (["01", "01", "01"], True),
        (["0", "0", "1", "2"], True),
        (["0123", "0123", "0", "0"], True),
        (["0123", "0123", "0", "1"], False),
        (["01", "01", "0", "23"], True),
    ],
)
def test_ranks_must_share_threads_of_which_they_have_too_few(bound, shared):
    assert must_share([frozenset(map(int, cpus)) for cpus in bound]) == shared
