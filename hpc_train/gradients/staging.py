"""Gradients and parameters on their way between a device and the memory of its node.

Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021, keep the
optimizer's state in the host's memory, where the step is taken, too. A gradient is copied there as
soon as the backward pass has made it, and its memory on the device is free again. The copies go on
beside what the device computes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.gradients.slots import GradientWriter, gradient_like

logger = logging.getLogger(__name__)

GRADIENTS_UNDER_WAY = 256 << 20
"""Bytes of gradients that may be on their way from a device at once, as in `planning.state`. They
take memory on the device meanwhile, so a rank that is further ahead of its device waits."""


class CopyMark(Protocol):
    """Tells how far copies are: an event of a stream, or `CopyDone`."""

    def query(self) -> bool:
        """Whether the copy has ended."""

    def synchronize(self) -> None:
        """Wait until the copy has ended."""


class CopyDone:
    """Implements `CopyMark` for a copy that was made at once."""

    def query(self) -> bool:
        """True: it has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: it has ended."""


class CopyLane:
    """Copies tensors between a device and the host, in order, beside what the device computes.

    On a GPU it is a stream. If the device is the CPU, copies are made at once.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._stream: Any = None if self._gpu is None else self._gpu.Stream(device)

    def copy(self, source: Tensor, into: Tensor, *, after_device: bool = True) -> CopyMark:
        """Copy a tensor after all earlier copies of this lane.

        Args:
            source: contiguous. It must stay as it is until the copy has ended.
            into: contiguous, of the same shape and dtype.
            after_device: whether the copy waits until the device has finished all earlier work of
                the caller's stream. It need not if the device's work concerns neither tensor.
        """
        if self._gpu is None:
            into.copy_(source)
            return CopyDone()
        if after_device:
            self._stream.wait_stream(self._gpu.current_stream(self.device))
        with self._gpu.stream(self._stream):
            into.copy_(source, non_blocking=True)
            mark: CopyMark = self._stream.record_event()
        return mark

    def follow(self, mark: CopyMark) -> None:
        """Let the device wait for a copy before it begins any later work."""
        if self._gpu is not None:
            self._gpu.current_stream(self.device).wait_event(mark)

    def finish(self) -> None:
        """Wait until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def room(self, like: Tensor) -> Tensor:
        """Memory of the host that this lane copies to, in the shape and dtype of a tensor."""
        pinned = self.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)


def computed(devices: Iterable[torch.device]) -> Coroutine[None]:
    """Wait until GPUs have done all that the caller's thread has given them so far."""
    for device in devices:
        yield getattr(torch, device.type).current_stream(device).record_event().query


class PinnedMemory:
    """Memory of the host that a GPU reads and writes by itself, so that no copy waits for it.

    Where it cannot be pinned, copies take longer, and give the same. If nobody calls `close`, such
    as after an error, it is unpinned once nobody has this object.

    Args:
        device: the device. Only for NVIDIA's and AMD's GPUs something is pinned.
        tensors: all of the memory that they lie in is pinned.
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        pinned: list[tuple[int, torch.UntypedStorage]] = []
        self._unpin = weakref.finalize(self, _unpin, pinned)
        self._unpin.atexit = False
        if device.type != "cuda":
            return
        storages = (tensor.untyped_storage() for tensor in tensors)
        runtime: Any = torch.cuda.cudart()
        for address, storage in {s.data_ptr(): s for s in storages}.items():
            if not (nbytes := storage.nbytes()):
                continue
            if error := int(runtime.cudaHostRegister(address, nbytes, 0)):
                _clear_error(device)
                logger.warning(
                    "%d MiB of the node's memory cannot be pinned (error %d of the GPU's driver), "
                    "so copies between it and the GPU are slower",
                    nbytes >> 20,
                    error,
                )
            else:
                pinned.append((address, storage))  # it must not be freed while it is pinned

    def close(self) -> None:
        """Unpin it. No copy may be under way."""
        self._unpin()


def _unpin(pinned: Sequence[tuple[int, torch.UntypedStorage]]) -> None:
    for address, _ in pinned:
        torch.cuda.cudart().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Launch a kernel, because torch takes the driver's last error for one of its next kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


class _Write(NamedTuple):
    """A gradient on its way.

    Args:
        mark: tells when the copy has ended.
        sent: the gradient on the device. It must not be freed before the copy has ended.
        into: the memory of the host that the gradient is copied to.
        onto: the tensor to which the copy is added; None: it is added to nothing.
    """

    mark: CopyMark
    sent: Tensor
    into: Tensor
    onto: Tensor | None


class StagedWriter(GradientWriter):
    """Writes gradients of a device to the memory of its node, without waiting for the device.

    A write has ended when `wait` was called for it, or the function from `ended` has told so.

    Args:
        lane: copies them.
        divided: the number of buckets whose gradients no rank has whole; they come first.
        memory: the memory that is written, to be pinned.
    """

    def __init__(self, lane: CopyLane, divided: int, memory: Iterable[Tensor]) -> None:
        self.lane, self._divided = lane, divided
        self._memory = PinnedMemory(lane.device, memory)
        self._writes: deque[_Write] = deque()
        self._begun = self._ended = self._under_way = 0
        self._lock = threading.Lock()  # a thread advances sums, which ask whether writes have ended

    def write(self, gradient: Tensor, share: float, into: Tensor) -> int:
        """Begin to write a gradient times a factor; returns the number of the write."""
        return self._begin(gradient, share, into, None)

    def add(self, gradient: Tensor, share: float, onto: Tensor) -> int:
        """Begin to add a gradient times a factor; returns the number of the write."""
        return self._begin(gradient, share, self.lane.room(onto), onto)

    def _begin(self, gradient: Tensor, share: float, into: Tensor, onto: Tensor | None) -> int:
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        sent = dense.to(into.dtype).contiguous()
        if share != 1:
            sent = sent * share
        mark = self.lane.copy(sent, into)
        with self._lock:
            self._writes.append(_Write(mark, sent, into, onto))
            self._begun += 1
            self._under_way += sent.nbytes
            self._end_those_done()
            while self._under_way > GRADIENTS_UNDER_WAY and len(self._writes) > 1:
                self._end_next()
            return self._begun

    def _end_those_done(self) -> None:
        while self._writes and self._writes[0].mark.query():
            self._end_next()

    def _end_next(self) -> None:
        mark, sent, into, onto = self._writes.popleft()
        mark.synchronize()
        if onto is not None:
            onto.add_(into)
        self._under_way -= sent.nbytes
        self._ended += 1

    def wait(self, number: int) -> None:
        """Wait until a write has ended, and all before it."""
        with self._lock:
            while self._ended < number:
                self._end_next()

    def ended(self) -> Callable[[], bool]:
        """A function that tells whether all writes have ended that have begun by now."""
        number = self._begun

        def told() -> bool:
            with self._lock:
                self._end_those_done()
                return self._ended >= number

        return told

    def room(self, like: Tensor) -> Tensor:
        """Memory for a gradient that waits."""
        return self.lane.room(like)

    def published(self, parameter: Parameter, view: Tensor, home: int) -> Tensor | None:
        """Memory for the mean on the device; None if no rank has all of it."""
        return None if home < self._divided else gradient_like(parameter)

    def close(self) -> None:
        """Wait for all writes, and unpin the memory."""
        self.wait(self._begun)
        self._memory.close()
