"""Buckets on a device are summed as those in host memory are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hpc_train.collectives import connect
from hpc_train.collectives.coroutines import CoroutineScheduler
from hpc_train.collectives.protocol import Done
from hpc_train.gradients import autotune, average_gradients, staged_sums
from hpc_train.gradients import sums as sums_module
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.staged_sums import StagedSums, in_host_memory
from hpc_train.gradients.sums import CollectiveSums, LevelSums
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from tests.gradients.late_lane import LateLane
from tests.system.test_same import Model, levels_of, loss, optimizer_of, samples

ROUNDS = 20


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    monkeypatch.setattr(staged_sums, "CopyLane", LateLane)
    monkeypatch.setattr(staged_sums, "STAGED_BYTES", 24)


@pytest.mark.mpi
@pytest.mark.parametrize("memory", ["shared", "MPI's"])
def test_sums_begin_in_one_order_whichever_copy_is_asked_first(job, memory):
    world, made = job.world, []

    def make(buckets):
        if memory == "shared":
            made.append(LevelSums(Levels.of(world), buckets, None))
        else:
            made.append(CollectiveSums(connect(world), buckets))
        return made[0]

    buckets = [Bucket([Parameter(torch.empty(5, dtype=torch.float64))]) for _ in range(12)]
    sums = StagedSums(buckets, make)
    assert in_host_memory(sums) is made[0]
    assert len(made[0].flats) == 2 * len(buckets)  # each has two pieces
    assert (sums.early, sums.profile) == (made[0].early, made[0].profile)
    for round_ in range(ROUNDS):
        scheduler = CoroutineScheduler()
        for number, flat in enumerate(sums.flats):
            flat.fill_(number * 1000 + round_ + world.rank)
            scheduler.start(sums.begin(number))
            for _ in range((world.rank + number) % 3):
                scheduler.advance()
        scheduler.finish(polite=True)
        ranks = world.size * (world.size - 1) // 2
        sent = [(number * 1000 + round_) * world.size + ranks for number in range(12)]
        assert [flat.unique().tolist() for flat in sums.flats] == [[value] for value in sent]
    sums.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("compression", ["bf16", "topk:0.25"])
def test_compressed_gradients_are_those_of_host_memory(job, monkeypatch, compression):
    """Also the residuals, which a loss scale changes."""
    world, ends = job.world, []
    nodes = tuple(2 * rank // world.size for rank in range(world.size))
    for staged in (False, True):
        if staged:
            monkeypatch.setattr(
                autotune,
                "staged",
                lambda make, _, **how: lambda some: StagedSums(some, make, **how),
            )
        torch.manual_seed(0)
        model = Model().double()
        optimizer = optimizer_of("SGD", model)
        options = AveragingOptions(compression=compression)
        averager = average_gradients(model, optimizer, levels_of(world, nodes), options)
        assert isinstance(averager.sums, StagedSums if staged else LevelSums)
        for step in range(4):
            averager.zero_grad()
            loss(model, samples(step + world.rank)).backward()
            averager.step()
            averager.rescale(0.5)
        averager.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_bucket_is_copied_after_the_work_of_the_stream_that_has_filled_it(monkeypatch):
    """And it is copied back without waiting for the device, which may have much to do by then."""
    waited = []

    class Lane(LateLane):
        def copy(self, source, into, *, after_device=True):
            waited.append(after_device)
            return super().copy(source, into, after_device=after_device)

    monkeypatch.setattr(staged_sums, "CopyLane", Lane)
    bucket = Bucket([Parameter(torch.ones(3))])
    sums = StagedSums([bucket], lambda some: CollectiveSums(connect(Group()), some))
    steps = sums.begin(0)
    assert waited == [True]  # before anything of the sum goes on, which may be in a thread
    scheduler = CoroutineScheduler()
    scheduler.start(steps)
    scheduler.finish()
    assert waited == [True, False]
    sums.close()


def test_a_sum_in_gpu_memory_begins_after_the_work_of_the_stream_that_has_filled_the_bucket(
    monkeypatch,
):
    seen, here = [], []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            return f"event of {self.name}"

        def wait_event(self, event):
            seen.append((self.name, event))

    class Over:
        group = Group()

        def start_sum_(self, tensor):
            seen.append("sum")
            return Done(tensor)

    monkeypatch.setattr(sums_module, "stream_now", lambda tensor: here[-1])
    sums = CollectiveSums(Over(), [Bucket([Parameter(torch.ones(3, device="meta"))])])
    here.append(Stream("the hook"))
    steps = sums.begin(0)
    here.append(Stream("a thread"))  # which runs the coroutine
    list(steps)
    assert seen == [("a thread", "event of the hook"), "sum"]
