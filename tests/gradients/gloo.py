"""Stands in for NCCL: torch's sums over processors, under NCCL's name."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from hpc_train.collectives import device
from hpc_train.gradients import device_sums
from hpc_train.gradients.options import AveragingOptions
from tests.gradients.late_lane import LateLane


class Gloo:
    begun: ClassVar[list] = []

    class Options:
        pass

    def __init__(self, store, rank, size, options):
        self.real = dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=1))
        self.shutdown = self.real.shutdown

    def allreduce(self, tensors, options):
        self.begun.append(len(tensors[0]))
        return self.real.allreduce(tensors, options)

    def _reduce_scatter_base(self, part, flat, options):
        return Scattered(self, part, flat.clone())


class Scattered:
    """The sum of a part. Gloo's own cannot be asked whether it has ended."""

    def __init__(self, gloo, part, whole):
        self.part, self.mine = part, whole.split(len(part))[gloo.real.rank()]
        self.begun = gloo.allreduce([whole], dist.AllreduceOptions())

    def is_completed(self):
        if not self.begun.is_completed():
            return False
        self.part.copy_(self.mine)
        return True

    def wait(self):
        self.begun.wait()


def pretend(monkeypatch) -> None:
    """Let processors be GPUs for engine nccl, whose copies to the host end late."""
    monkeypatch.setattr(dist, device.BACKENDS["cuda"], Gloo, raising=False)
    monkeypatch.setitem(device.BACKENDS, "cpu", device.BACKENDS["cuda"])
    monkeypatch.setattr(AveragingOptions, "_check_device", lambda *_: None)
    monkeypatch.setattr(device_sums, "CopyLane", LateLane)
