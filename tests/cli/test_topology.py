"""hpc-train topology, as it is run: alone and under a launcher."""

from __future__ import annotations

import json
import os
import socket

import pytest

from hpc_train.cli.topology import draw, spans, tree
from hpc_train.mpi.placement import place
from hpc_train.mpi.topology import Topology
from tests.programs import command, hpc_train, modules_of, only_line, run


def printed(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_alone_it_draws_this_process():
    shown = printed(run(*hpc_train("topology", "--json")))
    assert (shown["dp"], shown["tp"], shown["pp"]) == (1, 1, 1)
    (node,) = shown["nodes"]
    assert node["host"] == socket.gethostname()
    (rank,) = node["ranks"]
    assert rank["bound_to"] == sorted(os.sched_getaffinity(0))
    assert (rank["rank"], rank["dp"], rank["tp"], rank["pp"]) == (0, 0, 0, 0)
    text = run(*hpc_train("topology")).stdout
    assert text.startswith("dp 1 x tp 1 x pp 1")
    assert socket.gethostname() in text


def test_alone_it_loads_neither_mpi_nor_torch():
    code, told, modules = modules_of("topology")
    assert (code, {"torch", "mpi4py.MPI"} & modules) == (0, set()), told


def test_under_a_launcher_rank_0_draws_all_ranks():
    shown = printed(run(*command("mpirun", 4, "topology", "--tp", "2", "--json")))
    ranks = [rank for node in shown["nodes"] for rank in node["ranks"]]
    places = [(rank["rank"], rank["dp"], rank["tp"], rank["pp"]) for rank in ranks]
    assert places == [(0, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, 0), (3, 1, 1, 0)]
    assert (shown["dp"], shown["tp"], shown["pp"]) == (2, 2, 1)
    assert {axis: sum(counts.values()) for axis, counts in shown["groups"].items()} == {
        "dp": 2,
        "tp": 2,
        "pp": 4,
    }
    text = run(*command("mpirun", 4, "topology", "--pp", "2")).stdout
    assert text.count("dp 2 x tp 1 x pp 2") == 1
    rows = [line.split() for line in text.splitlines()]
    assert [row[:4] for row in rows if len(row) == 6] == [  # the first has the node, too
        ["1", "0", "0", "1"],
        ["2", "1", "0", "0"],
        ["3", "1", "0", "1"],
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dp", "3", "--tp", "2"], "dp 3 x tp 2 x pp 1 is 6, the job has 4 ranks: nearest"),
        (["--tp", "3"], "does not divide the job's 4 ranks"),
        (["--pp", "0"], "parallel.pp is 0"),
        (["--tp", "some"], "some"),
    ],
)
def test_a_wrong_size_is_one_line_and_code_2(options, says):
    done = run(*command("mpirun", 4, "topology", *options))
    assert done.returncode == 2
    assert says in only_line(done.stderr)


def test_a_wrong_option_is_one_line_and_code_2():
    done = run(*hpc_train("topology", "--nodes", "2"))
    assert done.returncode == 2
    assert "--nodes" in only_line(done.stderr)


def test_several_nodes_are_drawn_with_what_lies_across_them(capsys):
    where = Topology(("one", "two"), (0, 1, 0, 1, 0, 1), (0, -1, 0, -1, 1, -1))
    machine = {"sockets": 2, "numa": 2, "cores": 8}
    machines = [machine, machine, None, None, None, None]
    shown = tree(place(where, None, 2, 1), machines, [[0, 1, 4]] * 6)
    assert shown["groups"]["tp"] == {"socket": 1, "node": 1, "nodes": 1}
    assert shown["groups"]["dp"] == {"socket": 0, "node": 0, "nodes": 2}
    assert [[rank["rank"] for rank in node["ranks"]] for node in shown["nodes"]] == [
        [0, 2, 4],
        [1, 3, 5],
    ]
    draw(shown)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "one: sockets 2, cores 8 0 0 0 0 0 0-1,4" in lines
    assert "two: sockets 2, cores 8 1 1 0 0 - 0-1,4" in lines
    assert "tp 2 1 1 1" in lines
    assert lines[-1].startswith("warning: 1 of 3 tensor-parallel groups of 2 ranks lie across")


def test_cores_are_written_as_the_kernel_writes_them():
    assert spans([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert spans([5]) == "5"
