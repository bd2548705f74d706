"""The sections that say how a job is spread over its ranks: parallel, gradients, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpc_train.compression import parse_scheme as parse_compression
from hpc_train.errors import ConfigError, check_kinds


def at_least(section: object, name: str, **limits: float | None) -> None:
    """Check that values of a section are finite and not below their limits.

    Raises:
        ConfigError: one is; the message names its key.
    """
    for key, limit in limits.items():
        value = getattr(section, key)
        if value is None or limit is None or limit <= value < math.inf:
            continue
        remedy = f"give {limit} or more" if value < limit else "give a finite number"
        raise ConfigError(f"{name}.{key} is {value}", remedy)


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the ranks are laid out: data x tensor x pipeline parallel."""

    dp: int | None = None
    """Data-parallel size. By default it is the number of ranks divided by tp and pp."""
    tp: int = 1
    """Tensor-parallel size: the number of ranks that share each layer. It divides heads and
    vocabulary."""
    pp: int = 1
    """Pipeline-parallel size: the number of ranks that the layers are divided over."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order in which the stages of a pipeline compute their micro-batches."""
    virtual_stages: int | None = None
    """Number of virtual stages per rank, for schedule interleaved. By default it is 2 there, and 1
    otherwise."""
    sequence_parallel: bool = False
    """Whether each tensor-parallel rank holds only its part of the tokens between the layers that
    tp shares."""
    batch_norm: Literal["sync", "local", "refuse"] = "sync"
    """What BatchNorm layers of your own model do. sync takes statistics over all replicas' samples
    of a micro-batch, as one process would. local takes each replica's own. refuse refuses such a
    model."""

    def __post_init__(self) -> None:
        check_kinds(self, "parallel")
        at_least(self, "parallel", dp=1, tp=1, pp=1, virtual_stages=1)
        if self.schedule != "interleaved" and (self.virtual_stages or 1) > 1:
            raise ConfigError(
                f"parallel.virtual_stages is {self.virtual_stages}, but parallel.schedule is "
                f"{self.schedule}",
                "use --parallel.schedule interleaved, or leave virtual_stages out",
            )
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "parallel.sequence_parallel is on, but parallel.tp is 1",
                "set parallel.tp, or leave sequence_parallel out",
            )

    @property
    def stages_per_rank(self) -> int:
        """Number of virtual stages of each pipeline rank."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True, kw_only=True)
class GradientsSection:
    """How gradients are averaged over the ranks."""

    engine: Literal["auto", "horovod", "mpi", "nccl"] = "auto"
    """horovod averages by hvd.DistributedOptimizer, and mpi by this package's own sums over MPI.
    nccl sums on GPUs by torch's NCCL. auto takes horovod for GPUs whose memory MPI cannot read, if
    Horovod is built with NCCL, and mpi otherwise."""
    bucket_mb: float | None = None
    """Size of the flat buckets, in MiB. By default it is measured; it is 4 with run.deterministic,
    and with compression topk and powersgd, whose results depend on it. With engine horovod it is
    the size of Horovod's fusion buffer."""
    two_level: Literal["auto", "on", "off"] = "auto"
    """With engine mpi, whether the ranks of a node first sum in shared memory, so that nodes
    communicate once. With engine nccl, whether the GPUs of a node sum first, and MPI sums between
    nodes. auto does so where it is faster."""
    average_every: int = 1
    """Number of optimizer steps that each replica takes by itself before all replicas are averaged.
    1 averages the gradients in every step."""
    reduction: Literal["mean", "adasum"] = "mean"
    """mean averages the gradients. With adasum, engine horovod combines the replicas' steps
    instead."""
    compression: str = "none"
    """How gradients are compressed between nodes: none, fp16, bf16, topk:RATIO or powersgd:RANK."""

    def __post_init__(self) -> None:
        check_kinds(self, "gradients")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < math.inf:
            raise ConfigError(
                f"gradients.bucket_mb is {self.bucket_mb}", "give a finite size above 0"
            )
        at_least(self, "gradients", average_every=1)
        self._check_engine(parse_compression(self.compression).kind)

    def _check_engine(self, compression: str) -> None:
        if self.engine == "horovod" and self.two_level == "on":
            raise ConfigError(
                "gradients.two_level is on, but gradients.engine is horovod",
                "use --gradients.engine mpi",
            )
        if self.engine == "horovod" and compression not in ("none", "fp16"):
            raise ConfigError(
                f"gradients.compression is {self.compression}, but gradients.engine is horovod",
                "use --gradients.engine mpi, or compression fp16",
            )
        if self.engine == "nccl" and compression != "none":
            raise ConfigError(
                f"gradients.compression is {self.compression}, but gradients.engine is nccl",
                "use --gradients.engine mpi, or leave gradients.compression out",
            )
        if self.reduction == "adasum" and self.engine != "horovod":
            raise ConfigError(
                f"gradients.reduction is adasum, but gradients.engine is {self.engine}",
                "use --gradients.engine horovod",
            )
        if self.reduction == "adasum" and compression != "none":
            raise ConfigError(
                f"gradients.reduction is adasum, but gradients.compression is {self.compression}",
                "leave gradients.compression out",
            )

    @property
    def bucket_bytes(self) -> int | None:
        """Size of the buckets in bytes; None if it is not given."""
        return None if self.bucket_mb is None else max(1, int(self.bucket_mb * (1 << 20)))


Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"] | int
RECOMPUTED: tuple[Recompute, ...] = (
    "none",
    "selective",
    "full",
)  # the values of Recompute, besides numbers


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """Where parameters and the optimizer's state are kept."""

    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    """With 1 the ranks of a node share the parameters' memory, and optimizer state and work are
    divided over ranks. With 2 gradients are divided, too. With 3 parameters are also divided over
    nodes, and gathered while a stage of the model computes. auto takes 1 for the program's own
    models on CPUs where that is faster, and 0 otherwise."""
    scope: Literal["node", "all"] = "all"
    """Whether zero divides over the ranks of each node (node), or over the ranks of all nodes
    (all)."""
    recompute: Recompute = "none"
    """Which activations the backward pass computes again, so that they need not be kept: none, all
    of each block (full), all of every Nth block (N), or all but the results of linear layers
    (selective)."""
    offload: str = "none"
    """none keeps the optimizer's state beside the parameters. On GPUs, optimizer keeps it in the
    memory of the node, where the ranks then divide it and take the step; auto of zero is 1 then. On
    processors, the full path of a folder on the nodes' own disks keeps it in files there."""

    def __post_init__(self) -> None:
        check_kinds(self, "memory")
        if self.offload not in ("none", "optimizer") and not self.offload.startswith(("/", "$")):
            raise ConfigError(
                f"memory.offload is {self.offload!r}",
                "give none, optimizer, or the full path of a folder on the nodes' own disks",
            )
        if self.staged and self.zero in (0, 3):
            raise ConfigError(
                f"memory.offload is optimizer, but memory.zero is {self.zero}: the ranks of a node "
                "divide the optimizer's state, and each GPU has all parameters",
                "leave memory.zero out, or set it to 1 or 2",
            )
        how = self.recompute
        if how not in RECOMPUTED and int(how) < 1:
            raise ConfigError(
                f"memory.recompute is {how!r}",
                f"give one of {', '.join(map(str, RECOMPUTED))}, or a number of 1 or more",
            )

    @property
    def stage(self) -> Zero:
        """The stage of ZeRO that is asked for. auto is 1 with offload optimizer, and 0 without."""
        if self.zero != "auto":
            return self.zero
        return 1 if self.staged else 0

    @property
    def staged(self) -> bool:
        """Whether the optimizer's state and step are in host memory, and parameters on GPUs."""
        return self.offload == "optimizer"
