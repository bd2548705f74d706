"""The memory that a rank's share of the training state takes, by ZeRO's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

BUCKET_BYTES = 4 << 20  # bytes of a bucket of gradients, as in gradients.autotune
GRADIENTS_ON_GPU = 256 << 20  # bytes of gradients on their way from a GPU, as in gradients.staging
BUCKET_SHARE = 32  # a pooled bucket of a measured size is at most P / BUCKET_SHARE
POOLED_BUCKETS = 4  # buckets that zero 2 has memory for


@dataclass(frozen=True, kw_only=True)
class Dividing:
    """How the replicas of a part of the model divide its training state.

    Args:
        zero: the stage, as in section memory.
        scope: "node" or "all", as in section memory.
        nodes: number of nodes that have replicas of the part.
        ranks: number of replicas on each of these nodes.
        passes: number of micro-batches in a step.
        bucket: bytes of a bucket of gradients; None: it will be measured.
        staged: whether the state is in host memory, and a rank computes with parameters on a GPU.
    """

    zero: int = 0
    scope: str = "all"
    nodes: int = 1
    ranks: float = 1
    passes: int = 1
    bucket: int | None = None
    staged: bool = False

    @property
    def sharing(self) -> float:
        """Number of ranks that read the same copy of the parameters."""
        return self.ranks if self.zero else 1

    @property
    def optimizing(self) -> float:
        """Number of ranks that divide the optimizer's state and work."""
        return self.sharing * (self.nodes if self.zero and self.scope == "all" else 1)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's share of the training state. What a node shares is divided by its ranks.

    Args:
        parameters, gradients, optimizer: the bytes of each.
        on_gpu: bytes of staged parameters and gradients on the rank's GPU; the others are those in
            host memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    on_gpu: float = 0.0

    @property
    def total(self) -> float:
        """All of it, but what is staged on a GPU."""
        return self.parameters + self.gradients + self.optimizer


def most_of_bucket(whole: float) -> float:
    """The largest size in bytes of a pooled bucket, if the size is measured.

    Args:
        whole: bytes of the parameters of a rank.
    """
    return max(BUCKET_BYTES, whole / BUCKET_SHARE)


def state_bytes(
    stages: Sequence[float], moments: int, by: Dividing, frozen: Sequence[float] = ()
) -> StateBytes:
    """The memory of the state between two steps, and of the parameters while a stage computes.

    In stage 3 a node has its chunks of the parameters, and the rest of two consecutive stages. In
    stage 2 a rank has the gradients that its optimizer needs, and a pool of buckets. If a step has
    several passes, a node keeps its sum over the passes. If the state is staged, a GPU has all
    parameters, the gradients that are on their way to the host, and those of a stage, which has
    made them. Only trained parameters have a copy in host memory then.

    Args:
        stages: bytes of the trained parameters of each stage that the rank has: embedding, blocks,
            head.
        moments: tensors that the optimizer keeps for each parameter.
        by: how replicas divide the state.
        frozen: bytes of each stage's other parameters, which only stage 3 divides.
    """
    whole, left = sum(stages), sum(frozen)
    parameters = whole / by.sharing + left
    if by.zero == 3:
        parameters, nodes = whole + left, by.nodes if by.scope == "all" else 1
        each = [sum(of) for of in zip_longest(stages, frozen, fillvalue=0.0)]
        pairs = [sum(each[n : n + 2]) for n in range(len(each))]
        gathered = max(pairs, default=0.0) * (1 - 1 / nodes)
        parameters = (parameters / nodes + gathered) / by.sharing
    gradients = whole
    if by.zero >= 2:
        kept = whole / (by.sharing if by.passes > 1 else by.optimizing)
        gradients = kept + min(whole, POOLED_BUCKETS * (by.bucket or most_of_bucket(whole)))
    optimizer = moments * whole / by.optimizing
    if not by.staged:
        return StateBytes(parameters, gradients, optimizer)
    made = min(whole, GRADIENTS_ON_GPU + max(stages, default=0.0))
    return StateBytes(parameters - left, gradients, optimizer, on_gpu=whole + left + made)
