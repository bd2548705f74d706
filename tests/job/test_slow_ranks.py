"""Ranks that exchange their numbers over MPI name the slow one."""

from __future__ import annotations

import time

import pytest

from hpc_train.job import slow_ranks
from hpc_train.job.slow_ranks import LEAST_STEPS, WARM_UP, SlowRanks
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime


def watched(job, monkeypatch):
    monkeypatch.setattr(slow_ranks, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(slow_ranks, "COST", 0)
    return SlowRanks(job, [f"node{rank}" for rank in range(job.world.size)], [0] * job.world.size)


def take(job, slow, steps, work):
    """Take steps that end together."""
    found = []
    for _ in range(steps):
        work(job.world.waiting.phases)
        job.world.barrier()
        slow.count_step()
        found.append(slow.take())
    return [one for one in found if one is not None]


@pytest.mark.mpi(min_size=2)
def test_a_rank_whose_data_comes_late_is_named(job, monkeypatch, caplog):
    slow = watched(job, monkeypatch)
    last = job.world.size - 1

    def work(phases):
        with phases("data"):
            time.sleep(0.05 if job.world.rank == last else 0.001)

    named = take(job, slow, WARM_UP + 3 * LEAST_STEPS, work)
    if job.world.rank:
        assert not named
        assert slow.named is None
    else:
        assert [(one.rank, one.cause) for one in named] == [(last, "data")]
        assert slow.named.rank == last
        assert f"rank {last} (node{last}) is slow: its data takes" in caplog.text


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_computes_more_is_named(job, monkeypatch):
    slow = watched(job, monkeypatch)
    for probe in ("arithmetic_seconds", "memory_seconds"):  # ranks without a core measure anything
        monkeypatch.setattr(slow_ranks.probes, probe, lambda: 1e-3)

    def work(phases):
        until = time.thread_time() + (0.06 if job.world.rank == 1 else 0.002)
        with phases("forward"):
            while time.thread_time() < until:
                pass

    named = take(job, slow, WARM_UP + 5 * LEAST_STEPS, work)
    if job.world.rank == 0:
        assert [(one.rank, one.cause) for one in named][:1] == [(1, "compute")]


@pytest.mark.mpi(min_size=2)
def test_waits_and_saves_are_nobodys_own_time(job, monkeypatch):
    slow = watched(job, monkeypatch)

    def work(phases):
        with phases("save" if job.world.rank else "communication"):
            time.sleep(0.01)

    slow.start()
    take(job, slow, WARM_UP, work)
    for _ in range(LEAST_STEPS):
        work(job.world.waiting.phases)
        job.world.barrier()
        slow.count_step()
    measured = slow._measured()
    assert measured["wall"] >= 0.01
    assert measured["data"] == 0
    assert measured["compute"] < measured["wall"] - 0.009


@pytest.mark.mpi(min_size=2)
def test_the_steps_of_a_profile_do_not_count(job, monkeypatch):
    slow, phases = watched(job, monkeypatch), job.world.waiting.phases

    def work(phases):
        with phases("data"):
            time.sleep(0.02 if job.world.rank == 1 else 0.001)

    take(job, slow, WARM_UP + LEAST_STEPS - 1, work)  # all but one of the steps of a table
    monkeypatch.setattr(phases, "listener", lambda *_: None)
    of_profile = take(job, slow, WARM_UP + 3 * LEAST_STEPS, work)
    monkeypatch.setattr(phases, "listener", None)
    of_profile += take(job, slow, WARM_UP, work)
    counted = slow._steps
    later = take(job, slow, 2 * LEAST_STEPS, work)
    assert of_profile == []
    assert counted == 0
    assert len(later) == (job.world.rank == 0)


def test_a_process_alone_exchanges_nothing(monkeypatch):
    slow = watched(Runtime(Group(), Group()), monkeypatch)
    for _ in range(50):
        slow.step()
    assert slow.named is None
    assert slow._own == []
