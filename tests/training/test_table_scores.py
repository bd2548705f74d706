"""Scores of tables: in little memory they are those in memory, and on all ranks those of one."""

from __future__ import annotations

import errno
import os
import re
from contextlib import closing

import numpy as np
import pytest
import torch
from sklearn import metrics

from hpc_train import files
from hpc_train.data.tables.features import TargetValues
from hpc_train.errors import DataError
from hpc_train.mpi.group import Group
from hpc_train.training.table_scores import TableScores

ROWS = 500
CLASSES = TargetValues(task="classification", names=("y",), classes=("a", "b", "c"))
TARGETS = {
    "classification": CLASSES,
    "two classes": TargetValues(task="classification", names=("y",), classes=("a", "b")),
    "multilabel": TargetValues(task="multilabel", names=("p", "q")),
    "regression": TargetValues(task="regression", names=("y",), center=50.0, scale=5.0),
    "quantiles": TargetValues(task="regression", names=("y",), center=50.0, scale=5.0),
}
QUANTILES = (0.1, 0.5)


def rows_of(task):
    """What `TableLoss.measure` would return for all rows, with ties and weights."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(ROWS, 3)).round(1)
    classes = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target, predictions = {
        "classification": (logits.argmax(1) ^ generator.integers(0, 2, ROWS), classes),
        "two classes": (generator.integers(0, 2, ROWS), classes[:, :1] * [1, -1] + [0, 1]),
        "multilabel": ((generator.random((ROWS, 2)) < 0.3) * 1.0, classes[:, :2]),
        "regression": (logits[:, 0], 50 + 5 * logits[:, 1]),
        "quantiles": (logits[:, 0], 50 + 5 * logits[:, 1:]),
    }[task]
    target = np.minimum(target, 2) if task == "classification" else target
    weight = generator.gamma(1.0, size=ROWS)
    tensors = {"predictions": predictions, "target": target, "weight": weight}
    return {name: torch.tensor(value) for name, value in tensors.items()}


def collected(task, group, kept, size):
    """The scores if each rank adds its share of the rows in batches."""
    quantiles = QUANTILES if task == "quantiles" else ()
    rows, rounds = rows_of(task), -(-ROWS // (size * group.size))
    with closing(TableScores(TARGETS[task], quantiles, group, kept)) as scores:
        for number in range(rounds):
            first = group.rank + number * size * group.size
            mine = [*range(first, ROWS, group.size)][:size]
            scores.add([(mine, {name: rows[name][mine] for name in rows})] if mine else [])
        return scores.scores()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("task", TARGETS)
def test_scores_are_the_same_bits_on_any_ranks_and_with_any_memory(group, task):
    expected = collected(task, Group(), 1 << 20, ROWS)
    found = [collected(task, group, kept, size) for kept, size in ((1 << 20, 7), (60, 11))]
    assert found == [expected, expected]
    assert "auc" in expected or "rmse" in expected


def test_scores_are_those_of_scikit_learn():
    rows = {name: value.numpy() for name, value in rows_of("classification").items()}
    how = {"sample_weight": rows["weight"]}
    predicted = rows["predictions"].argmax(1)
    found = collected("classification", Group(), 60, 11)
    area = metrics.roc_auc_score(rows["target"], rows["predictions"], multi_class="ovr", **how)
    balanced = metrics.balanced_accuracy_score(rows["target"], predicted, **how)
    assert found["auc"] == pytest.approx(area, rel=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(balanced, rel=1e-12)
    rows = {name: value.numpy() for name, value in rows_of("regression").items()}
    found = collected("regression", Group(), 60, 11)
    r2 = metrics.r2_score(50 + 5 * rows["target"], rows["predictions"], **how)
    assert found["r2"] == pytest.approx(r2, rel=1e-12)


@pytest.mark.ranks(1, 4)
def test_a_full_disk_of_one_rank_ends_all_ranks(group, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    last = group.size - 1
    if group.rank == last:
        monkeypatch.setattr(files, "write_at", full)
    who = re.escape(f"rank {last}") + ".*" if group.size > 1 else ""
    with pytest.raises(DataError, match=f"{who}No space left.*set TMPDIR to a folder"):
        collected("classification", group, 60, 20)
