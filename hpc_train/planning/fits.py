"""Does a training fit in the memory of its nodes, and which keys would make it fit?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from hpc_train.config import RunConfig
from hpc_train.config.spread import RECOMPUTED, Recompute, Zero
from hpc_train.errors import ConfigError
from hpc_train.models.shape import Shape
from hpc_train.planning.layouts import Candidate
from hpc_train.planning.schedules import micro_batching, size, sizes_that_divide

REMEDIES = 3  # number of remedies that are named
MORE = "take more nodes, or fewer ranks on each"


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A training on its nodes.

    Args:
        config: the configuration, with all sizes of the layout.
        shape: the sizes of the model.
        node: number of the node that each rank runs on, of shape (dp, pp, tp).
        on_cpu: whether ranks compute on processors.
    """

    config: RunConfig
    shape: Shape
    node: NDArray[np.int64]
    on_cpu: bool = True

    def needed(self) -> int:
        """Bytes that the node needs that needs most, or on GPUs the rank that does.

        Libraries, and tensors that are held for a moment, are not counted.
        """
        return self.layout.memory[1 if self.on_cpu else 0]

    @property
    def layout(self) -> Candidate:
        """The layout of the job."""
        return Candidate(self.config, self.shape, self.node)

    def largest_micro_batch(self, room: int) -> int:
        """The largest micro-batch with which the job needs no more than `room` bytes, or 1."""
        samples = self.config.data.batch // (self.config.parallel.dp or 1)
        larger = sizes_that_divide(samples)[1:]
        fit = [n for n in larger if self._with_micro_batch(n).needed() <= room]
        return max(fit, default=1)

    def _with_micro_batch(self, number: int) -> PlannedJob:
        data = replace(self.config.data, micro_batch=number)
        return replace(self, config=replace(self.config, data=data))

    def leaner(self) -> Iterator[tuple[str, int]]:
        """Keys that save memory, as options, each with what the job then needs. Cheap ones first.

        Yields:
            Options that the configuration does not have yet, and bytes as `needed` counts them.
        """
        memory = self.config.memory
        order: list[Recompute] = list(RECOMPUTED)
        first = order.index(memory.recompute) if memory.recompute in order else len(order) - 1
        zeros: tuple[Zero, ...] = get_args(Zero) if self.on_cpu else (0,)
        tried = product([zero for zero in zeros if zero >= memory.stage], order[first:])
        for zero, recompute in sorted(tried, key=lambda one: (_cost(*one), one[0])):
            keys: dict[str, object] = {"memory.zero": zero} if zero != memory.stage else {}
            if recompute != memory.recompute:
                keys["memory.recompute"] = recompute
            if not keys:
                continue
            with suppress(ConfigError):  # another key excludes it
                changed = replace(memory, zero=zero, recompute=recompute)
                config = replace(self.config, memory=changed)
                job = replace(self, config=config)
                if zero == memory.stage or job.layout.dividing.optimizing > 1:
                    text = " ".join(f"--{key} {value}" for key, value in keys.items())
                    yield text, job.needed()

    def remedy(self, room: int) -> str:
        """The cheapest keys with which the job needs no more than `room` bytes."""
        found: list[str] = []
        number = self.largest_micro_batch(room)
        smaller = self._with_micro_batch(number)
        if number < micro_batching(self.config)[0] and smaller.needed() <= room:
            found.append(f"--data.micro_batch {number} (needs {size(smaller.needed())})")
        for text, needed in self.leaner():
            if needed <= room:
                found.append(f"{text} (needs {size(needed)})")
        return f"give {', or '.join(found[:REMEDIES])}" if found else MORE


def _cost(zero: Zero, recompute: Recompute) -> float:
    """The time that keys cost, roughly, as a share of a step."""
    again = {"none": 0.0, "selective": 0.05}.get(str(recompute), 0.3)
    return {0: 0.0, 1: 0.0, 2: 0.02, 3: 0.15}[zero] + again


def check_fits(job: PlannedJob, free: int, where: str) -> None:
    """Check that a job fits in what is free.

    Args:
        job: the job.
        free: bytes that the node, or the GPU, with least memory has left.
        where: which one that is, in words.

    Raises:
        ConfigError: it does not fit.
    """
    needed = job.needed()
    if needed > free:
        raise ConfigError(
            f"the training needs {size(needed)} of {where}, which has {size(free)} left",
            job.remedy(free),
        )
