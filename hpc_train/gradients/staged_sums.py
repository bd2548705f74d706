"""Sums of buckets on a device, in the memory of its node.

A bucket is copied to the node's memory as soon as it is full, summed there as buckets of processors
are, and copied back. The device computes meanwhile. The node's memory is pinned, so that the device
reads and writes it by itself.

Large buckets, as those of embeddings, go in pieces: while one piece is summed, the next one is
copied to the host, and the one before is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine, all_of
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.staging import CopyLane, CopyMark, PinnedMemory
from hpc_train.gradients.sums import Sums

CPU = torch.device("cpu")
STAGED_BYTES = 16 << 20
"""A GPU's link copies this in a third of a millisecond, so what every copy costs does not count."""


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
        whole: whether buckets must not be cut, as compression needs it.

    Attributes:
        home: the sums in the node's memory.

    Raises:
        SetupError: `make` raises it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        make: Callable[[Sequence[Bucket]], Sums],
        *,
        whole: bool = False,
    ) -> None:
        pieces = [[bucket] if whole else bucket.pieces(STAGED_BYTES) for bucket in buckets]
        self.home = make([piece.on(CPU) for some in pieces for piece in some])
        self.profile, self.early = self.home.profile, self.home.early
        devices = {bucket.device for bucket in buckets}
        # Two lanes for each, as a GPU copies in both directions at once.
        self._away = {device: CopyLane(device) for device in devices}
        self._back = {device: CopyLane(device) for device in devices}
        self._pinned = [PinnedMemory(device, self.home.flats) for device in devices]
        self.flats = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]
        self._cut(pieces)
        self._begun = self._passed = 0

    def _cut(self, pieces: Sequence[Sequence[Bucket]]) -> None:
        """Note the pieces of each bucket: a view of its buffer, and the number of its home."""
        self._pieces: list[list[tuple[Tensor, int]]] = []
        first = 0
        for flat, some in zip(self.flats, pieces, strict=True):
            numbers = range(first, first + len(some))
            views = flat.split([piece.numel for piece in some])
            self._pieces.append([*zip(views, numbers, strict=True)])
            first = numbers.stop

    def begin(self, number: int) -> Coroutine[None]:
        """Sum a bucket (see `Sums`), after the work that the caller's stream has by now."""
        # Not in the coroutine, which may run in a thread that has other streams.
        sums = []
        for flat, home in self._pieces[number]:
            mark = self._away[flat.device].copy(flat, self.home.flats[home])
            sums.append(self._sum(flat, home, self._begun, mark))
            self._begun += 1
        return all_of(sums)

    def _sum(self, flat: Tensor, number: int, turn: int, mark: CopyMark) -> Coroutine[None]:
        # A later copy may be seen to have ended before an earlier one is asked. Yet all ranks must
        # begin sums in the same order.
        yield lambda: self._passed == turn and mark.query()
        self._passed += 1
        yield from self.home.begin(number)
        home = self.home.flats[number]
        yield self._back[flat.device].copy(home, flat, after_device=False).query

    def close(self) -> None:
        """Release the buffers. Collective."""
        for lane in (*self._away.values(), *self._back.values()):
            lane.finish()
        for pinned in self._pinned:
            pinned.close()
        self.flats, self._pieces = [], []
        self.home.close()
