"""A run's directory: claims it, logs to it, and writes its configuration."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from hpc_train import files, log
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.checkpoint.claim import FOLDER, Claim, claimed
from hpc_train.config import RunConfig
from hpc_train.data.manifest import DATA_KINDS, FILE_NAME
from hpc_train.errors import ClaimError, ConfigError, Stopped, cause_in_words, unwritable
from hpc_train.job import jobs
from hpc_train.launch.protocol import STOP
from hpc_train.launch.recent import LAST_BYTES
from hpc_train.monitoring.records import RecordsFile
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.group import Group

logger = logging.getLogger(__name__)

# The keys with these beginnings change what is trained or how. A resume refuses many of them.
TRAINING_KEYS = (
    "model.",
    "data.loss",
    "optimizer.",
    "precision.dtype",
    "gradients.average_every",
    "gradients.reduction",
    "gradients.compression",
)
MANIFEST_BEGIN = 1 << 10  # bytes of a manifest in which its format stands


@contextmanager
def run_directory(group: Group, config: RunConfig) -> Iterator[tuple[Path, Claim]]:
    """Claim the run directory, and log to it. Collective.

    Raises:
        ClaimError: another job trains there.
        ConfigError: the directory cannot be written, a file STOP in it ends the run, it is the
            folder of a data set, or it is that of a training, and this is a performance test.
    """
    directory = Path(config.run.dir)
    check_may_start(group, directory)
    if config.run.test_steps:
        _check_untrained(group, directory)
    with (
        claimed_by_job(group, directory, config.run.hang_timeout) as claim,
        _logged(group, directory),
    ):
        yield directory, claim


def check_may_start(group: Group, directory: Path) -> None:
    """Check that no file STOP in a directory ends the run, and that it has no data. Collective.

    Raises:
        ConfigError: there is such a file, or the first start of a run is in the folder of a data
            set: whoever removes the run would remove the data.
    """
    with agreed(group):
        if group.rank == 0 and (directory / STOP).exists():
            raise ConfigError(
                f"{directory / STOP} is there, which ends the run",
                "remove it to resume the run",
            )
        if group.rank == 0 and not (directory / FOLDER).exists() and _has_data(directory):
            raise ConfigError(
                f"{directory} is the folder of a data set",
                "give the run a folder of its own (run.dir; to a loop of your own its directory)",
            )


def _has_data(directory: Path) -> bool:
    """Whether a folder has the manifest of a prepared data set."""
    try:
        with (directory / FILE_NAME).open("rb") as file:
            begin = file.read(MANIFEST_BEGIN)
    except OSError:
        return False
    return any(f'"format": "{kind}/'.encode() in begin for kind in DATA_KINDS)


def _check_untrained(group: Group, directory: Path) -> None:
    """Check that a performance test does not write into the directory of a training."""
    with agreed(group):
        if group.rank == 0 and find_checkpoints(directory / "checkpoints", "auto"):
            raise ConfigError(
                f"run.performance_test is on, but {directory} has checkpoints of a training",
                "give the test a run.dir of its own",
            )


@contextmanager
def claimed_by_job(group: Group, directory: Path, timeout: float) -> Iterator[Claim]:
    """`claimed` for this job, as its scheduler and its launcher know it.

    An error that comes before the job reports anything is recorded in events.jsonl.
    """
    place = jobs.own_place(os.environ)
    with claimed(group, directory, timeout, place, jobs.known) as claim:
        events = directory / "events.jsonl"
        before = _size(events) if group.rank == 0 else 0
        try:
            yield claim
        except Exception as error:
            if group.rank == 0 and not isinstance(error, Stopped) and _size(events) == before:
                with suppress(ClaimError, OSError):
                    claim.check()
                    _record_failure(events, error)
            raise


def _size(path: Path) -> int:
    """The bytes of a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _record_failure(path: Path, error: Exception) -> None:
    """Record the end of a job that has failed before its event "start"."""
    end = {"time": round(time.time(), 3), "event": "end", "step": _last_step(path)}
    end["before_start"] = True
    with closing(RecordsFile(path)) as events:
        events.write(end | {"reason": "failed", "why": cause_in_words(error)})


def _last_step(path: Path) -> int:
    """The last step that a file of records or events names; 0 if there is none."""
    steps = [line.get("step") for line in files.lines_of(path, LAST_BYTES)]
    return next((step for step in reversed(steps) if isinstance(step, int)), 0)


def keep_lost_records(group: Group, directory: Path, after: int, *, saves: bool = True) -> None:
    """If training begins again though steps are recorded, warn and keep the records. Collective.

    That is so if a job was killed before its first checkpoint, or if a site has removed all old
    files. These two look alike.

    Args:
        group: the ranks of the job.
        directory: the run directory.
        after: the step after which training resumes; 0: there is no checkpoint.
        saves: whether the run writes checkpoints at all.

    Raises:
        ConfigError: the records cannot be kept.
    """
    with agreed(group), writable(directory):
        path = directory / "metrics.jsonl"
        if group.rank or after or not saves or not (step := _last_step(path)):
            return
        written = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
        kept = directory / f"metrics-before-{written}.jsonl"
        files.write_whole(kept, iter([path.read_bytes()]))
        logger.warning(
            "the records of %s end at step %d, but there is no checkpoint: training begins again "
            "at step 1, and %s keeps the old records",
            directory,
            step,
            kept.name,
        )


def write_config(group: Group, directory: Path, config: RunConfig) -> None:
    """Write the configuration with which a run begins or goes on. Collective.

    Not before the run's checkpoint was accepted: a start that is refused leaves the old one. The
    log names the changed keys on which the course of training depends.

    Raises:
        ConfigError: it cannot be written.
    """
    with agreed(group), writable(directory):
        if group.rank == 0:
            path, text = directory / "config.yaml", config.to_yaml()
            if changed := _changes(path, text):
                logger.info("changed since the last start: %s", ", ".join(changed))
            files.write_text(path, text)


def _changes(path: Path, text: str) -> list[str]:
    """How a configuration differs from an earlier one, in the keys that change the training.

    Args:
        path: the file of the earlier one. It may be missing, or damaged.
        text: the new configuration.
    """
    try:
        before = _values(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    now = _values(text)
    schedules = {one.get("optimizer.schedule", "constant") for one in (before, now)}
    steps = () if schedules == {"constant"} else ("run.steps", "run.epochs")  # the rate's course
    return [
        f"{key} {_shown(before[key])} -> {_shown(value)}"
        for key, value in now.items()
        if key.startswith((*TRAINING_KEYS, *steps)) and before.get(key, value) != value
    ]


def _values(text: str) -> dict[str, Any]:
    """The values of a configuration, by their keys."""
    tree = yaml.safe_load(text)
    sections = tree.items() if isinstance(tree, dict) else ()
    return {
        f"{name}.{key}": value
        for name, section in sections
        if isinstance(section, dict)
        for key, value in section.items()
    }


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


@contextmanager
def _logged(group: Group, directory: Path) -> Iterator[None]:
    with agreed(group), writable(directory):
        if group.rank == 0:
            (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    with agreed(group), writable(directory):
        handler = log.to_file(directory / "logs", group.rank, group.size)
    try:
        yield
    except Exception as error:
        if not isinstance(error, Stopped):  # the log's last line says why there is no more
            log.error_to(handler, error)
        raise
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
