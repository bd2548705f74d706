"""How much a model of tables needs each feature: its importance by permutation.

A feature's values are permuted among the held-out rows. What the loss rises by, and what the scores
change by, says how much the model relies on the feature (Breiman, "Random forests", Machine
Learning 2001). Features that say the same share their importance: each of them seems to be little
needed while the others are there.
"""

from __future__ import annotations

import json
import logging
import time
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

    It takes `repeats` passes over the held-out rows for each feature. The file is written after
    each feature. Features that it has already for this step and as many repeats are not computed
    again.

    Args:
        trainer: the Trainer of the model, after its last step, with held-out rows.
        features: the features of the table.
        repeats: number of permutations of each feature.

    Raises:
        HpcTrainError: rows cannot be read, or the file cannot be written; on all ranks.
        Stopped: a rank has a reason to stop. The next call goes on after the last feature.
    """
    path = Path(trainer.config.run.dir) / FILE
    made: dict[str, Any] = {"step": trainer.step, "repeats": repeats}
    names = [*(one.name for one in features.numeric), *(one.name for one in features.categorical)]
    found = from_first(trainer.group, lambda: _features(path, made, names))
    if len(found) == len(names):
        return
    trainer.validate()
    before = dict(trainer.held_out)
    passes = _Passes(trainer)
    for place, name in enumerate(names):
        if name in found:
            continue
        found[name] = _changes(passes, place, before, repeats)
        ordered = dict(sorted(found.items(), key=lambda item: -item[1]["loss"]))
        with agreed(trainer.group):
            if trainer.group.rank == 0:
                tree = {**made, "held_out": before, "features": ordered}
                files.write_text(path, json.dumps(tree, indent=1) + "\n")
    if trainer.group.rank == 0:
        logger.info("%s", describe_importance(ordered))


def _features(path: Path, made: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The features that the file has, if it is that of `made`."""
    written = _written(path)
    there = written.get("features")
    if not (made.items() <= written.items() and isinstance(there, dict)):
        return {}
    return {name: there[name] for name in names if name in there}


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


class _Passes:
    """Passes over the held-out rows. Before each one the Trainer may stop.

    Args:
        trainer: the Trainer of the model, after its last step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._longest = 0.0  # seconds of a pass

    def scores_of(self, rows: PermutedFeature) -> dict[str, float]:
        """The scores of rows. Collective."""
        self.trainer.check_in(self._longest)
        begin = time.monotonic()
        scores = self.trainer.scores_of(rows)
        self._longest = max(self._longest, time.monotonic() - begin)
        return scores


def _changes(
    passes: _Passes, place: int, before: Mapping[str, float], repeats: int
) -> dict[str, float]:
    """The mean changes of the loss and of the scores, and the loss's standard deviation."""
    trainer = passes.trainer
    rows: Any = trainer.validation.reader.dataset
    seeds = [mix(trainer.config.run.seed, repeat) for repeat in range(repeats)]
    after = [passes.scores_of(PermutedFeature(rows, place, seed)) for seed in seeds]
    common = [name for name in before if all(name in one for one in after)]
    changes = {name: _mean([one[name] - before[name] for one in after]) for name in common}
    return {**changes, "loss_std": float(np.std([one["loss"] for one in after]))}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
