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
from hpc_train.errors import Stopped
from hpc_train.mpi.agreement import agreed, from_first
from hpc_train.seeds import mix
from hpc_train.training.trainer import Trainer

logger = logging.getLogger(__name__)

FILE = "importance.json"
NAMED = 5  # features that the log names


def report_importance(trainer: Trainer, features: TableFeatures, repeats: int) -> None:
    """Write the importance of each feature to `importance.json` in the run directory. Collective.

    It takes `repeats` passes over the held-out rows for each feature. The file is written after
    each feature, and at a stop. What it has already for this step and as many repeats is not
    computed again.

    Args:
        trainer: the Trainer of the model, after its last step, with held-out rows.
        features: the features of the table.
        repeats: number of permutations of each feature.

    Raises:
        HpcTrainError: rows cannot be read, or the file cannot be written; on all ranks.
        Stopped: a rank has a reason to stop. The next call goes on after the last pass.
    """
    names = [*(one.name for one in features.numeric), *(one.name for one in features.categorical)]
    report = _Report(trainer, names, repeats)
    if len(report.found) < len(names):
        report.complete()


class _Report:
    """The file, and what it takes to complete it. Collective to make.

    Args:
        trainer, repeats: as for `report_importance`.
        names: the names of all features.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str], repeats: int) -> None:
        self.trainer, self.names = trainer, names
        self.path = Path(trainer.config.run.dir) / FILE
        self.made = {"step": trainer.step, "repeats": repeats}
        self.seeds = [mix(trainer.config.run.seed, repeat) for repeat in range(repeats)]
        written = from_first(trainer.group, lambda: _written(self.path, self.made))
        self.found: dict[str, dict[str, float]] = _entries(written.get("features"), names, dict)
        self.begun: dict[str, list[dict[str, float]]] = _entries(written.get("begun"), names, list)
        """The scores of a feature's first passes, if a stop came before its last one."""
        self._longest = 0.0  # seconds of a pass

    def complete(self) -> None:
        """Compute what is missing. Collective."""
        self.trainer.check_in()
        self.trainer.validate()
        before = dict(self.trainer.held_out)
        for place, name in enumerate(self.names):
            if name in self.found:
                continue
            after = self.begun.pop(name, [])
            try:
                self._add_passes(place, after)
            except Stopped:  # on all ranks
                self.begun = {name: after}
                self._write(before)
                raise
            self.found[name] = _changes(before, after)
            self._write(before)
        if self.trainer.group.rank == 0:
            logger.info("%s", describe_importance(self._ordered()))

    def _add_passes(self, place: int, after: list[dict[str, float]]) -> None:
        """Add the scores of the passes that a feature lacks."""
        rows: Any = self.trainer.validation.reader.dataset
        for seed in self.seeds[len(after) :]:
            self.trainer.check_in(self._longest)
            begin = time.monotonic()
            after.append(self.trainer.scores_of(PermutedFeature(rows, place, seed)))
            self._longest = max(self._longest, time.monotonic() - begin)

    def _ordered(self) -> dict[str, dict[str, float]]:
        return dict(sorted(self.found.items(), key=lambda item: -item[1]["loss"]))

    def _write(self, before: Mapping[str, float]) -> None:
        with agreed(self.trainer.group):
            if self.trainer.group.rank == 0:
                tree = {**self.made, "held_out": before, "features": self._ordered()}
                tree |= {"begun": self.begun} if self.begun else {}
                files.write_text(self.path, json.dumps(tree, indent=1) + "\n")


def _entries(there: Any, names: Sequence[str], kind: type) -> dict[str, Any]:
    """The entries of features in a part of the file. A damaged part counts as empty."""
    entries = there if isinstance(there, dict) else {}
    found = {name: entries[name] for name in names if isinstance(entries.get(name), kind)}
    passes = [one for entry in found.values() for one in (entry if kind is list else [entry])]
    sound = all(
        isinstance(one, dict) and "loss" in one and {*map(type, one.values())} == {float}
        for one in passes
    )
    return found if sound else {}


def _written(path: Path, made: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says; nothing if it is not there, damaged, or of another step."""
    try:
        written = files.parsed_object(path.read_bytes()) or {}
    except OSError:
        return {}
    return written if made.items() <= written.items() else {}


def describe_importance(found: Mapping[str, Mapping[str, float]]) -> str:
    """A line about the most important features, which come first."""
    shown = [f"{name} {changes['loss']:+.4g}" for name, changes in [*found.items()][:NAMED]]
    more = f", and {len(found) - NAMED} more in {FILE}" if len(found) > NAMED else ""
    return f"change of the held-out loss if a feature is permuted: {', '.join(shown)}{more}"


def _changes(before: Mapping[str, float], after: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean changes of the loss and of the scores, and the loss's standard deviation."""
    common = [name for name in before if all(name in one for one in after)]
    changes = {name: _mean([one[name] - before[name] for one in after]) for name in common}
    return {**changes, "loss_std": float(np.std([one["loss"] for one in after]))}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
