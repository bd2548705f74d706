"""Engine horovod: the buckets of engine mpi, summed by Horovod's thread.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
https://arxiv.org/abs/1802.05799

Horovod's own DistributedOptimizer starts the same operations from the same hooks, but copies every
gradient into its fusion buffer and back; its `groups` work neither for process sets without the
job's first rank nor where a rank has no gradient; and its `zero_grad`, its `step` after
`synchronize`, and passes that only accumulate are known traps. Here a bucket is one tensor that
Horovod sums where it lies, and all else is as with engine mpi.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.compression import parse
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket, plan
from hpc_train.gradients.mpi import MpiAverager
from hpc_train.gradients.ownership import trained
from hpc_train.gradients.profile import Profile
from hpc_train.gradients.progress import Progress
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

if TYPE_CHECKING:
    from hpc_train.collectives.steps import Steps
    from hpc_train.gradients.choice import Options

Reduction = Literal["mean", "adasum"]


class HorovodSums:
    """Implements `Sums` by one Horovod operation per bucket, which needs no help to go on.

    Operations keep their names from step to step: Horovod's ranks then agree on what is ready by
    exchanging a few bits. Each is a group of its own, so that Horovod never copies two buckets into
    its fusion buffer (`runtime.horovod_settings`).

    Collective to make.

    Args:
        hvd: the module horovod.torch, initialised.
        group: the ranks.
        process_set: Horovod's, of the same ranks.
        buckets: on any device.
        compression: of hvd.Compression.
    """

    early = True
    made: ClassVar[int] = 0
    """The last one's number: several may share a process set, but no operation's name."""

    def __init__(
        self, hvd: Any, group: Group, process_set: Any, buckets: Sequence[Bucket], compression: Any
    ) -> None:
        self.hvd, self.process_set, self.compression = hvd, process_set, compression
        self.flats = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in buckets]
        self.profile = Profile()
        self._label = HorovodSums.label(group)

    @classmethod
    def label(cls, group: Group) -> str:
        """A name for operations of these ranks that no others have. Collective."""
        cls.made = group.largest(cls.made) + 1
        return f"hpc_train.gradients.{cls.made}"

    def begin(self, number: int) -> Steps[None]:
        """Sum a bucket."""
        flat = self.flats[number]
        if not flat.numel():
            return
        begin = time.perf_counter()
        near, context = self.compression.compress(flat)
        handle = self.hvd.grouped_allreduce_async_(
            [near],
            name=f"{self._label}.{number}",
            op=self.hvd.Sum,
            process_set=self.process_set,
        )
        yield lambda: self.hvd.poll(handle)
        (total,) = self.hvd.synchronize(handle)
        if total is not flat:
            flat.copy_(self.compression.decompress(total, context))
        self.profile.add(0.0, time.perf_counter() - begin, flat.nbytes)

    def close(self) -> None:
        """Give the buffers back."""
        self.flats = []


class HorovodAverager(MpiAverager):
    """`MpiAverager` whose buckets Horovod sums.

    Args:
        hvd: the module horovod.torch, initialised.
        model, optimizer, group: as for `MpiAverager`.
        bucket_bytes: size of the buckets.
        process_set: Horovod's, of the same ranks.
        compression: of hvd.Compression; by default none.
    """

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        bucket_bytes: int,
        process_set: Any,
        *,
        compression: Any = None,
    ) -> None:
        def make(parameters: Sequence[Parameter]) -> tuple[list[Bucket], HorovodSums]:
            buckets = [Bucket(some) for some in plan(parameters, bucket_bytes)]
            kind = compression or hvd.Compression.none
            return buckets, HorovodSums(hvd, group, process_set, buckets, kind)

        # Polite: what this rank waits for may be its own thread, which needs the core.
        super().__init__(model, optimizer, group, make, Progress(polite=True))
        self.awaited = "the sums of the gradients by Horovod"


def horovod_averager(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    options: Options,
    reduction: Reduction = "mean",
) -> MpiAverager:
    """Put engine horovod together, and start Horovod unless it runs. Collective.

    Args:
        model: its parameters that require gradients are averaged.
        optimizer: over them.
        group: more than one rank: all of the job, or those of a process set.
        options: as for engine mpi.
        reduction: "adasum": see `AdasumAverager`.

    Raises:
        UserError: this engine cannot do what the options ask for.
        SetupError: Horovod is missing or does not load.
    """
    _check(options, reduction)
    hvd, process_set = _start(group, options)
    options.check(trained(model, optimizer))
    if reduction == "adasum":
        from hpc_train.gradients.adasum import AdasumAverager

        return AdasumAverager(hvd, model, optimizer, group, bucket_bytes(options))
    return HorovodAverager(
        hvd,
        model,
        optimizer,
        group,
        bucket_bytes(options),
        process_set,
        compression=getattr(hvd.Compression, options.compression),
    )


def bucket_bytes(options: Options) -> int:
    """The size of the buckets."""
    return options.bucket_bytes or runtime.HOROVOD_BUCKET


def _check(options: Options, reduction: Reduction) -> None:
    if parse(options.compression).kind not in ("none", "fp16"):
        raise UserError(
            f"engine horovod cannot compress by {options.compression}",
            "use engine mpi, or compression fp16",
        )
    if reduction == "adasum" and options.compression != "none":
        raise UserError("reduction adasum takes no compression", "leave one of the two out")
    for name, asked in (
        ("zero", options.zero),
        ("average_every", options.every > 1),
        ('two_level "on"', options.two_level == "on"),
    ):
        if asked:
            raise UserError(f"{name} and engine horovod do not go together", "use engine mpi")


def _start(group: Group, options: Options) -> tuple[Any, Any]:
    """The module horovod.torch, running, and the process set of the group's ranks. Collective."""
    remedy = "call runtime.start_horovod(world, process_sets) on all ranks of the job first"
    hvd = runtime.running_horovod()
    if hvd is None:
        if group.size < runtime.import_mpi().COMM_WORLD.size:
            raise UserError(
                f"engine horovod is to average over {group.size} ranks, not all of the job", remedy
            )
        hvd = runtime.start_horovod(group, bucket_bytes=bucket_bytes(options))
    ranks = group.gathered(hvd.rank())
    try:
        return hvd, runtime.process_set(hvd, ranks)
    except ValueError as error:
        raise UserError(str(error), remedy) from None
