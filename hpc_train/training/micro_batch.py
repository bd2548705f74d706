"""`data.micro_batch: auto`: the largest micro-batch that memory has room for, found by trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hpc_train.collectives.overwrite import overwrite
from hpc_train.errors import UserError, size_text
from hpc_train.host.allocator import return_freed_memory
from hpc_train.host.memory import PeakMemory
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.schedules import sizes_that_divide
from hpc_train.training.device import free_memory_of

logger = logging.getLogger(__name__)

USED = 0.9  # the share of the free memory that a step, or what is kept after it, may use
PER_STAGE = 4  # micro-batches that a step has for each stage of a pipeline, so that few ranks wait


def sizes_to_try(samples: int, stages: int) -> list[int]:
    """Sizes of micro-batches, the smallest first: powers of two, and all samples.

    If ranks form a pipeline, a step keeps several micro-batches for each stage, or as many as it
    can have.

    Args:
        samples: samples of a replica in a step.
        stages: number of pipeline ranks.
    """
    found = sizes_that_divide(samples)
    least = PER_STAGE * stages if stages > 1 else 1
    return [size for size in found if samples // size >= least] or found[:1]


class Need(NamedTuple):
    """What a step needs of a node, or of a GPU, as shares of what was free before the first step.

    Args:
        rest: what stays between two steps.
        activations: what a step needs besides.
    """

    rest: float
    activations: float

    def of_size(self, factor: float) -> float:
        """What a step with micro-batches that are larger by a factor needs."""
        return self.rest + factor * self.activations


def largest_that_fits(
    sizes: Sequence[int], needs: Callable[[int], Sequence[Need]]
) -> tuple[int, float]:
    """The largest size that fits, and the share of the memory that it needs.

    Sizes are tried from the smallest to the largest. One is tried only if it would fit, judged by
    the one before. So a trial does not run out of memory.

    Args:
        sizes: the smallest first. The first one is tried in any case.
        needs: tries a size. It returns what each rank needs.
    """
    best = sizes[0]
    need = needs(best)
    for size in sizes[1:]:
        if max(one.of_size(size / best) for one in need) > USED:
            break
        tried = needs(size)
        if max(one.of_size(1) for one in tried) > USED:
            break
        best, need = size, tried
    return best, max(one.of_size(1) for one in need)


def find_micro_batch(
    runtime: Runtime,
    device: torch.device,
    sizes: Sequence[int],
    step: Callable[[int], int],
    later: int,
) -> int:
    """The largest micro-batch whose step fits in the memory of all nodes, or GPUs. Collective.

    Args:
        runtime: the job's runtime.
        device: the device that this rank computes on.
        sizes: the sizes to try, the smallest first.
        step: computes the gradients of a step with micro-batches of a size, and forgets them. It
            returns the bytes of the data that a real step has besides.
        later: bytes that this rank will allocate in its first real step.

    Raises:
        UserError: the operating system of a rank does not tell the peak of its memory.
    """
    with agreed(runtime.world):
        if device.type == "cpu" and not PeakMemory.can_be_measured():
            raise UserError(
                "data.micro_batch is auto, but the peak of memory cannot be measured here",
                "give data.micro_batch a number",
            )
    memory = _Memory(device)
    begin, free = memory.now(), free_memory_of(device)
    on_cpu = device.type == "cpu"

    def needs(size: int) -> list[Need]:
        memory.peak()
        data = step(size)
        peak, rest = memory.peak(), memory.now()
        mine = float(max(0, rest - begin) + later + data), float(max(0, peak - rest))
        if on_cpu:  # the ranks of a node share its memory
            each = runtime.node.gathered(mine, "the memory of a trial")
            mine = sum(one for one, _ in each), sum(other for _, other in each)
        shares = mine[0] / max(1, free), mine[1] / max(1, free)
        return [Need(*one) for one in runtime.world.gathered(shares, "the memory of a trial")]

    size, share = largest_that_fits(sizes, needs)
    if runtime.world.rank == 0:
        whose = "node" if on_cpu else "GPU"
        logger.info(
            "data.micro_batch auto takes %d of at most %d: a step needs %.0f %% of the memory that "
            "a %s had left (%s here)",
            size, sizes[-1], 100 * share, whose, size_text(free),
        )  # fmt: skip
    return size


@contextmanager
def same_buffers_after(model: nn.Module) -> Iterator[None]:
    """A context after which a model has the buffers that it had before, with their values."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, name, buffer, before in buffers:  # a forward pass may have replaced them
        overwrite(buffer, before)
        module._buffers[name] = buffer


class _Memory:
    """The memory that this rank uses of its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        """Bytes in use, without those that could be given back."""
        if self.device.type == "cpu":
            return_freed_memory()
            self.peak()
            return self.peak()
        used: int = getattr(torch, self.device.type).memory_allocated(self.device)
        return used

    def peak(self) -> int:
        """Bytes in use at the most since the last call."""
        if self.device.type == "cpu":
            return PeakMemory().take()  # a new one looks anew at what is shared
        module = getattr(torch, self.device.type)
        most: int = module.max_memory_allocated(self.device)
        module.reset_peak_memory_stats(self.device)
        return most
