"""Layouts over emulated hosts whose ranks are dealt round-robin: the worst numbering there is.

Tensor-parallel groups lie on one host all the same, and what crosses hosts in a step is what the
formula below says.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from hpc_train.config import RunConfig
from hpc_train.mpi.group import Group
from hpc_train.mpi.placement import Placement, place
from hpc_train.mpi.runtime import Runtime
from hpc_train.mpi.topology import Topology
from hpc_train.parallel.divide import divide
from tests.cluster import traffic
from tests.cluster.hosts import hosts
from tests.programs import hpc_train, python

NODES, SLOTS = 4, 2
RANKS = NODES * SLOTS
HOSTS = tuple(f"node{number + 1}" for number in range(NODES))
DEALT = Topology(HOSTS, tuple(rank % NODES for rank in range(RANKS)), (-1,) * RANKS)
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}
FLOAT64 = 8  # bytes
LAYOUTS = [
    "dp=8",
    "dp=4 tp=2",
    pytest.param("dp=2 tp=2 pp=2", marks=pytest.mark.long),
    "dp=2 tp=2 pp=2 sequence_parallel=true",
    pytest.param("tp=2 pp=4", marks=pytest.mark.long),
    "tp=2 pp=4 schedule=interleaved",
]

Sent = tuple[int, int, float]  # from rank, to rank, bytes


def ring(group: tuple[int, ...], size: float) -> list[Sent]:
    """An allreduce: each of p ranks passes 2 (p - 1) / p of the data on to the next one.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    JPDC 69, 2009; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", IJHPCA 19, 2005.
    """
    share = 2 * (len(group) - 1) / len(group) * size
    return [(rank, group[(i + 1) % len(group)], share) for i, rank in enumerate(group)]


def two_levels(group: tuple[int, ...], topology: Topology, size: float) -> list[Sent]:
    """Averaging in two levels: of each host as many ranks as all have send, each its part."""
    by_node: dict[int, list[int]] = {}
    for rank in group:
        by_node.setdefault(topology.node[rank], []).append(rank)
    owners = list(zip(*by_node.values(), strict=False))
    return [one for cross in owners for one in ring(cross, size / len(owners))]


def gradients(config: RunConfig, stage: int, tp: int, pp: int) -> int:
    """Bytes of the gradients that one rank of a pipeline stage has."""
    model, virtual_stages = config.model, config.parallel.stages_per_rank
    c, v, layers = model.hidden, model.vocab, model.layers
    block = 12 * c * c // tp + 7 * c // tp + 6 * c  # matrices; divided biases; biases and norms
    token, position, norm = v * c // tp, model.sequence * c, 2 * c
    if pp == 1:  # the output layer is the token embedding
        return FLOAT64 * (token + position + layers * block + norm)
    parts = [token + position, *[block] * layers, norm + token]
    runs = divide([0, *[12 * c * c] * layers, v * c], pp * virtual_stages)
    return FLOAT64 * sum(parts[i] for run in runs[stage::pp] for i in run)


def sent_in_a_step(config: RunConfig, placement: Placement) -> list[Sent]:
    """All that ranks send in a step, except inside tensor-parallel groups and single numbers.

    The gradients of a stage are averaged over its replicas. The stages' ends exchange activations
    of each micro-batch, and gradients of them; the first and the last add up the gradients of the
    token embedding, which both have.
    """
    model, data, layout = config.model, config.data, config.parallel
    dp, tp, pp = placement.dp, placement.tp, placement.pp
    tokens = model.sequence // (tp if layout.sequence_parallel else 1)
    activations = data.batch // dp * tokens * model.hidden * FLOAT64  # of all micro-batches
    groups = placement.groups()
    sent = []
    for group in groups["data"]:
        stage = placement.coordinate(group[0]).pp
        sent += two_levels(group, placement.topology, gradients(config, stage, tp, pp))
    for pipe in groups["pipe"]:
        for one, other in pairwise(pipe * layout.stages_per_rank):
            sent += [(one, other, activations), (other, one, activations)]
    for ends in groups["embedding"]:
        sent += ring(ends, model.vocab // tp * model.hidden * FLOAT64)
    return sent


def crossing(sent: list[Sent], topology: Topology) -> dict[str, float]:
    """The bytes that each host sends to others."""
    node, found = topology.node, Counter(dict.fromkeys(topology.hosts, 0.0))
    for one, other, size in sent:
        if node[one] != node[other]:
            found[topology.hosts[node[one]]] += size
    return dict(found)


@pytest.fixture(scope="module")
def cluster():
    with hosts(NODES, SLOTS) as up:
        for host in up.names:
            # The links lose nothing, but on a busy machine packets overtake each other, and TCP
            # would take them for lost and send 64 KiB again. Without SACK it waits for 0.2 s.
            done = up.on(host, ["sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_sack"])
            assert done.returncode == 0, done.stderr
        yield up


def shown(cluster, *options):
    """What `hpc-train topology` says of ranks that are dealt round-robin."""
    done = cluster.run(hpc_train("topology", "--json", *options), RANKS, "node")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    dealt = [(f"node{n + 1}", [n, n + NODES]) for n in range(NODES)]
    assert [
        (node["host"], [rank["rank"] for rank in node["ranks"]]) for node in found["nodes"]
    ] == (dealt)
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_groups_lie_on_one_host_though_ranks_are_dealt(cluster, pp):
    found = shown(cluster, "--tp", "2", "--pp", str(pp))
    places = [{(rank["dp"], rank["pp"]) for rank in node["ranks"]} for node in found["nodes"]]
    assert [len(place) for place in places] == [1] * NODES
    assert len(set.union(*places)) == NODES
    assert all({rank["tp"] for rank in node["ranks"]} == {0, 1} for node in found["nodes"])
    assert found["groups"]["tp"]["nodes"] == 0
    assert found["warning"] == ""


def test_tensor_groups_that_no_host_can_hold_are_warned_of(cluster):
    found = shown(cluster, "--tp", "4")
    assert found["groups"]["tp"] == {"socket": 0, "node": 0, "nodes": 2}
    assert "2 of 2 tensor-parallel groups of 4 ranks lie across nodes" in found["warning"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def measured(request, cluster, runs):
    """For each layout of the tests that run, the bytes that each host sends to others in a step."""
    tests = [test for test in request.session.items if "measured" in test.fixturenames]
    layouts = dict.fromkeys(test.callspec.params["layout"] for test in tests)
    program = python("-m", "tests.cluster.traffic", str(runs), *layouts)
    done = cluster.run(program, RANKS, "node", environ=RING)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def alone(runs):
    """The losses of one process."""
    config = traffic.configuration("", runs)
    traffic.train(config, Runtime(Group(), Group()))
    return traffic.losses(config)


@pytest.mark.slow("the first one starts jobs over hosts for all")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_across_hosts_what_the_formula_says(measured, runs, layout):
    config = traffic.configuration(layout, runs)
    sizes = config.parallel
    placement = place(DEALT, sizes.dp, sizes.tp, sizes.pp)
    assert not placement.crossing()
    formula = crossing(sent_in_a_step(config, placement), DEALT)
    print(layout, {"measured": measured[layout], "formula": formula})
    assert measured[layout] == pytest.approx(formula, rel=0.05)


@pytest.mark.slow("the first one starts jobs over hosts for all")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_over_hosts_are_those_of_one_process(measured, alone, runs, layout):
    assert measured[layout]
    losses = traffic.losses(traffic.configuration(layout, runs))
    assert len(losses) == traffic.MORE
    assert losses == pytest.approx(alone, rel=1e-10)


def test_the_formula_knows_who_shares_a_host():
    """In a ring of all ranks, with two on each host: dealt out, all pass on to another host;
    packed, every other one does."""
    sent = ring(tuple(range(RANKS)), 800.0)
    packed = replace(DEALT, node=tuple(rank // SLOTS for rank in range(RANKS)))
    assert crossing(sent, DEALT) == dict.fromkeys(HOSTS, 2 * 1400.0)
    assert crossing(sent, packed) == dict.fromkeys(HOSTS, 1400.0)
