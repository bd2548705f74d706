"""Times of collectives: their figures, their time, and the ranks that measure them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

from hpc_train.errors import HpcTrainError
from hpc_train.job.communication import timing
from hpc_train.job.communication.budget import FEWEST_REPEATS, Budget, repeats
from hpc_train.job.communication.chart import svg
from hpc_train.job.communication.cores import BoundCores, binding_advice
from hpc_train.job.communication.figures import CollectiveFigure, bus_factor, elements, figure_of
from hpc_train.job.communication.timing import Case, WantedFigures, predicted, time_collectives
from hpc_train.mpi.levels import Levels


def test_bandwidths_are_those_of_nccl_tests():
    # The table of nccl-tests, doc/PERFORMANCE.md.
    assert bus_factor("allreduce", 8) == 2 * 7 / 8
    assert bus_factor("allgather", 8) == bus_factor("reduce_scatter", 8) == 7 / 8
    assert bus_factor("broadcast", 8) == 1
    found = figure_of(("all", "allreduce", "bare"), 4, 3 << 20, [0.5, 0.25, 1.0])
    assert (found.seconds, found.least, found.repeats) == (0.5, 0.25, 3)
    assert found.algorithm_bandwidth == 6 << 20
    assert found.bus_bandwidth == 9 << 20
    assert found.scatter == pytest.approx((0.75 - 0.375) / 2 / 0.5)


def test_a_ping_pong_takes_half_of_the_time_there_and_back():
    found = figure_of(("inside", "ping_pong", "bare"), 2, 1000, [2.0])
    assert (found.seconds, found.least, found.bus_bandwidth) == (1.0, 1.0, 1000)


def test_what_is_divided_has_as_many_elements_for_each_rank():
    assert elements("allreduce", 64, 3) == 16
    assert elements("allgather", 64, 3) == 15
    assert elements("reduce_scatter", 8, 3) == 0  # too small for three ranks


def test_all_cases_end_in_time_and_large_ones_get_more_of_it():
    now = 0.0
    budget = Budget(10.0, [8, 8, 64 << 20], clock=lambda: now)
    shares = [budget.share(8, 0.0), budget.share(8, 0.0), budget.share(64 << 20, 0.0)]
    assert sum(shares[:2]) < shares[2] == 10.0  # nobody has used any time
    budget = Budget(10.0, [8, 64 << 20, 8], clock=lambda: now)
    assert budget.share(8, 1.0) == 0.0  # six calls of a second are too many
    now = 9.5
    assert 0 < budget.share(64 << 20, 0.2) < 0.5
    now = 10.5
    assert budget.share(8, 0.0) == 0.0
    assert repeats(1.0, 0.01, 400) == 97
    assert (repeats(1.0, 1e-6, 400), repeats(0.1, 1.0, 400)) == (400, FEWEST_REPEATS)


def test_the_next_size_is_predicted_by_a_line():
    case = Case("all", "allreduce", "bare", 3000)
    before = [figure_of(case[:3], 4, size, [1.0 + size / 1000]) for size in (1000, 2000)]
    assert predicted(before, case) == pytest.approx(4.0)
    assert predicted(before[:1], case) == 0.0


def test_ranks_without_cores_of_their_own_are_found():
    def ranks(*cores, node=0, spread=False):
        return [BoundCores(node, f"n{node}", frozenset(own), spread) for own in cores]

    assert binding_advice(ranks("ab", "cd") + ranks("ab", "cd", node=2)) == []
    (few,) = binding_advice(ranks("a", "a", "b") + ranks("a", "b", node=3))
    assert "too few cores of n0 (3 ranks, 2 cores)," in few
    (bound,) = binding_advice(ranks("abcd", "abcd"))
    assert "several ranks may run on one core of n0; bind" in bound
    (spread,) = binding_advice(ranks("ab", "cd", spread=True))
    assert "several NUMA domains of n0" in spread


def test_a_drawing_has_each_figure_with_its_numbers():
    figures = [
        CollectiveFigure("all", "allreduce", who, 4, size, 1e-6 * size, 1e-6, 1e-6, 1e-6, 3)
        for who in ("bare", "ring")
        for size in (8, 1024)
    ]
    barrier = CollectiveFigure("all", "barrier", "bare", 4, 0, 1e-6, 1e-6, 1e-6, 1e-6, 3)
    root = ET.fromstring(svg([*figures, barrier], "a < b", ["a & b"]))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 8  # each figure in two plots
    assert "ring, 1 KiB: time 1.02 ms" in titles
    assert ET.fromstring(svg(figures[:1], "one", [])) is not None


@pytest.fixture
def two_nodes(group):
    """The ranks as if they were on two nodes."""
    if group is None:
        yield None
        return
    node = group.split(color=group.rank // 2, key=group.rank)
    cross = group.split(color=group.rank % 2, key=group.rank)
    levels = Levels.join(group, node, cross)
    yield levels
    levels.close()


CPU = torch.device("cpu")
EVERY = ("bare", "mpi", "shared", "ring", "halving", "pipeline")


@pytest.mark.ranks(3, later=(4,))
def test_inside_across_and_over_all_ranks_are_measured(two_nodes):
    """With three ranks the second node has one, which only waits while the first is measured."""
    wanted = WantedFigures((64, 4096), 600.0, EVERY, 3)
    found = time_collectives(two_nodes, CPU, wanted)
    if two_nodes.whole.rank:
        assert not found.figures
        return
    assert not found.notes
    by = {(f.scope, f.operation, f.implementation, f.nbytes): f for f in found.figures}
    assert len(by) == len(found.figures)
    for case in [
        ("inside", "allreduce", "shared"),
        ("inside", "ping_pong", "pipeline"),
        ("across", "allgather", "ring"),
        ("across", "reduce_scatter", "ring"),
        ("across", "allreduce", "halving"),
        ("all", "allreduce", "ring"),
        ("all", "allreduce", "halving"),
        ("all", "allreduce", "mpi"),
    ]:
        assert by[(*case, 4096)].repeats == 3
    assert by["all", "allreduce", "bare", 64].ranks == two_nodes.whole.size
    assert by["across", "barrier", "bare", 0].ranks == 2
    assert not any(scope == "all" for scope, operation, *_ in by if operation == "ping_pong")


@pytest.mark.ranks(4)
def test_a_wrong_result_ends_all_ranks_with_the_rank_that_has_it(two_nodes, monkeypatch):
    if two_nodes.whole.rank == 3:
        right = timing.expected
        monkeypatch.setattr(timing, "expected", lambda *case: right(*case) + 1)
    with pytest.raises(HpcTrainError) as caught:
        time_collectives(two_nodes, CPU, WantedFigures((64,), 600.0, ("bare",), 3))
    assert caught.value.agreed
    assert f"rank 3 ({two_nodes.whole.host}): " in str(caught.value)
    assert "by bare MPI, called through mpi4py has a wrong result" in str(caught.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("least", "where"), [(0, "in all operations at 64 B"), (-1, "at all")])
def test_a_note_says_what_there_was_no_time_for(group, monkeypatch, least, where):
    monkeypatch.setattr(timing.Budget, "share", lambda _, nbytes, __: float(nbytes <= least))
    found = time_collectives(Levels.of(group), CPU, WantedFigures((64,), 600.0, ("bare",), 3))
    if group.rank == 0:
        reason = "there was no time (--seconds gives more)"
        assert found.notes == [f"bare is not measured {where}: {reason}"]
