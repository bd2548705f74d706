"""Sums of buckets on a device, in the memory of its node.

A bucket is copied to the node's memory as soon as it is full, summed there as buckets of processors
are, and copied back. The device computes meanwhile. The node's memory is pinned, so that the device
reads and writes it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.staging import CopyLane, CopyMark, PinnedMemory
from hpc_train.gradients.sums import Sums

CPU = torch.device("cpu")


def in_host_memory(sums: Sums) -> Sums:
    """The sums of buckets in host memory: those behind `StagedSums`, or the same ones."""
    return sums.home if isinstance(sums, StagedSums) else sums


class StagedSums:
    """Implements `Sums` for buckets on a device, by sums of buckets in the node's memory.

    A sum has ended when its result is on the device. Work that the device gets afterwards, on any
    stream, sees it.

    Collective to make.

    Args:
        buckets: on any devices.
        make: makes the sums in the node's memory.

    Attributes:
        home: the sums in the node's memory.

    Raises:
        SetupError: `make` raises it.
    """

    def __init__(self, buckets: Sequence[Bucket], make: Callable[[Sequence[Bucket]], Sums]) -> None:
        self.home = make([bucket.on(CPU) for bucket in buckets])
        self.profile, self.early = self.home.profile, self.home.early
        devices = {bucket.device for bucket in buckets}
        # Two lanes for each, as a GPU copies in both directions at once.
        self._away = {device: CopyLane(device) for device in devices}
        self._back = {device: CopyLane(device) for device in devices}
        self._pinned = [PinnedMemory(device, self.home.flats) for device in devices]
        self.flats = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]
        self._begun = self._passed = 0

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`), after the work that the caller's stream has by now."""
        # Not in the coroutine, which may run in a thread that has other streams.
        flat, home = self.flats[number], self.home.flats[number]
        mark = self._away[flat.device].copy(flat, home)
        self._begun += 1
        return self._sum(number, self._begun - 1, mark)

    def _sum(self, number: int, turn: int, mark: CopyMark) -> Coroutine[None]:
        # A later copy may be seen to have ended before an earlier one is asked. Yet all ranks must
        # begin sums in the same order.
        yield lambda: self._passed == turn and mark.query()
        self._passed += 1
        yield from self.home.begin(number)
        flat, home = self.flats[number], self.home.flats[number]
        yield self._back[flat.device].copy(home, flat, after_device=False).query

    def close(self) -> None:
        """Release the buffers. Collective."""
        for lane in (*self._away.values(), *self._back.values()):
            lane.finish()
        for pinned in self._pinned:
            pinned.close()
        self.flats = []
        self.home.close()
