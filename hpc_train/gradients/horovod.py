"""Engine horovod: Horovod's own DistributedOptimizer averages the gradients.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
https://arxiv.org/abs/1802.05799

Its hooks begin an operation for each parameter in the backward pass, and its `synchronize` waits
for them. Its known problems are avoided here without a change to Horovod:

- It wraps an optimizer of ours that is never stepped. So the user's optimizer keeps its state, its
  `zero_grad` and its `step`, and may be of any class.
- In `grad` Horovod finds a tensor without memory that only stands for the gradient. So nobody sees
  a gradient that Horovod is summing at the moment.
- Horovod sums what its compression returns. Ours returns a contiguous buffer of 32 bits or more per
  number, whatever the layout and type of the parameter.
- Horovod must be told in advance how many backward passes a step has. Until two steps have had the
  same number it is told a number that is never reached, and begins all operations in `synchronize`.
- It sums zeros for parameters that a rank has not used. A parameter that no rank has used has no
  gradient afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpc_train.compression import parse_scheme
from hpc_train.errors import UserError
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.filling import Filling
from hpc_train.gradients.horovod_sums import DistributedSums
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.ownership import trained
from hpc_train.gradients.progress import Progress
from hpc_train.gradients.slots import UNSTEADY, Slot
from hpc_train.mpi import runtime
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

ADASUM_BYTES = 4 << 20  # bytes of optimizer steps that one operation combines


class DistributedFilling(Filling):
    """`Filling` for sums that Horovod's hooks begin.

    Three hooks run for each gradient, in this order: ours on the parameter, Horovod's on the node
    of the graph, ours on that node. In the backward pass that is to begin a sum the first one puts
    the stand into `grad`, Horovod's sees it there, and the last one takes it away.
    """

    sums: DistributedSums

    def __init__(self, *args: Any) -> None:
        self.passes = 0
        """The backward pass of a step in which sums begin, counted from 1; 0 if in none."""
        self._show: dict[Slot, Callable[[], None]] = {}  # from `hide`, for late gradients
        super().__init__(*args)

    def _hook(self, slot: Slot) -> list[RemovableHandle]:
        hooks = super()._hook(slot)
        if slot.parameter in self.sums.stands:
            with torch.enable_grad():
                node: Any = slot.parameter.expand_as(slot.parameter).grad_fn
            hooks.append(node.next_functions[0][0].register_hook(lambda *_: self._after(slot)))
        return hooks

    def _arrived(self, slot: Slot) -> None:
        stand = self.sums.stands.get(slot.parameter)
        if stand is None:
            return
        if slot.begun:
            self._show[slot] = self.sums.hide(slot.parameter)
        elif slot.arrived == self.passes:
            self._begin(slot)
            slot.parameter.grad = stand

    def _begin(self, slot: Slot) -> None:
        slot.begin()
        self.begun += 1

    def _after(self, slot: Slot) -> None:
        """Put `grad` back after Horovod's hook has seen the stand."""
        if show := self._show.pop(slot, None):
            show()
        if slot.parameter.grad is self.sums.stands.get(slot.parameter):
            slot.parameter.grad = slot.pending

    def sum_rest(self) -> None:
        """Begin the sums that have not begun, and wait for all sums. Collective."""
        for slot in self.slots:
            if not slot.begun:
                self._begin(slot)
        self.sums.synchronize()

    def learn(self, *, restless: bool) -> None:
        """Decide as `Filling` does, with one number of backward passes for all parameters."""
        super().learn(restless=restless)
        counts = {slot.expected for slot in self.slots} - {0}
        alike = self.early and len(counts) == 1 and UNSTEADY not in counts
        self._begin_in(counts.pop() if alike else 0)

    def wait_for_calm(self) -> None:
        """Begin no sums in the backward pass for now (see `Filling`)."""
        super().wait_for_calm()
        self._begin_in(0)

    def _begin_in(self, passes: int) -> None:
        if passes != self.passes:
            self.passes = passes
            self.sums.begin_in(passes)


class HorovodAverager(BucketAverager):
    """`BucketAverager` whose sums are made by hvd.DistributedOptimizer.

    Args:
        hvd: the module horovod.torch, initialised.
        model, optimizer, group: as for `BucketAverager`.
        process_set: Horovod's process set of the same ranks.
        compression: a class of hvd.Compression; by default none.
    """

    sums: DistributedSums

    def __init__(
        self,
        hvd: Any,
        model: nn.Module,
        optimizer: Optimizer,
        group: Group,
        process_set: Any,
        *,
        compression: Any = None,
    ) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}

        def make(parameters: Sequence[Parameter]) -> tuple[list[Bucket], DistributedSums]:
            buckets = [Bucket([parameter]) for parameter in reversed(parameters)]
            kind = compression or hvd.Compression.none
            return buckets, DistributedSums(hvd, group, process_set, names, buckets, kind)

        # Polite: this rank may be waiting for its own thread of Horovod, which needs the core.
        super().__init__(model, optimizer, group, make, Progress(polite=True))
        self.awaited = "the sums of the gradients by Horovod"

    def _fill(self) -> DistributedFilling:
        share = 1 / self.group.size
        return DistributedFilling(
            self.buckets, self.sums, self.progress, share, self._look, self._begin_pass
        )


def horovod_averager(
    model: nn.Module,
    optimizer: Optimizer,
    group: Group,
    options: AveragingOptions,
) -> BucketAverager:
    """The averager of engine horovod; starts Horovod unless it is running. Collective.

    Args:
        model: its parameters that require gradients are averaged.
        optimizer: its parameters are averaged, too.
        group: more than one rank: all ranks of the job, or those of a process set.
        options: how gradients are averaged.

    Raises:
        UserError: this engine cannot do what the options ask for.
        SetupError: Horovod is missing or does not load.
    """
    _check(options)
    fusion_bytes = None if options.reduction == "adasum" else options.bucket_bytes
    hvd, process_set = _start(group, 0 if options.deterministic else fusion_bytes)
    parameters = trained(model, optimizer)
    options.check(parameters)
    with agreed(group):
        _check_device(hvd, parameters)
    if options.reduction == "adasum":
        from hpc_train.gradients.adasum import AdasumAverager

        return AdasumAverager(hvd, model, optimizer, group, options.bucket_bytes or ADASUM_BYTES)
    return HorovodAverager(
        hvd,
        model,
        optimizer,
        group,
        process_set,
        compression=getattr(hvd.Compression, options.compression),
    )


def _check(options: AveragingOptions) -> None:
    if parse_scheme(options.compression).kind not in ("none", "fp16"):
        raise UserError(
            f"engine horovod cannot compress by {options.compression}",
            "use engine mpi, or compression fp16",
        )
    if options.reduction == "adasum" and options.compression != "none":
        raise UserError(
            "reduction adasum and compression do not go together", "leave one of the two out"
        )
    for name, asked in (
        ("zero", options.zero),
        ("average_every", options.average_every > 1),
        ('two_level "on"', options.two_level == "on"),
    ):
        if asked:
            raise UserError(f"{name} and engine horovod do not go together", "use engine mpi")


def _check_device(hvd: Any, parameters: Sequence[Parameter]) -> None:
    """Refuse GPUs whose memory Horovod cannot read, because it would fail in the first step."""
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    if devices and not (hvd.cuda_built() or hvd.rocm_built()):
        raise UserError(
            f"parameters are on {devices.pop()}, but Horovod is built without support for GPUs",
            "build Horovod with HOROVOD_GPU_OPERATIONS=NCCL, or use engine mpi",
        )


def _check_fusion(asked: int | None, group: Group) -> None:
    """Warn on rank 0 if Horovod runs with another fusion buffer than was asked for.

    Raises:
        UserError: fusion was to be off, because results depend on it, and it is on.
    """
    has = os.environ.get(runtime.THRESHOLD, "its default")
    if asked == 0 and has != "0":
        raise UserError(
            f"deterministic needs Horovod without fusion, but {runtime.THRESHOLD} is {has}",
            f"set {runtime.THRESHOLD}=0 before Horovod starts",
        )
    if asked is not None and has != str(asked) and group.rank == 0:
        logger.warning(
            "Horovod keeps the fusion buffer that it was started with (%s=%s): bucket_bytes=%d has "
            "no effect",
            runtime.THRESHOLD,
            has,
            asked,
        )


def _start(group: Group, fusion_bytes: int | None) -> tuple[Any, Any]:
    """Start Horovod unless it is running. Collective.

    Returns:
        The module horovod.torch, and the process set of the group's ranks.
    """
    remedy = "call runtime.start_horovod(world, process_sets) on all ranks of the job first"
    hvd = runtime.running_horovod()
    if hvd is None:
        if group.size < runtime.import_mpi().COMM_WORLD.size:
            raise UserError(
                f"engine horovod has no process set for these {group.size} ranks of the job", remedy
            )
        hvd = runtime.start_horovod(group, fusion_bytes=fusion_bytes)
    with agreed(group):
        _check_fusion(fusion_bytes, group)
    ranks = group.gathered(hvd.rank())
    try:
        return hvd, runtime.process_set(hvd, ranks)
    except ValueError as error:
        raise UserError(str(error), remedy) from None
