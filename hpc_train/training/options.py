"""The options of `Loop` as one value. Each has the name of its configuration key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from hpc_train.checkpoint.policy import Nonfinite, SavePolicy
from hpc_train.config import (
    DataSection,
    GradientsSection,
    MemorySection,
    OptimizerSection,
    ProfileSection,
    RunConfig,
    RunSection,
)
from hpc_train.errors import ConfigError, UserError
from hpc_train.host.processor import Matmul
from hpc_train.parallel.batch_norm import BatchNorm
from hpc_train.training.sharing import check_private

Precision = Literal["bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The options that say how a `Loop` averages, computes, saves and stops.

    All ranks must pass the same, except for `time_limit`, `prefetch` and `workers`.

    Args:
        gradients: how gradients are averaged: the keys of the section `gradients`
            (docs/reference/gradients).
        memory: what ranks share and divide: the keys of the section `memory`. Here auto is 0, and 1
            with offload "optimizer", which is for GPUs.
            Otherwise the ranks of a node share the parameters' memory, and divide the optimizer's
            work and state. Then only the optimizer's step may write to parameters, and no rank has
            a whole gradient. With recompute, blocks of the model compute activations again in the
            backward pass.
        private_parameters: whether the loop's own code reads no parameter, and only the modules
            that have a parameter do. Then gathers between nodes go on during the next forward pass,
            and memory.zero can be 3, which needs a model with `stages`. With 3 all ranks call the
            model, and go backward through it, equally often. After `close` every rank has all
            parameters, if they fit in memory.
        clip_norm: largest global norm of the averaged gradients in each step; 0 disables clipping.
            With local steps (average_every) it limits the norm of each rank's own gradients.
        precision: the number format in which `autocast` computes; float16 has a loss scale. None:
            the model's own format. With a precision, steps are taken by `loop.step()`, which skips
            a step on all ranks if its gradients are not finite.
        batch_norm: what BatchNorm layers do: "sync" takes statistics over all ranks' samples, as
            one process would; "local" takes each rank's own; "refuse" refuses such a model.
        every: steps between two checkpoints; one more is written at the end and at a stop.
        keep: number of newest checkpoints to keep; 0 keeps all.
        background: whether training continues while a checkpoint is written. Then only `step` may
            change parameters and the optimizer's state.
        nonfinite: what happens at a checkpoint if trained parameters are infinite or not numbers:
            "stop" before it is written, or "warn".
        time_limit: seconds after which the loop stops with a checkpoint, also as a text such as
            "1h30m", as `run.time_limit`; "auto": it stops before its SLURM or PBS job ends; None:
            no limit.
        end_margin: with "auto", seconds before the end of the job at which the loop has stopped, as
            `run.end_margin`; None: as many as so many ranks need.
        hang_timeout: seconds that a rank waits for another, in `epochs` or in another call of the
            loop, before the job ends with an error; 0 disables this limit.
        hang_steps: limits the wait between two steps to `hang_steps` times the longest one so far,
            and at least 60 s. 0 disables it, for a loop in which one rank may work while others
            wait.
        matmul: how `hpc_train.models.linear` multiplies float32 matrices, as `precision.matmul`.
        prefetch: number of steps that a thread reads ahead, if the data set draws no random
            numbers.
        profile: which steps are profiled: the keys of run.profile (docs/how-to/profile).
        workers: number of workers that read ahead for each rank. They are processes if
            `hpc_train.start_workers` was called before MPI started, otherwise threads. The batches
            are the same as without workers.
        micro_tokens: largest number of padded tokens in a micro-batch, for a data set with a method
            `lengths`. Each step is then cut into micro-batches by the lengths of its samples. None
            cuts by numbers of samples.
        counted: a function of a batch, which returns how many of its tokens, or of other items, its
            loss is a mean over. The loss of a step is then the mean over all items of the step, and
            a batch in which nothing counts has no part in it. None: the items are the samples.
    """

    gradients: GradientsSection = field(default_factory=GradientsSection)
    memory: MemorySection = field(default_factory=MemorySection)
    private_parameters: bool = False
    clip_norm: float = 0.0
    precision: Precision | None = None
    batch_norm: BatchNorm = "sync"
    every: int = 1000
    keep: int = 3
    background: bool = False
    nonfinite: Nonfinite = "stop"
    time_limit: float | str | None = "auto"
    end_margin: float | None = None
    hang_timeout: float = 1800.0
    hang_steps: int = 0
    matmul: Matmul = "auto"
    prefetch: int = 0
    workers: int = 0
    profile: ProfileSection = field(default_factory=ProfileSection)
    micro_tokens: int | None = None
    counted: Callable[[Any], int] | None = None

    @property
    def policy(self) -> SavePolicy:
        """The policy by which checkpoints are saved."""
        return SavePolicy(self.keep, background=self.background, nonfinite=self.nonfinite)

    @property
    def uneven(self) -> bool:
        """Whether the micro-batches of a step may weigh differently."""
        return self.micro_tokens is not None or self.counted is not None

    @property
    def divided(self) -> bool:
        """Whether each rank has only a part of what a checkpoint saves."""
        return self.memory.stage > 0 or self.gradients.compression != "none"

    def time_limit_seconds(self) -> float | None:
        """The time limit in seconds. None if there is none, or if it is auto.

        Raises:
            ConfigError: it is a text, and not that of a time span.
        """
        if isinstance(self.time_limit, str):
            return RunSection(time_limit=self.time_limit).time_limit_seconds()
        return self.time_limit

    def check(self) -> None:
        """Check the value of each option, and that the options work together.

        Raises:
            HpcTrainError: a value is not allowed, or options exclude each other.
        """
        self._check_types()
        if self.precision not in (None, *get_args(Precision)):
            raise UserError(
                f"the loop's precision is {self.precision!r}",
                'give "bfloat16" or "float16", or leave it out to compute in the type of the model',
            )
        for name, kinds in (
            ("batch_norm", BatchNorm),
            ("nonfinite", Nonfinite),
            ("matmul", Matmul),
        ):
            if getattr(self, name) not in get_args(kinds):
                remedy = f"give one of {', '.join(get_args(kinds))}"
                raise UserError(f"{name} is {getattr(self, name)!r}", remedy)
        if self.memory.offload not in ("none", "optimizer"):
            raise UserError(
                f"memory.offload is {self.memory.offload}, and a loop keeps the optimizer's state "
                "in no files",
                "use a Trainer, or on GPUs offload optimizer",
            )
        check_private(self.memory, "LoopOptions", private=self.private_parameters)
        if self.micro_tokens is not None:
            check_integer("micro_tokens", self.micro_tokens, least=1)
        RunConfig(
            data=DataSection(
                micro_tokens=self.micro_tokens, loss="sample" if self.counted is None else "token"
            ),
            gradients=self.gradients,
            memory=self.memory,
            optimizer=OptimizerSection(clip_norm=self.clip_norm),
            run=RunSection(end_margin=self.end_margin),
        )

    def _check_types(self) -> None:
        for name, kind in (
            ("gradients", GradientsSection),
            ("memory", MemorySection),
            ("profile", ProfileSection),
        ):
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"{name} is {getattr(self, name)!r}", f"give a {kind.__name__}")
        for name in ("every", "keep", "prefetch", "workers", "hang_steps"):
            check_integer(name, getattr(self, name), least=0)
        spans = {"time_limit": self.time_limit_seconds(), "end_margin": self.end_margin}
        numbers = {"clip_norm": self.clip_norm, "hang_timeout": self.hang_timeout}
        for name, value in {**numbers, **spans}.items():
            if name in spans and value is None:
                continue
            if not isinstance(value, Real) or not value >= 0:
                raise ConfigError(f"{name} is {value!r}", "give a number of 0 or more")


DEFAULT_LOOP_OPTIONS = LoopOptions()


def check_given(directory: Any, optimizer: Any, options: Any) -> None:
    """Check what a loop was given as its directory, its optimizer and its options.

    Raises:
        HpcTrainError: they are of another type, or empty, or `LoopOptions.check` refuses them.
    """
    if not isinstance(directory, (str, PathLike)) or not str(directory):
        raise UserError(
            f"the directory of the loop is {directory!r}", "give a path; . is the current folder"
        )
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"the optimizer of the loop is of type {type(optimizer).__name__}",
            "give one torch.optim.Optimizer, and further ones to loop.register",
        )
    if not isinstance(options, LoopOptions):
        raise UserError(f"the options of the loop are {options!r}", "give LoopOptions(...)")
    options.check()


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Check the value of the option `name`.

    Raises:
        UserError: the value is not of Python's type int, or is less than `least`.
    """
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}", f"give an integer of {least} or more")
