"""Says what another number of replicas changes in a training that is resumed."""

from __future__ import annotations

import logging
from pathlib import Path

from hpc_train.config import RunConfig
from hpc_train.files import lines_of
from hpc_train.mpi.group import Group
from hpc_train.training.learning_rate import scaling

logger = logging.getLogger(__name__)


def tell_other_replicas(group: Group, directory: Path, config: RunConfig, replicas: int) -> None:
    """Log what changes if the last start of a run had another number of replicas.

    Args:
        group: the ranks of the job, of which rank 0 logs.
        directory: the run directory, whose events do not have this start yet.
        config: the configuration.
        replicas: the number of replicas of this start.
    """
    if group.rank or not depending(config, replicas, replicas):
        return
    starts = [one for one in lines_of(directory / "events.jsonl") if one.get("event") == "start"]
    before = starts[-1].get("layout", {}).get("dp", replicas) if starts else replicas
    if before != replicas:
        logger.info(
            "changed since the last start: replicas %s -> %d. On their number depend: %s",
            before,
            replicas,
            ", ".join(depending(config, before, replicas)),
        )


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
