"""Sums over the GPUs of the ranks, for which torch's sums over processors stand in."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from hpc_train.collectives import device, node
from hpc_train.collectives.coroutines import CoroutineScheduler, drive
from hpc_train.collectives.device import DeviceCollectives
from hpc_train.collectives.ring import Library, Ring
from hpc_train.errors import HpcTrainError, SetupError, UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.autotune import device_way
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.device_sums import DeviceNodeSums, DeviceSums
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi.group import Group
from tests.gradients.gloo import Gloo, pretend
from tests.system.test_same import levels_of

pytestmark = pytest.mark.mpi
CPU = torch.device("cpu")
ROUNDS = 20
SIZES = [5, 1, 8, 0, 1000]


@pytest.fixture(autouse=True)
def _gloo(monkeypatch):
    pretend(monkeypatch)


def start(model, group, **options):
    optimizer = torch.optim.SGD(model.parameters())
    return average_gradients(model, optimizer, group, AveragingOptions(engine="nccl", **options))


def halves(world):
    """The ranks on two nodes."""
    return levels_of(world, tuple(2 * rank // world.size for rank in range(world.size)))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", [Ring, Library, None])
def test_each_bucket_gets_its_sum_however_late_copies_and_messages_end(job, kind):
    world = job.world
    world.waiting.traffic.clear()
    levels = halves(world)
    buckets = [Bucket([Parameter(torch.empty(n, dtype=torch.float64))]) for n in SIZES]
    group = world if kind is None else levels.node
    gpus = DeviceCollectives(group, CPU)
    if kind is None:
        sums = DeviceSums(gpus, buckets)
    else:
        sums = DeviceNodeSums(levels, gpus, buckets, kind(levels.cross))
    wrong = []
    for round_ in range(ROUNDS):
        scheduler = CoroutineScheduler()
        for number, flat in enumerate(sums.flats):
            flat.copy_(torch.arange(len(flat)) * (world.rank + 1) + round_)
            scheduler.start(sums.begin(number))
            for _ in range((world.rank + number) % 3):
                scheduler.advance()
        scheduler.finish(polite=True)
        factor = world.size * (world.size + 1) // 2
        wrong += [
            (round_, n)
            for n, flat in zip(SIZES, sums.flats, strict=True)
            if not torch.equal(flat, (torch.arange(n) * factor + round_ * world.size).double())
        ]
    counted = {(name, link): n for name, link, n, _ in world.waiting.traffic.counted()}
    sums.close()
    gpus.close()
    assert not wrong
    assert sums.profile.buckets == ROUNDS * len(SIZES)
    assert counted["gradient sums", "inside"] > 0
    if kind is not None:  # two nodes: each rank sends its part once
        sent = counted["gradient sums", "across"]
        assert sent == sums.profile.sent
        assert sent >= ROUNDS * 8 * sum(SIZES) / levels.node.size
    levels.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("nodes", "two_level", "expected"),
    [
        ((0, 0, 1, 1), "on", DeviceNodeSums),
        ((0, 0, 1, 1), "off", DeviceSums),
        ((0, 0, 0, 1), "on", DeviceSums),  # the parts of the nodes would not fit each other
        ((0, 1, 2, 3), "on", DeviceSums),
        ((0, 0, 0, 0), "on", DeviceSums),
    ],
)
def test_nodes_with_as_many_gpus_each_can_sum_first(job, nodes, two_level, expected):
    levels = levels_of(job.world, nodes[: job.world.size])
    make, closing = device_way(levels, AveragingOptions(engine="nccl", two_level=two_level), CPU)
    sums = make([Bucket([Parameter(torch.zeros(3))])])
    kind = type(sums)
    sums.close()
    for close in closing:
        close()
    levels.close()
    assert kind is expected


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_faster_way_is_taken_and_told(job, caplog, deterministic):
    """In a deterministic run nothing is measured."""
    caplog.set_level(logging.INFO)
    levels = halves(job.world)
    options = AveragingOptions(engine="nccl", deterministic=deterministic)
    make, closing = device_way(levels, options, CPU)
    sums = make([])
    kind = type(sums)
    sums.close()
    for close in closing:
        close()
    levels.close()
    told = "NCCL in nodes, MPI between them" in caplog.text
    assert kind is DeviceSums or not deterministic
    assert job.world.rank or told != deterministic


@pytest.mark.mpi(min_size=4)
def test_too_little_shared_memory_on_one_node_is_one_line(job, monkeypatch):
    levels = halves(job.world)
    if levels.cross.rank == 1:
        monkeypatch.setattr(node, "SPARE", 1 << 60)
    with pytest.raises(SetupError, match="rank . .*: /dev/shm of .* has .*B free") as error:
        start(nn.Linear(3, 2), levels, two_level="on")
    assert str(error.value).count("rank ") == 1
    levels.close()


def test_a_sum_begins_on_a_gpu_only_when_all_programs_have_come_to_it(job, monkeypatch):
    """Here one rank has no samples, so it comes later."""
    begun = []
    monkeypatch.setattr(Gloo, "begun", begun)
    world, last = job.world, job.world.rank == job.world.size - 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    averager = start(model, world, bucket_bytes=1)
    before, sums = [], []
    for _ in range(4):
        averager.zero_grad()
        begun.clear()
        weight = averager.weight(0 if last else 1)
        if not last:
            (weight * model(torch.ones(1, 3).double()).sum()).backward()
        time.sleep(0.02)
        before.append(len(begun))
        world.barrier()
        averager.step()
        sums.append(len(begun))
    averager.close()
    assert (before, sums) == ([0] * 4, [4] * 4)


def test_two_averagers_at_once_are_refused(job):
    averager = start(nn.Linear(3, 2), job.world)
    with pytest.raises(UserError, match="one averager at a time, and another one is open"):
        start(nn.Linear(2, 1), job.world)
    averager.close()
    start(nn.Linear(2, 1), job.world).close()


def test_a_sum_that_fails_names_the_rank(job):
    gpus = DeviceCollectives(job.world, CPU)

    def fail():
        raise RuntimeError("NCCL error\nmore")

    gpus._backend.allreduce = lambda *_: SimpleNamespace(is_completed=lambda: True, wait=fail)
    with pytest.raises(HpcTrainError, match=rf"on rank {job.world.rank} of them .*: NCCL error"):
        drive(gpus.sum_(torch.ones(3)), polite=True)
    gpus.close()


def test_replicas_can_take_steps_by_themselves(job):
    torch.manual_seed(job.world.rank)
    model = nn.Linear(3, 2).double()
    averager = average_gradients(
        *(model, torch.optim.AdamW(model.parameters()), job.world),
        AveragingOptions(engine="nccl", average_every=2),
    )
    for _ in range(4):
        averager.zero_grad()
        model(torch.randn(5, 3).double()).square().mean().backward()
        averager.step()
    averager.close()
    everyone = job.world.gathered(model.weight.detach().numpy().tobytes())
    assert len(set(everyone)) == 1


def test_ranks_that_share_a_gpu_are_refused(job, monkeypatch):
    monkeypatch.setattr(device, "gpu_uuid", lambda _: "GPU 1")
    with pytest.raises(UserError, match="ranks 0 and 1 share a GPU of .*one for each rank"):
        start(nn.Linear(3, 2), job.world)


@pytest.mark.parametrize("missing", [device.BACKENDS["cuda"], "TCPStore"])
def test_torch_without_such_a_library_is_named(job, monkeypatch, missing):
    monkeypatch.delattr(dist, missing)
    with pytest.raises(SetupError, match=r"torch .* has no ProcessGroupNCCL for cpu"):
        DeviceCollectives(job.world, CPU)


@pytest.mark.parametrize("waits", [False, True])
def test_a_library_that_fails_on_one_rank_is_told_by_all(job, monkeypatch, caplog, waits):
    """Also if the other ranks wait for that one in the library."""
    last = job.world.size - 1
    monkeypatch.setattr(device, "CONNECT_SECONDS", 1.0)

    def allreduce(self, tensors, options):
        tensors[0].fill_(last + 1)
        if job.world.rank == last:
            raise RuntimeError("unhandled system error\nmore")
        if waits:
            threading.Event().wait()
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(Gloo, "allreduce", allreduce)
    spare = Group.of(job.world.comm)  # its communicator cannot be used any more
    told = "cannot be connected: unhandled system error: set NCCL_DEBUG"
    others = "are not connected after 1 s: look for a rank that told an error" if waits else told
    expected = told if job.world.rank == last else others
    with pytest.raises(SetupError, match=expected):
        DeviceCollectives(spare, CPU)
    assert (f"rank {last} (" in caplog.text) == (job.world.rank == last)


def test_a_wrong_sum_is_noticed(job, monkeypatch):
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(Gloo, "allreduce", lambda *_: done)
    with pytest.raises(SetupError, match="cannot be connected: the sum of 1 over them is 1"):
        DeviceCollectives(job.world, CPU)
