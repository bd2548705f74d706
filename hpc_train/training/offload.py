"""Keeps the optimizer's state in a file on the node's own disk, in place of memory.

The tensors of the state lie in a file that is mapped into memory. The kernel reads ahead of the
step what it needs, and a thread writes behind the step what it has changed. The pages are a cache
of the file, so the kernel takes them back when memory is needed for something else. The idea is
that of Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021, and
Rajbhandari et al., "ZeRO-Infinity", SC 2021, who keep the state in host memory and on NVMe disks.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from hpc_train.errors import UserError, size_text
from hpc_train.gradients.buckets import is_dense
from hpc_train.gradients.hooks import after_step, before_step

PAGE = 4096  # bytes: tensors begin at pages of their own


class OffloadedState:
    """The state of AdamW, or of SGD with momentum, in a file that nobody else sees.

    The file has no name, so nothing is left of it when the process ends.

    Args:
        optimizer: has no state yet. As without a file, a parameter gets it with its first gradient.
        folder: on the node's own disk. It must exist.

    Raises:
        UserError: the folder cannot be written, or has too little room.
    """

    def __init__(self, optimizer: Optimizer, folder: Path) -> None:
        self.optimizer = optimizer
        self._is_sgd = isinstance(optimizer, SGD)
        self._slots = ["momentum_buffer"] if self._is_sgd else ["exp_avg", "exp_avg_sq"]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._begins: dict[tuple[Parameter, str], int] = {}
        room = 0
        for parameter in self._parameters:
            for slot in self._slots:
                self._begins[parameter, slot] = room
                room += _aligned(parameter.nbytes)
        self._file = _reserved(folder, max(room, PAGE))
        self._memory = mmap.mmap(self._file, max(room, PAGE))
        self._writer = ThreadPoolExecutor(1, "offload")
        self._writing: Future[None] | None = None
        self._hooks = [
            before_step(optimizer, lambda *_: self._begin_step()),
            after_step(optimizer, lambda *_: self._write_behind()),
        ]

    def place(self, parameter: Parameter, slot: str) -> Tensor | None:
        """The memory in the file for a tensor of the state; None if it has none there."""
        begin = self._begins.get((parameter, slot))
        count = parameter.numel()
        if begin is None or not count:  # `frombuffer` makes no empty tensor
            return None if begin is None else torch.empty_like(parameter)
        flat = torch.frombuffer(self._memory, dtype=parameter.dtype, count=count, offset=begin)
        if not is_dense(parameter):
            return flat.view(parameter.shape)
        return flat.as_strided(parameter.shape, parameter.stride())

    def _begin_step(self) -> None:
        """Make the state that torch would make in this step, and read ahead what there is."""
        for parameter in self._parameters:
            if parameter.grad is not None and not self.optimizer.state.get(parameter):
                self.optimizer.state[parameter] = self._first_state(parameter)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_WILLNEED)

    def _first_state(self, parameter: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._is_sgd else {"step": torch.zeros(())}
        for slot in self._slots:
            kept = self.place(parameter, slot)
            assert kept is not None
            state[slot] = kept.zero_()
        return state

    def _write_behind(self) -> None:
        if self._writing is None or self._writing.done():
            if self._writing is not None:
                self._writing.result()  # an error of the disk ends the training
            self._writing = self._writer.submit(self._write)

    def _write(self) -> None:
        os.fdatasync(self._file)
        self._memory.madvise(mmap.MADV_DONTNEED)  # the pages stay in the kernel's cache

    def close(self) -> None:
        """End the thread. The state stays readable as long as the optimizer has it."""
        for hook in self._hooks:
            hook.remove()
        self._writer.shutdown()
        os.close(self._file)


def _reserved(folder: Path, nbytes: int) -> int:
    """A file without a name, with this many bytes of the disk; its descriptor."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="hpc_train-", dir=folder)
        Path(name).unlink()
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"{size_text(nbytes)} of the optimizer's state" if full else "the optimizer's state"
        raise UserError(
            f"memory.offload: {folder} cannot take {what} ({error.strerror})",
            "give a folder on the node's own disk, "
            + ("with more room" if full else "which is there and may be written to"),
        ) from None
    return descriptor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
