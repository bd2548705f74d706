"""A run's directory: claims it, logs to it, and writes its configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hpc_train import files, log
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.checkpoint.claim import Claim, claimed
from hpc_train.config import RunConfig
from hpc_train.errors import ConfigError, unwritable
from hpc_train.job import jobs
from hpc_train.launch.protocol import STOP
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group


@contextmanager
def run_directory(group: Group, config: RunConfig) -> Iterator[tuple[Path, Claim]]:
    """Claim the run directory, and log to it. Collective.

    Raises:
        ClaimError: another job trains there.
        ConfigError: the directory cannot be written, a file STOP in it ends the run, or it is that
            of a training, and this is a performance test.
    """
    directory = Path(config.run.dir)
    check_not_ended(group, directory)
    if config.run.test_steps:
        _check_untrained(group, directory)
    with (
        claimed_by_job(group, directory, config.run.hang_timeout) as claim,
        _logged(group, directory),
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


def _check_untrained(group: Group, directory: Path) -> None:
    """Check that a performance test does not write into the directory of a training."""
    with agreed(group):
        if group.rank == 0 and find_checkpoints(directory / "checkpoints", "auto"):
            raise ConfigError(
                f"run.performance_test is on, but {directory} has checkpoints of a training",
                "give the test a run.dir of its own",
            )


def claimed_by_job(group: Group, directory: Path, timeout: float) -> AbstractContextManager[Claim]:
    """`claimed` for this job, as its scheduler and its launcher know it."""
    return claimed(group, directory, timeout, jobs.own_place(os.environ), jobs.known)


def write_config(group: Group, directory: Path, config: RunConfig) -> None:
    """Write the configuration with which a run begins or goes on. Collective.

    Not before the run's checkpoint was accepted: a start that is refused leaves the old one.

    Raises:
        ConfigError: it cannot be written.
    """
    with agreed(group), writable(directory):
        if group.rank == 0:
            files.write_text(directory / "config.yaml", config.to_yaml())


@contextmanager
def _logged(group: Group, directory: Path) -> Iterator[None]:
    with agreed(group), writable(directory):
        if group.rank == 0:
            (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    with agreed(group), writable(directory):
        handler = log.to_file(directory / "logs", group.rank, group.size)
    try:
        yield
    finally:
        log.stop(handler)


@contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Turn an error in writing to the run directory into a line for the user.

    Raises:
        ConfigError: something there cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(directory, error) from None
