"""The memory that a rank keeps for compression, local steps and saves, beside its state."""

from __future__ import annotations

from typing import NamedTuple

from hpc_train.config import RunConfig
from hpc_train.config.sections import CheckpointSection
from hpc_train.planning.state import Dividing

OF_COMPRESSION = 2  # the residual of the last step, and the one that takes its place


class BufferBytes(NamedTuple):
    """Bytes of buffers that stay between steps. They are in the memory of the node on GPUs, too.

    Args:
        mean: where gradients.average_every forms the mean of the replicas' parameters.
        residual: what gradients.compression has not sent yet.
        copied: what checkpoint.background writes while training goes on.
    """

    mean: float
    residual: float
    copied: float


def buffer_bytes(config: RunConfig, gradients: float, written: float, by: Dividing) -> BufferBytes:
    """The buffers of a rank.

    Args:
        config: the job's configuration.
        gradients: bytes of the rank's gradients, in the format in which they are summed.
        written: bytes of the rank's share of a checkpoint.
        by: how the replicas are on nodes.
    """
    section = config.gradients
    mean = residual = 0.0
    if section.average_every > 1 and by.nodes * by.ranks > 1:
        mean = gradients
    if section.compression != "none" and section.engine != "horovod":
        alone = section.two_level == "off"  # every rank sends all of it
        if by.nodes > 1 or (alone and by.ranks > 1):
            residual = OF_COMPRESSION * gradients / (1 if alone else by.ranks)
    return BufferBytes(mean, residual, written * _copies(config.checkpoint))


def _copies(section: CheckpointSection) -> bool:
    """Whether training goes on while checkpoints are written."""
    return section.background and bool(section.every or section.minutes or section.mtbf_hours)
