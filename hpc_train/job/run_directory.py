"""A run's directory: claims it, writes its configuration, logs to it, and records its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

from hpc_train import files, log
from hpc_train.checkpoint.claim import Claim, claimed
from hpc_train.config import RunConfig
from hpc_train.errors import ConfigError
from hpc_train.job import jobs
from hpc_train.job.heartbeat import history
from hpc_train.launch.protocol import STOP
from hpc_train.monitoring.console import progress
from hpc_train.monitoring.metrics import MetricsFile
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.environment import read_launch
from hpc_train.mpi.group import Group


@contextmanager
def run_directory(group: Group, config: RunConfig) -> Iterator[tuple[Path, Claim]]:
    """Claim the run directory, write the configuration to it, and log to it. Collective.

    Raises:
        ClaimError: another job trains there.
        ConfigError: the directory cannot be written, or a file STOP in it ends the run.
    """
    directory = Path(config.run.dir)
    check_not_ended(group, directory)
    with (
        claimed_by_job(group, directory, config.run.hang_timeout) as claim,
        _written(group, directory, config),
    ):
        yield directory, claim


def check_not_ended(group: Group, directory: Path) -> None:
    """Check that no file STOP in a directory ends the run. Collective.

    Raises:
        ConfigError: there is such a file.
    """
    with agreed(group):
        if group.rank == 0 and (directory / STOP).exists():
            raise ConfigError(
                f"{directory / STOP} is there, which ends the run",
                "remove it to resume the run",
            )


def claimed_by_job(group: Group, directory: Path, timeout: float) -> AbstractContextManager[Claim]:
    """`claimed` for this job, as its scheduler and its launcher know it."""
    return claimed(group, directory, timeout, jobs.own_place(os.environ), jobs.known)


@contextmanager
def _written(group: Group, directory: Path, config: RunConfig) -> Iterator[None]:
    with agreed(group), _usable(directory):
        if group.rank == 0:
            (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
            files.write_text(directory / "config.yaml", config.to_yaml())
    with agreed(group), _usable(directory):
        handler = log.to_file(directory / "logs", group.rank, group.size)
    try:
        yield
    finally:
        log.stop(handler)


@contextmanager
def reporting(
    group: Group,
    directory: Path,
    after: int,
    last_step: int,
    claim: Claim,
    *,
    shown: bool = True,
) -> Iterator[Callable[[dict[str, float]], None]]:
    """A function that takes records: rank 0 writes them, others drop them. Collective.

    Rank 0 writes to metrics.jsonl, and shows them on the console.

    Args:
        group: the ranks of the job.
        directory: the run directory.
        after: the step after which training resumes; later records are dropped.
        last_step: the last step of the run.
        claim: the claim on the directory; once another job has it, nothing is written there.
        shown: whether the console shows them.
    """
    with agreed(group), _usable(directory):
        metrics = MetricsFile(directory / "metrics.jsonl", after) if group.rank == 0 else None
    if metrics is None:
        yield lambda record: None
        return
    alone = group.comm is None and not read_launch(os.environ)
    display = progress(last_step, alone=alone) if shown else None
    restarts = history(after)
    with closing(metrics), closing(display) if display else nullcontext():

        def report(record: dict[str, float]) -> None:
            record |= restarts
            if claim.lost() is None:
                metrics.write(record)
            if display is not None:
                display.show(record)

        yield report


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}: {error.filename})",
            "give a folder that you may write to, or free space",
        ) from None
