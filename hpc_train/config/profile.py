"""The keys that say which steps of a run are profiled."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.errors import ConfigError, check_kinds

TORCH_STEPS = 100  # of a profile with torch.profiler, which keeps megabytes of each step in memory

ONE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def parse_span(text: str) -> tuple[int, int] | None:
    """The first and the last number of A-B, or of one number; None if it is neither."""
    found = ONE.fullmatch(text.strip())
    if found is None:
        return None
    first = int(found[1])
    last = int(found[2] or first)
    return (first, last) if first <= last else None


def parse_ranks(text: str) -> list[tuple[int, int]] | None:
    """The spans of ranks that 0,3 or 0-7 names; None if it names none.

    all and none have one span and no span.
    """
    if text in ("all", "none"):
        return [(0, 1 << 60)] if text == "all" else []
    spans = [parse_span(part) for part in text.split(",")]
    return None if None in spans else [span for span in spans if span]


def check_ranks(key: str, text: str, size: int | None = None) -> None:
    """Check what is given for ranks.

    Args:
        key: names it in the message.
        text: what is given.
        size: number of ranks of the job; None: it is not known.

    Raises:
        ConfigError: it names no ranks, or one that the job does not have.
    """
    spans = parse_ranks(text)
    if spans is None:
        raise ConfigError(f"{key} is {text!r}", "give all, none, or numbers such as 0,3 or 0-7")
    highest = max((last for _, last in spans), default=0)
    if size is not None and text != "all" and highest >= size:
        raise ConfigError(
            f"{key} is {text}, but the job has ranks 0 to {size - 1}",
            "give ranks of the job, all, or none",
        )


def check_steps(key: str, steps: int, ranks: str) -> None:
    """Check that torch.profiler does not record too many steps.

    Args:
        key: names the steps in the message.
        steps: number of steps.
        ranks: where torch.profiler runs, as `ProfileSection` has it.

    Raises:
        ConfigError: it would.
    """
    if ranks != "none" and steps > TORCH_STEPS:
        raise ConfigError(
            f"{key} has {steps} steps, but torch.profiler records {TORCH_STEPS} at most",
            "give fewer steps, or ranks none for a longer profile with our marks only",
        )


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """Which steps are profiled. A running job is asked for a profile by `hpc-train profile`."""

    steps: str | int = ""
    """Steps that are profiled, such as 10-20: what ranks do and wait for is drawn in the folder
    profile of the run directory. By default none are. torch.profiler records 100 steps at most; a
    longer profile needs ranks: none."""
    ranks: str | int = "0"
    """Ranks on which torch.profiler records these steps as well: all, none, or numbers such as 0,3
    or 0-7."""

    def __post_init__(self) -> None:
        check_kinds(self, "run.profile")
        if self.given and (self.span is None or self.span[0] < 1):
            raise ConfigError(
                f"run.profile.steps is {self.steps!r}", "give a step, or steps such as 10-20"
            )
        check_ranks("run.profile.ranks", str(self.ranks))
        if self.span is not None:
            first, last = self.span
            check_steps("run.profile.steps", last - first + 1, str(self.ranks))

    @property
    def given(self) -> bool:
        """Whether some steps are to be profiled."""
        return self.steps != ""

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step; None if none are given."""
        return parse_span(str(self.steps))

    def check(self, ranks: int, last_step: int) -> None:
        """Check that a job has these ranks and steps.

        Args:
            ranks: number of ranks of the job.
            last_step: the last step of the run.

        Raises:
            ConfigError: it has not.
        """
        check_ranks("run.profile.ranks", str(self.ranks), ranks)
        if self.span and self.span[1] > last_step:
            raise ConfigError(
                f"run.profile.steps is {self.steps}, but the run ends with step {last_step}",
                f"give steps up to {last_step}",
            )
