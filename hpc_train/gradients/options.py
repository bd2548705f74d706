"""The options of gradient averaging, as one value."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import Parameter

from hpc_train.compression import parse_scheme
from hpc_train.errors import ConfigError, UserError, check_kinds
from hpc_train.gradients.progress import Progress, ThreadProgress
from hpc_train.models.gate import Gate
from hpc_train.models.initial import InitialValues
from hpc_train.mpi.environment import ranks_yield

Engine = Literal["auto", "horovod", "mpi", "nccl"]
TwoLevel = Literal["auto", "on", "off"]
Reduction = Literal["mean", "adasum"]
Scope = Literal["node", "all"]

SUMMABLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """The options of `average_gradients`; all ranks give the same.

    Args:
        engine: "horovod", "mpi", or "auto": see `best_engine`. "nccl" sums on GPUs only.
        bucket_bytes: size of the flat buckets. None chooses it by a measurement, unless the
            compression's results depend on it.
        two_level: "on" lets the ranks of a node sum in its shared memory, so that only the node's
            sum crosses the network. With "off" each rank communicates for itself. "auto" measures
            which is faster. With engine nccl the GPUs of a node sum first. Engines mpi and nccl
            only.
        compression: compression of gradients between nodes; see `gradients.compression`.
        average_every: number of steps that each rank takes by itself before parameters and moments
            are averaged (`gradients.local`). 1 averages gradients in every step. Engines mpi and
            nccl only.
        reduction: "mean", or "adasum" with engine horovod (see `gradients.adasum`).
        zero: 1 lets the ranks of a node share the parameters' memory and divide the optimizer's
            work and state; 2 also lets gradients take turns in a small pool of memory; 3 also
            divides parameters over nodes, and gathers them stage by stage; 0 does none of it.
            Engine mpi only, with parameters on the CPU unless they are `staged`.
        scope: "node" divides optimizer state and work over the ranks of each node, "all" over the
            ranks of all nodes.
        staged: whether the model's parameters stay on their device, and the memory of the node has
            a copy of them, the gradients, and the optimizer's state; the optimizer's step is taken
            there. With zero 1 or 2.
        only_modules_read: whether parameters are read only by the modules that have them, once
            averaging is set up. Then gathers between nodes go on during the next forward pass.
        whole: parameters that are not divided by `zero`.
        values: makes the parameters' initial values. None: the parameters have them, and all ranks
            get those of rank 0.
        gates: for zero 3, the gates of this rank's stages, in the order of the forward pass.
        cores: processor cores for this rank alone (`Runtime.cores`).
        deterministic: measure nothing, so that each run sums in the same way.
        hang_timeout: seconds that a rank waits for another before the job ends with an error that
            names that rank; 0 disables it. While the averager exists, all waits of this package
            count.
    """

    engine: Engine = "auto"
    bucket_bytes: int | None = None
    two_level: TwoLevel = "auto"
    compression: str = "none"
    average_every: int = 1
    reduction: Reduction = "mean"
    zero: Literal[0, 1, 2, 3] = 0
    scope: Scope = "node"
    staged: bool = False
    only_modules_read: bool = False
    whole: Collection[Parameter] = frozenset()
    values: InitialValues | None = None
    gates: Sequence[Gate] = ()
    cores: int = 1
    deterministic: bool = False
    hang_timeout: float = 1800.0

    @property
    def spare_core(self) -> bool:
        """Whether this rank has a core that torch does not use."""
        return self.cores > torch.get_num_threads()

    def check_values(self) -> None:
        """Refuse options that have values of other types, or out of range.

        Raises:
            ConfigError: one has; the message names it.
        """
        check_kinds(self, "AveragingOptions")
        for name, least in (("bucket_bytes", 1), ("average_every", 1), ("hang_timeout", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"AveragingOptions.{name} is {value}", f"give {least} or more")
        parse_scheme(self.compression)

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Refuse options that could not be followed.

        Raises:
            UserError: the options do not fit together, or do not fit these parameters.
        """
        for dtype in {p.dtype for p in parameters}:
            if dtype not in SUMMABLE:
                raise UserError(
                    f"parameters of {dtype} cannot be averaged", "use a floating-point type"
                )
        devices = {p.device for p in parameters}
        for device in devices:
            self._check_device(device)
        if self.engine == "nccl" and len(devices) > 1:
            raise UserError(
                f"engine nccl sums on one GPU of a rank, and parameters are on {len(devices)}",
                "use engine mpi",
            )
        if self.compression != "none" and any(p.is_complex() for p in parameters):
            raise UserError(
                "compression does not work for complex parameters", "leave compression out"
            )

    def _check_device(self, device: torch.device) -> None:
        local, packed = self.average_every > 1, self.compression != "none"
        nccl = self.engine == "nccl"
        for asked, why, remedy in (
            (self.zero and local, "zero and average_every do not go together", "leave one out"),
            (packed and local, "compression and average_every do not go together", "leave one out"),
            (
                nccl and device.type == "cpu",
                "engine nccl sums on GPUs, and parameters are on processors",
                "use engine mpi",
            ),
            (nccl and self.zero, "engine nccl and zero do not go together", "use engine mpi"),
            (nccl and packed, "engine nccl and compression do not go together", "use engine mpi"),
            (
                self.zero == 3 and not self.gates,
                "zero 3 needs the gates of the model's stages, which a Loop and a Trainer make",
                "use one of them, or zero 2",
            ),
            (
                self.zero > 1 and packed,
                f"zero {self.zero} and compression do not go together",
                'use zero 1 with scope "node", or leave compression out',
            ),
            (
                self.zero and self.scope == "all" and packed,
                'zero with scope "all" and compression do not go together',
                'use scope "node", or leave compression out',
            ),
            (
                self.zero and self.two_level == "off",
                'zero sums in the shared memory of nodes, and two_level is "off"',
                "leave one out",
            ),
            (
                self.staged and self.zero not in (1, 2),
                f"staged parameters need zero 1 or 2, and zero is {self.zero}",
                "use zero 1 or 2",
            ),
            (
                device.type != "cpu" and self.zero and not self.staged,
                f"zero {self.zero} divides the optimizer in host memory, and parameters are on "
                f"{device}",
                "use staged parameters (memory.offload optimizer)",
            ),
        ):
            if asked:
                raise UserError(why, remedy)

    def progress(self) -> Progress:
        """A new `Progress`: with a thread if there is a core for it, or if engine nccl needs it."""
        polite = ranks_yield(os.environ)
        # A program may wait for its GPU, which waits for a sum that another rank has not begun.
        threaded = self.spare_core or self.engine == "nccl"
        return ThreadProgress(polite=polite) if threaded else Progress(polite=polite)
