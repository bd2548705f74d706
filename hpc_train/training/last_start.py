"""Says what other numbers of replicas and threads change in a training that is resumed."""

from __future__ import annotations

import logging
from pathlib import Path

from hpc_train.config import RunConfig
from hpc_train.errors import plural
from hpc_train.files import lines_of
from hpc_train.mpi.group import Group
from hpc_train.training.learning_rate import scaling

logger = logging.getLogger(__name__)


def tell_last_start(
    group: Group, directory: Path, config: RunConfig, replicas: int, threads: int
) -> None:
    """Log on rank 0 what changes if the last start of a run had other numbers.

    Args:
        group: the ranks of the job.
        directory: the run directory, whose events do not have this start yet.
        config: the configuration.
        replicas: the number of replicas of this start.
        threads: its number of threads, as `device.threads_in_use` returns it.
    """
    if group.rank:
        return
    starts = [one for one in lines_of(directory / "events.jsonl") if one.get("event") == "start"]
    last = starts[-1] if starts else {}
    layout = last.get("layout")
    before = _number(layout.get("dp") if isinstance(layout, dict) else None, replicas)
    if before != replicas and (found := depending(config, before, replicas)):
        logger.info(
            "changed since the last start: replicas %d -> %d. On their number depend: %s",
            before,
            replicas,
            ", ".join(found),
        )
    then = _number(last.get("threads"), threads)  # earlier versions did not write it
    if config.run.deterministic and then != threads:
        logger.warning(
            "run.deterministic: the ranks computed with %s before this start, and have %d now, so "
            "the last bits may differ: start as many ranks as before, with OMP_NUM_THREADS=%d",
            plural(then, "thread"),
            threads,
            then,
        )


def _number(value: object, otherwise: int) -> int:
    """The value, if it is an integer above 0. Else the other number."""
    return value if isinstance(value, int) and value > 0 else otherwise


def depending(config: RunConfig, before: int, now: int) -> list[str]:
    """The keys with which the course of training depends on the number of replicas, in words.

    Args:
        config: the configuration.
        before: the number of replicas of the last start.
        now: their number of this start.
    """
    section, gradients, found = config.optimizer, config.gradients, []
    if section.lr_scaling != "none":
        old, new = (section.lr * scaling(section, replicas) for replicas in (before, now))
        rates = f"(peak learning rate {old:.4g} -> {new:.4g})"
        found.append(f"optimizer.lr_scaling {section.lr_scaling} {rates}")
    if gradients.average_every > 1:
        found.append(f"gradients.average_every {gradients.average_every}")
    if gradients.reduction != "mean":
        found.append(f"gradients.reduction {gradients.reduction}")
    if config.parallel.batch_norm == "local":
        found.append("parallel.batch_norm local")
    return found
