"""The options of `Loop`, as one value; each has the name of its configuration key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hpc_train.checkpoint.policy import Nonfinite, SavePolicy
from hpc_train.config import GradientsSection, MemorySection, OptimizerSection, RunConfig
from hpc_train.errors import UserError
from hpc_train.host.processor import Matmul
from hpc_train.parallel.batch_norm import BatchNorm

Precision = Literal["bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a `Loop` averages, computes, saves and stops. All ranks give the same.

    Args:
        gradients: how gradients are averaged: the keys of the section `gradients`
            (docs/reference/gradients).
        zero: as `memory.zero`. 1: the ranks of a node share the parameters' memory and the
            optimizer's work and state. Nothing but the optimizer's step may write to parameters
            then, and no rank has a whole gradient.
        clip_norm: largest global norm of the averaged gradients in each step; 0 disables clipping.
            With local steps (average_every) the norm is of each rank's own gradients.
        precision: what `autocast` computes in; float16 has a loss scale. None: as the model does.
            With it a step is taken by `loop.step()`, which leaves out one whose gradients are not
            finite, on all ranks.
        batch_norm: what BatchNorm layers do: "sync" takes statistics over all ranks' samples, as
            one process would; "local" takes each rank's own; "refuse" refuses such a model.
        every: steps between two checkpoints; one more is written at the end and at a stop.
        keep: number of newest checkpoints to keep; 0 keeps all.
        background: whether training goes on while a checkpoint is written. Then nothing but `step`
            may change parameters and the optimizer's state.
        nonfinite: what happens at a checkpoint if trained parameters are infinite or not numbers:
            "stop" before it is written, or "warn".
        time_limit: seconds after which the loop stops with a checkpoint; "auto": before the end of
            the SLURM or PBS job that it is in; None: never.
        hang_timeout: seconds that a rank waits for another, in `epochs` or in another call of the
            loop, before the job ends with an error; 0 disables it.
        hang_steps: limits the wait between two steps to `hang_steps` times the longest one so far,
            and at least 60 s. 0 disables it, for a loop in which one rank may work while others
            wait.
        matmul: how `hpc_train.models.linear` multiplies float32 matrices, as `precision.matmul`.
        prefetch: steps that a thread reads ahead, if the data set draws no random numbers.
        workers: processes of each rank that read ahead, if `hpc_train.start_workers` was called
            before MPI started; else threads. The batches are the same as without.
    """

    gradients: GradientsSection = field(default_factory=GradientsSection)
    zero: Literal[0, 1] = 0
    clip_norm: float = 0.0
    precision: Precision | None = None
    batch_norm: BatchNorm = "sync"
    every: int = 1000
    keep: int = 3
    background: bool = False
    nonfinite: Nonfinite = "stop"
    time_limit: float | Literal["auto"] | None = "auto"
    hang_timeout: float = 1800.0
    hang_steps: int = 0
    matmul: Matmul = "auto"
    prefetch: int = 0
    workers: int = 0

    @property
    def policy(self) -> SavePolicy:
        """How checkpoints are saved."""
        return SavePolicy(self.keep, background=self.background, nonfinite=self.nonfinite)

    @property
    def divided(self) -> bool:
        """Whether no rank has all that a checkpoint saves: the ranks hold it together."""
        return self.zero == 1 or self.gradients.compression != "none"

    def check(self) -> None:
        """Check that each option has a value that there is, and that they go together.

        Raises:
            HpcTrainError: they do not.
        """
        if self.precision not in (None, *get_args(Precision)):
            raise UserError(
                f"the loop's precision is {self.precision!r}",
                'give "bfloat16" or "float16", or leave it out: the model computes in its own type',
            )
        if self.zero not in (0, 1):
            raise UserError(f"the loop's zero is {self.zero!r}", "give 0 or 1")
        for name, kinds in (
            ("batch_norm", BatchNorm),
            ("nonfinite", Nonfinite),
            ("matmul", Matmul),
        ):
            if getattr(self, name) not in get_args(kinds):
                remedy = f"give one of {', '.join(get_args(kinds))}"
                raise UserError(f"{name} is {getattr(self, name)!r}", remedy)
        for name in ("every", "keep", "prefetch", "workers"):
            check_integer(name, getattr(self, name), least=0)
        RunConfig(
            gradients=self.gradients,
            memory=MemorySection(zero=self.zero),
            optimizer=OptimizerSection(clip_norm=self.clip_norm),
        )


DEFAULT_LOOP_OPTIONS = LoopOptions()


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Check an option by name.

    Raises:
        UserError: the value is no integer of Python's, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}", f"give an integer of {least} or more")
