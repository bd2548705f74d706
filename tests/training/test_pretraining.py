"""Pretraining of models of tables: what is hidden, and the same losses on all layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpc_train.data.tables.features import (
    MISSING_CODE,
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
)
from hpc_train.errors import ConfigError
from hpc_train.models.kinds import SHAPES
from hpc_train.models.tabular.sizes import CONTRASTED, TableSizes
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.pretraining import CorruptedRows, MaskedCells
from hpc_train.training.table_task import table_task
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, check_equal, config

FEATURES = TableFeatures(
    numeric=(
        NumericFeature(name="a", column="a", edges=(-1.0, 0.0, 2.0)),
        NumericFeature(name="b", column="b", edges=(-0.5, 0.5)),
    ),
    categorical=(
        CategoricalFeature(name="c", categories=("x", "y"), shares=(0.0, 0.25, 0.5, 0.25)),
        CategoricalFeature(name="d", categories=("u",), shares=(0.0, 0.0, 1.0)),
    ),
    target=None,
)
OUTPUTS = {"masked_cells": 2 + 4 + 3, "contrast": CONTRASTED}


class Rows:
    """Rows with missing numbers and missing categories."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        numeric = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
        self.numeric = numeric.masked_fill_(numeric > 1, torch.nan)
        codes = [
            torch.randint(1, one.codes, (samples,), generator=generator)
            for one in FEATURES.categorical
        ]
        self.codes = torch.stack(codes, 1)

    def __len__(self):
        return len(self.numeric)

    def fetch(self, indices):
        numeric, codes = self.numeric[indices], self.codes[indices]
        return numeric, codes, numeric.new_zeros(len(codes), 0), numeric.new_ones(len(codes))


class Noted(nn.Module):
    """A model that keeps what it was given, and knows nothing."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, numeric, categorical):
        self.given = numeric, categorical
        return numeric.new_zeros(len(numeric), 1, self.outputs)


def loss_of(pretraining):
    return (
        MaskedCells(FEATURES, 0.4)
        if pretraining == "masked_cells"
        else CorruptedRows(FEATURES, 0.5, 3)
    )


def test_hidden_cells_are_shown_as_missing_and_alone_are_predicted():
    batch, loss, model = Rows(4000, 0).fetch(np.arange(4000)), MaskedCells(FEATURES, 0.4), Noted(9)
    loss.seed_samples(range(4000))
    mean = loss(model, batch)
    numeric, categorical = model.given
    hidden = [(numeric.isnan() & ~batch[0].isnan()), (categorical != batch[1])]
    assert (categorical[hidden[1]] == MISSING_CODE).all()
    for was, now in zip((batch[0].isnan(), batch[1] == MISSING_CODE), hidden, strict=True):
        share = now.sum(0) / (~was).sum(0)
        assert (abs(share - 0.4) < 0.04).all()
    x = batch[0][hidden[0]]
    huber = torch.where(x.abs() < 1, x**2 / 2, x.abs() - 0.5).sum()
    entropies = (hidden[1].sum(0) * torch.tensor([4, 3]).log()).sum()
    torch.testing.assert_close(mean, (huber + entropies) / 4000 / (0.4 * 4))


def test_replaced_cells_have_the_distribution_of_the_training_rows():
    batch, loss = Rows(20000, 0).fetch(np.arange(20000)), CorruptedRows(FEATURES, 0.5, 4)
    loss.seed_samples(range(20000))
    numeric, categorical = loss.corrupted(*batch[:2])
    changed = (numeric != batch[0]) & ~numeric.isnan()
    assert (abs(changed.double().mean(0) - 0.5) < 0.02).all()
    a, b = (numeric[:, place][changed[:, place]] for place in (0, 1))
    assert a.min() >= -1
    assert a.max() < 2
    assert abs((a < 0).double().mean() - 0.5) < 0.02  # half of the values lie in either bin
    assert abs(b.mean()) < 0.02
    replaced = categorical[:, 1] != batch[1][:, 1]  # all are replaced by the only category
    assert (categorical[replaced, 1] == 2).all()
    codes = np.bincount(categorical[:, 0], minlength=4) / 20000
    before = np.bincount(batch[1][:, 0], minlength=4) / 20000
    np.testing.assert_allclose(
        codes, 0.5 * before + 0.5 * np.array([0, 0.25, 0.5, 0.25]), atol=0.02
    )


def test_the_own_corrupted_row_is_looked_for_in_the_group():
    batch, loss = Rows(6, 0).fetch(np.arange(6)), CorruptedRows(FEATURES, 0.5, 3)
    vectors = torch.randn(2, 6, 1, 5, dtype=torch.float64)

    class Fixed(nn.Module):
        def forward(self, numeric, categorical):
            return vectors.flatten(0, 1)

    loss.seed_samples(range(6))
    own, other = torch.nn.functional.normalize(vectors[:, :, 0], dim=2)
    wanted = []
    for row in range(6):
        group = range(row // 3 * 3, row // 3 * 3 + 3)
        weights = torch.stack([(own[row] @ other[one]).exp() for one in group])
        wanted.append(-(weights[row % 3] / weights.sum()).log())
    torch.testing.assert_close(loss(Fixed(), batch), torch.stack(wanted).mean())


KINDS = {
    "tabular": {"heads": 2},
    "tabular_mlp": {"members": 3, "embedding_width": 5},
}
LAYOUTS = {
    "dp4": {"data.micro_batch": 3},
    "tp2": {"parallel.tp": 2},
    "tp2-pp2": {"parallel.tp": 2, "parallel.pp": 2, "data.micro_batch": 3},
    "zero3": {"memory.zero": 3, "memory.recompute": "full", "data.micro_batch": 3},
}


def train(directory, kind, pretraining, options, started):
    edges = tuple(one.edges for one in FEATURES.numeric)
    sizes = TableSizes(edges=edges, codes=(4, 3), outputs=OUTPUTS[pretraining])
    torch.manual_seed(0)
    shape = SHAPES[kind](sizes=sizes, layers=2, hidden=8, dropout=0.2, **KINDS[kind])
    loss = loss_of(pretraining)
    task = TrainingTask(
        shape.build_unfilled(torch.float64),
        Rows(60, 1),
        loss,
        validation=Rows(11, 2),
        private_parameters=True,
        together=loss.together,
    )
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    Trainer(config(directory, *words), task, started).train()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "pretraining"),
    [
        ("tabular", "contrast"),
        pytest.param("tabular_mlp", "contrast", marks=pytest.mark.long),
        ("tabular_mlp", "masked_cells"),
    ],
)
def test_losses_of_pretraining_are_those_of_one_rank(job, together, kind, pretraining):
    if job.world.rank == 0:
        train(together / "reference", kind, pretraining, {}, Runtime(Group(), Group()))
    for layout, options in LAYOUTS.items():
        train(together / layout, kind, pretraining, options, job)
        if job.world.rank == 0:
            check_equal(together / layout, together / "reference")


def test_a_prepared_table_is_trained_on_without_its_target(tmp_path):
    loads = []
    for pretraining, options in {"masked_cells": [], "contrast": ["--model.together", "4"]}.items():
        words = ["--model.kind", "tabular_resnet", "--model.pretraining", pretraining, *options]
        task = table_task(config(tmp_path, *words), FEATURES, Rows(30, 1), None, Group())
        assert task.model.head.output.out_features == OUTPUTS[pretraining]
        assert task.scores is None
        loads.append(task.together)
    assert loads == [1, 4]
    with pytest.raises(ConfigError, match="without a target"):
        table_task(
            config(tmp_path, "--model.kind", "tabular"), FEATURES, Rows(30, 1), None, Group()
        )


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--model.corrupted", "0.2"], "model.corrupted is given, but model.pretraining is none"),
        (
            ["--model.pretraining", "masked_cells", "--model.together", "8"],
            "model.together is given, but model.pretraining is masked_cells",
        ),
        (["--model.pretraining", "contrast", "--model.corrupted", "1"], "model.corrupted is 1"),
        (["--model.pretraining", "contrast", "--model.quantiles", "[0.5]"], "quantiles is given"),
        (
            ["--model.pretraining", "contrast", "--data.sampling", "balanced"],
            "sampling is balanced",
        ),
    ],
)
def test_keys_without_an_effect_are_refused(tmp_path, options, cause):
    with pytest.raises(ConfigError, match=cause):
        words = ["--model.kind", "tabular", *options]
        table_task(config(tmp_path, *words), FEATURES, Rows(30, 1), None, Group())


def test_groups_must_fit_into_micro_batches(tmp_path):
    for options in ({"data.micro_batch": 4}, {"data.micro_batch": "auto"}):
        with pytest.raises(ConfigError, match="multiple of 3"):
            train(tmp_path, "tabular", "contrast", options, alone())
