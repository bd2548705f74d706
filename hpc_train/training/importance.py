"""How much a model of tables needs each feature: its importance by permutation.

A feature's values are permuted among the held-out rows. What the loss rises by, and what the scores
change by, says how much the model relies on the feature (Breiman, "Random forests", Machine
Learning 2001). Features that say the same share their importance: each of them seems to be little
needed while the others are there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train import files
from hpc_train.data.tables.features import TableFeatures
from hpc_train.data.tables.permuted import PermutedFeature
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.seeds import mix
from hpc_train.training.trainer import Trainer

logger = logging.getLogger(__name__)

FILE = "importance.json"
NAMED = 5  # features that the log names


def report_importance(trainer: Trainer, features: TableFeatures, repeats: int) -> None:
    """Write the importance of each feature to `importance.json` in the run directory. Collective.

    It takes `repeats` passes over the held-out rows for each feature. If the file is there, and is
    that of this step and as many repeats, nothing is done.

    Args:
        trainer: the Trainer of the model, after its last step, with held-out rows.
        features: the features of the table.
        repeats: number of permutations of each feature.

    Raises:
        HpcTrainError: rows cannot be read, or the file cannot be written; on all ranks.
    """
    path = Path(trainer.config.run.dir) / FILE
    made: dict[str, Any] = {"step": trainer.step, "repeats": repeats}
    if from_first(trainer.group, lambda: made.items() <= _written(path).items()):
        return
    names = [*(one.name for one in features.numeric), *(one.name for one in features.categorical)]
    trainer.validate()
    before = dict(trainer.held_out)
    found = {name: _changes(trainer, place, before, repeats) for place, name in enumerate(names)}
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]["loss"]))
    with agreed(trainer.group):
        if trainer.group.rank == 0:
            tree = {**made, "held_out": before, "features": ordered}
            files.write_text(path, json.dumps(tree, indent=1) + "\n")
            logger.info("%s", describe_importance(ordered))


def _written(path: Path) -> dict[str, Any]:
    """What the file says; nothing if it is not there, or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def describe_importance(found: Mapping[str, Mapping[str, float]]) -> str:
    """A line about the most important features, which come first."""
    shown = [f"{name} {changes['loss']:+.4g}" for name, changes in [*found.items()][:NAMED]]
    more = f", and {len(found) - NAMED} more in {FILE}" if len(found) > NAMED else ""
    return f"change of the held-out loss if a feature is permuted: {', '.join(shown)}{more}"


def _changes(
    trainer: Trainer, place: int, before: Mapping[str, float], repeats: int
) -> dict[str, float]:
    """The mean changes of the loss and of the scores, and the loss's standard deviation."""
    rows: Any = trainer.validation.reader.dataset
    seeds = [mix(trainer.config.run.seed, repeat) for repeat in range(repeats)]
    after = [trainer.scores_of(PermutedFeature(rows, place, seed)) for seed in seeds]
    common = [name for name in before if all(name in one for one in after)]
    changes = {name: _mean([one[name] - before[name] for one in after]) for name in common}
    return {**changes, "loss_std": float(np.std([one["loss"] for one in after]))}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
