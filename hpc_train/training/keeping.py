"""Gives every rank the parameters back that memory.zero 3 has divided over nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_train.errors import size_text
from hpc_train.gradients import GradientAverager
from hpc_train.gradients.streamed import StreamedParameters
from hpc_train.gradients.zero import ShardedAverager
from hpc_train.host.memory import free_bytes
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.micro_batch import USED

logger = logging.getLogger(__name__)


@contextmanager
def keeping_divided(
    averager: GradientAverager, runtime: Runtime, *, failed: bool
) -> Iterator[None]:
    """A context that closes an averager, and leaves all parameters to each rank. Collective.

    If a node has no memory for the values of all its ranks, divided parameters have no elements.

    Args:
        averager: the averager.
        runtime: the job's runtime.
        failed: whether ranks may have used the model differently; on all ranks. Then nothing is
            gathered.
    """
    if failed:
        yield
        return
    parameters = averager.parameters if isinstance(averager, ShardedAverager) else None
    streamed = parameters if isinstance(parameters, StreamedParameters) else None
    values = _memory(streamed, runtime)
    if streamed is not None and values:
        for place, gate in enumerate(streamed.gates):
            streamed.before_forward(place)
            for parameter in gate.module.parameters():
                if parameter in values:
                    values[parameter].copy_(parameter.data)
    yield
    for parameter, value in values.items():
        parameter.data = value


def _memory(streamed: StreamedParameters | None, runtime: Runtime) -> dict[Parameter, Tensor]:
    """Memory for each divided parameter; none on all ranks if a node has too little. Collective."""
    divided = streamed.divided if streamed is not None else ()
    needed = sum(parameter.nbytes for parameter in divided)
    if not runtime.world.largest(needed):
        return {}
    free = free_bytes()
    lacking = runtime.node.total(needed) > USED * free
    values: dict[Parameter, Tensor] = {}
    if not lacking:
        try:
            values = {parameter: torch.empty_like(parameter.data) for parameter in divided}
        except (MemoryError, RuntimeError):  # torch has no error of its own for processors
            lacking = True
    if runtime.world.largest(int(lacking)):
        if runtime.world.rank == 0:
            logger.warning(
                "memory.zero 3: the divided parameters have no elements now, because a node has "
                "no memory for the %s of each rank; a checkpoint has their values",
                size_text(needed),
            )
        return {}
    return values
