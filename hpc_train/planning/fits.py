"""Does a training fit in the memory of its nodes, and which keys would make it fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hpc_train.config import RunConfig
from hpc_train.config.spread import RECOMPUTED, Recompute, Zero
from hpc_train.errors import ConfigError, size_text
from hpc_train.host.allocator import WITH_GAPS
from hpc_train.models.shape import Shape
from hpc_train.planning.layouts import Candidate
from hpc_train.planning.schedules import micro_batching, sizes_that_divide

BytesOfNodes = int | NDArray[np.int64]

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

    def needs(self) -> NDArray[np.int64]:
        """Bytes that each node needs, by its number; on GPUs what the rank needs that needs most.

        Libraries, and tensors that are held for a moment, are not counted.
        """
        needs = self.layout.needs
        return needs.nodes if self.on_cpu else np.array([needs.gpu])

    def host_needs(self) -> NDArray[np.int64]:
        """Bytes that each node is sure to need of its own memory beside its GPUs.

        Gradients are not counted where they may be summed on the GPUs, or in pieces on the node.
        """
        if not self.config.memory.staged:
            section = self.config.gradients
            engines: list[Literal["nccl", "horovod"]] = ["nccl"]
            if section.engine == "auto":
                engines.append("horovod")
            for engine in engines:
                with suppress(ConfigError):  # it does not compress them in this way
                    elsewhere = replace(section, engine=engine, two_level="off")
                    config = replace(self.config, gradients=elsewhere)
                    return replace(self, config=config).layout.needs.hosts
        return self.layout.needs.hosts

    def needed(self) -> int:
        """The most that a node needs, or on GPUs a rank, in bytes."""
        return int(self.needs().max())

    @property
    def layout(self) -> Candidate:
        """The layout of the job."""
        return Candidate(self.config, self.shape, self.node)

    def is_tight(self, room: BytesOfNodes) -> bool:
        """Whether the job may not fit in `room` if its tensors have gaps between them."""
        return bool((WITH_GAPS * self.needs() > room).any())

    def largest_micro_batch(self, room: BytesOfNodes) -> int:
        """The largest micro-batch with which the job fits in `room`, or 1.

        Args:
            room: the most that it may need, for each number of `needs`.
        """
        samples = self.config.data.batch // (self.config.parallel.dp or 1)
        larger = sizes_that_divide(samples)[1:]
        fit = [n for n in larger if (self._with_micro_batch(n).needs() <= room).all()]
        return max(fit, default=1)

    def _with_micro_batch(self, number: int) -> PlannedJob:
        data = replace(self.config.data, micro_batch=number)
        return replace(self, config=replace(self.config, data=data))

    def leaner(self) -> Iterator[tuple[str, PlannedJob]]:
        """Keys that save memory, as options, each with the job that has them. Cheap ones first.

        Yields:
            Options that the configuration does not have yet, and the job.
        """
        memory = self.config.memory
        order: list[Recompute] = list(RECOMPUTED)
        first = order.index(memory.recompute) if memory.recompute in order else len(order) - 1
        zeros: tuple[Zero, ...] = get_args(Zero) if self.on_cpu else (0, 1, 2)
        tried = product([zero for zero in zeros if zero >= memory.stage], order[first:])
        for zero, recompute in sorted(tried, key=lambda one: (self._cost(*one), one[0])):
            keys: dict[str, object] = {"memory.zero": zero} if zero != memory.stage else {}
            staged = zero > 0 and not self.on_cpu
            if staged and not memory.staged:
                keys["memory.offload"] = "optimizer"
            if recompute != memory.recompute:
                keys["memory.recompute"] = recompute
            if not keys:
                continue
            with suppress(ConfigError):  # another key excludes it
                offload = "optimizer" if staged else memory.offload
                changed = replace(memory, zero=zero, recompute=recompute, offload=offload)
                config = replace(self.config, memory=changed)
                job = replace(self, config=config)
                if zero == memory.stage or staged or job.layout.dividing.optimizing > 1:
                    text = " ".join(f"--{key} {value}" for key, value in keys.items())
                    yield text, job

    def _without_copies(self) -> Iterator[tuple[str, PlannedJob]]:
        """The key with which training waits for checkpoints, as for `leaner`."""
        if self.config.checkpoint.background:
            waits = replace(self.config.checkpoint, background=False)
            job = replace(self, config=replace(self.config, checkpoint=waits))
            yield "--checkpoint.background false", job

    def _cost(self, zero: Zero, recompute: Recompute) -> float:
        """The time that keys cost, roughly, as a share of a step."""
        again = {"none": 0.0, "selective": 0.05}.get(str(recompute), 0.3)
        copies = 0.5 if zero and not self.on_cpu else 0.0
        return {0: 0.0, 1: 0.0, 2: 0.02, 3: 0.15}[zero] + again + copies

    def remedy(self, room: BytesOfNodes) -> str:
        """The cheapest keys with which the job fits in `room`, as for `largest_micro_batch`."""
        keyed = [*self._without_copies(), *self.leaner()]
        number = self.largest_micro_batch(room)
        if number < micro_batching(self.config)[0]:
            keyed.insert(0, (f"--data.micro_batch {number}", self._with_micro_batch(number)))
        return _those_that_fit(keyed, PlannedJob.needs, room)

    def host_remedy(self, room: BytesOfNodes) -> str:
        """The cheapest keys with which a job of GPUs fits in the memory of its nodes, too.

        Args:
            room: the most that it may need, for each number of `host_needs`.
        """
        keyed = [*self._without_copies()]
        memory = self.config.memory
        if memory.staged:  # activations are on the GPUs
            same = memory.recompute
            keyed += [one for one in self.leaner() if one[1].config.memory.recompute == same]
        return _those_that_fit(keyed, PlannedJob.host_needs, room)


def _those_that_fit(
    keyed: Iterable[tuple[str, PlannedJob]],
    needs: Callable[[PlannedJob], NDArray[np.int64]],
    room: BytesOfNodes,
) -> str:
    found = [
        f"{text} (needs {size_text(int(needs(job).max()))})"
        for text, job in keyed
        if (needs(job) <= room).all()
    ]
    return f"give {', or '.join(found[:REMEDIES])}" if found else MORE


def check_fits(job: PlannedJob, free: BytesOfNodes, where: Sequence[str]) -> None:
    """Check that a job fits in what is free.

    Args:
        job: the job.
        free: bytes that are left, for each number of `PlannedJob.needs`.
        where: the nodes, or the GPU with least memory, in words.

    Raises:
        ConfigError: it does not fit.
    """
    _compare(job.needs(), free, where, lambda: job.remedy(free))


def check_host_fits(job: PlannedJob, free: BytesOfNodes, where: Sequence[str]) -> None:
    """Check that what a job of GPUs keeps in the memory of its nodes fits there.

    Args:
        job: the job.
        free: bytes that are left on each node.
        where: the nodes, in words.

    Raises:
        ConfigError: it does not fit.
    """
    _compare(job.host_needs(), free, where, lambda: job.host_remedy(free))


def _compare(
    needs: NDArray[np.int64],
    free: BytesOfNodes,
    where: Sequence[str],
    remedy: Callable[[], str],
) -> None:
    worst = int((needs - free).argmax())
    needed, left = int(needs[worst]), int(np.broadcast_to(free, needs.shape)[worst])
    if needed > left:
        raise ConfigError(
            f"the training needs {size_text(needed)} of {where[worst]}, which has "
            f"{size_text(left)} left",
            remedy(),
        )
