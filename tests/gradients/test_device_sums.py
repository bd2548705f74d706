"""Sums over the GPUs of the ranks, for which torch's sums over processors stand in."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from hpc_train.collectives import device, node
from hpc_train.collectives.coroutines import CoroutineScheduler
from hpc_train.collectives.device import DeviceCollectives
from hpc_train.collectives.ring import Library, Ring
from hpc_train.errors import SetupError, UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.autotune import device_way
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.device_sums import DeviceNodeSums, DeviceSums
from hpc_train.gradients.options import AveragingOptions
from tests.gradients.gloo import pretend
from tests.system.test_same import Model, levels_of, loss, optimizer_of, samples

pytestmark = pytest.mark.mpi
CPU = torch.device("cpu")
ROUNDS = 20
SIZES = [5, 1, 8, 0, 1000]


@pytest.fixture(autouse=True)
def _gloo(monkeypatch):
    pretend(monkeypatch)


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
    gpus = DeviceCollectives(group, CPU, purpose="gradient")
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
def test_the_faster_way_is_taken_and_told(job, caplog):
    caplog.set_level(logging.INFO)
    levels = halves(job.world)
    _, closing = device_way(levels, AveragingOptions(engine="nccl"), CPU)
    for close in closing:
        close()
    levels.close()
    assert job.world.rank or "NCCL in nodes, MPI between them" in caplog.text


@pytest.mark.mpi(min_size=4)
def test_too_little_shared_memory_is_told_and_does_without(job, caplog, monkeypatch):
    monkeypatch.setattr(node, "SPARE", 1 << 60)
    levels = halves(job.world)
    options = AveragingOptions(engine="nccl", two_level="on")
    model = Model().double()
    averager = average_gradients(model, optimizer_of("SGD", model), levels, options)
    kind = type(averager.sums)
    loss(model, samples(0)).backward()
    averager.step()
    averager.close()
    levels.close()
    assert kind is DeviceSums
    assert job.world.rank or "gradients are averaged by NCCL" in caplog.text


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
        DeviceCollectives(job.world, CPU, purpose="gradient")


def test_torch_without_such_a_library_is_named(job, monkeypatch):
    monkeypatch.delattr(dist, device.BACKENDS["cuda"])
    with pytest.raises(SetupError, match=r"torch .* has no ProcessGroupNCCL for cpu"):
        DeviceCollectives(job.world, CPU, purpose="gradient")


def test_a_library_that_fails_on_one_rank_is_told_by_all(job, monkeypatch):
    last = job.world.size - 1

    class Backend:
        def allreduce(self, tensors, options):
            tensors[0].fill_(last + 1)
            if job.world.rank == last:
                raise RuntimeError("unhandled system error\nmore")
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(device, "_backend", lambda *_: Backend())
    with pytest.raises(
        SetupError, match="connected: unhandled system error: set NCCL_DEBUG"
    ) as error:
        DeviceCollectives(job.world, CPU, purpose="gradient")
    assert f"rank {last}" in str(error.value)


def test_a_wrong_sum_is_noticed(job, monkeypatch):
    class Backend:
        def allreduce(self, tensors, options):
            return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(device, "_backend", lambda *_: Backend())
    with pytest.raises(SetupError, match="the sum of 1 over the GPUs of . ranks is 1"):
        DeviceCollectives(job.world, CPU, purpose="gradient")
