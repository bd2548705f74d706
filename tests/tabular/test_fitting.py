"""Fits on several ranks, with and without a run directory."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from sklearn import metrics

from hpc_train.errors import CheckpointMismatch, ConfigError, UserError
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.tabular import Classifier, Regressor
from tests.tabular.tables import EXACT, SMALL, curve, customers

HOW = {"steps": 100, "batch": 16, "lr": 0.01, "patience": 4}
LAYOUTS = {
    "dp": {},
    "zero": {"memory.zero": 1},
    "zero3": {"memory.zero": 3},
    "tp": {"parallel.tp": 2},
    "pp": {"parallel.pp": 2, "data.micro_batch": 4},
}


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def runtime(group) -> Runtime:
    return Runtime(group, group)


def alone() -> Runtime:
    return Runtime(Group(), Group())


@pytest.fixture(scope="module")
def expected():
    """Losses and predictions of one rank."""
    X, y = customers()
    made = Classifier(**HOW, config=EXACT).fit(X, y, runtime=alone())
    return made.history_, made.predict_proba(X)


def check_same(made, X, expected):
    history, predicted = expected
    assert len(history) == 100
    assert [one["step"] for one in made.history_] == [one["step"] for one in history]
    for mine, its in zip(made.history_, history, strict=True):
        assert mine == pytest.approx(its, rel=1e-10)
    np.testing.assert_allclose(made.predict_proba(X), predicted, atol=1e-6)


@pytest.mark.ranks(1, 2, later=(4,))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_model_of_one_rank(group, expected, layout):
    if group.size == 1 and layout != "dp":
        return
    X, y = customers()
    made = Classifier(**HOW, config=EXACT | LAYOUTS[layout]).fit(X, y, runtime=runtime(group))
    check_same(made, X, expected)


@pytest.mark.ranks(1, 4)
def test_a_run_directory_changes_nothing(group, expected, together):
    X, y = customers()
    made = Classifier(**HOW, run_dir=together / "run", config=EXACT)
    check_same(made.fit(X, y, runtime=runtime(group)), X, expected)
    record = json.loads((together / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["tflops"] > 0
    assert record["node_hours"] > 0
    # Called again, it has nothing left to do.
    again = made.fit(X, y, runtime=runtime(group))
    check_same(again, X, expected)


@pytest.mark.ranks(2)
def test_a_regression_on_two_ranks(group):
    X, y = curve()
    found = [
        Regressor(**HOW, model="resnet", config={"precision.dtype": "float64"})
        .fit(X, y, runtime=job)
        .predict(X)
        for job in (runtime(group), alone())
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.ranks(2)
def test_ranks_with_different_tables_are_refused(group):
    X, y = curve()
    with pytest.raises(UserError, match="the table that fit was given differs") as caught:
        Regressor(**HOW, config=SMALL).fit(X + group.rank, y, runtime=runtime(group))
    assert caught.value.agreed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["patience", "seed", "validation_fraction"])
def test_ranks_with_different_parameters_are_refused(group, name):
    given = {name: 0.2 if name == "validation_fraction" else 1 + group.rank} if group.rank else {}
    with pytest.raises(UserError, match="the configuration of the estimator differs"):
        Regressor(config=SMALL, **given).fit(*curve(), runtime=runtime(group))


@pytest.mark.ranks(2)
def test_a_mistake_of_one_rank_is_raised_on_all(group):
    X, y = curve()
    if group.rank == 1:
        y = y[:-1]
    with pytest.raises(UserError, match=r"rank 1 .*inconsistent numbers of samples"):
        Regressor(**HOW, config=SMALL).fit(X, y, runtime=runtime(group))


@pytest.mark.ranks(3)
def test_a_batch_that_ranks_cannot_share_is_refused_on_all(group):
    X, y = curve()
    with pytest.raises(ConfigError, match="data.batch 16 is not divisible by 3 ranks"):
        Regressor(**HOW, config=SMALL).fit(X, y, runtime=runtime(group))


ONE = EXACT | {"model.members": 1, "model.dropout": 0.0}


def error_of(made, X, y, scale):
    """The squared error, as the loss of one member is."""
    return np.mean((made.predict(X) - y) ** 2) / scale


def test_the_model_is_that_of_the_lowest_validation_loss():
    X, y = curve(60)
    how = {"steps": 400, "batch": 16, "lr": 0.03, "config": ONE}
    made = Regressor(**how, patience=3).fit(X[:40], y[:40], eval_set=(X[40:], y[40:]))
    losses = {
        one["step"]: one["validation_loss"] for one in made.history_ if "validation_loss" in one
    }
    best = min(losses, key=losses.__getitem__)
    assert max(losses) - best == 3 * 25
    error = error_of(made, X[40:], y[40:], y[:40].var())
    assert error == pytest.approx(losses[best], rel=1e-9)


def test_the_history_has_the_scores_of_the_rows_held_out():
    how = {"steps": 50, "batch": 16, "lr": 0.01, "config": EXACT}
    X, y = customers(150)
    weight = np.random.default_rng(0).uniform(0.5, 2, 150)
    given = {"sample_weight": weight[:100], "eval_set": (X[100:], y[100:], weight[100:])}
    made = Classifier(**how, class_weight={"left": 3.0}).fit(X[:100], y[:100], **given)
    chances, predicted = made.predict_proba(X[100:]), made.predict(X[100:])
    assert [one["step"] for one in made.history_ if "validation_auc" in one] == [25, 50]
    best = min(made.history_, key=lambda one: one.get("validation_loss", np.inf))
    told = {key.removeprefix("validation_"): one for key, one in best.items()}
    how = {"sample_weight": weight[100:]}
    assert told["accuracy"] == pytest.approx(metrics.accuracy_score(y[100:], predicted, **how))
    assert told["log_loss"] == pytest.approx(metrics.log_loss(y[100:], chances, **how))
    right = y[100:] == "stays"
    assert told["auc"] == pytest.approx(metrics.roc_auc_score(right, chances[:, 1], **how))

    X, y = curve(150)
    made = Regressor(steps=50, batch=16, config=EXACT).fit(X[:99], y[:99], eval_set=(X, y))
    told, predicted = made.history_[-1], made.predict(X)
    assert told["validation_r2"] == pytest.approx(metrics.r2_score(y, predicted))
    rmse = metrics.root_mean_squared_error(y, predicted)
    assert told["validation_rmse"] == pytest.approx(rmse)


@pytest.mark.parametrize("files", [False, True])
def test_verbose_prints_the_losses(tmp_path, capfd, files):
    X, y = curve(60)
    how = {"steps": 50, "batch": 16, "run_dir": tmp_path / "run" if files else None}
    for verbose in (False, True):
        Regressor(**how, verbose=verbose).fit(X[:40], y[:40], eval_set=(X[40:], y[40:]))
        out = "".join(capfd.readouterr())
        assert len(re.findall(r"step (?:1|25|50)  loss [\d.]+  ", out)) == 3 * verbose, out
        assert ("validation" in out) == verbose
        if files:
            shutil.rmtree(tmp_path / "run")


def test_without_patience_the_model_is_that_of_the_last_step():
    X, y = curve()
    longer, made = (
        Regressor(steps=steps, batch=120, patience=0, config=ONE).fit(X, y) for steps in (31, 30)
    )
    assert made.history_ == longer.history_[:-1]
    # The loss of a step is that of all rows before it.
    assert error_of(made, X, y, y.var()) == pytest.approx(longer.history_[-1]["loss"], rel=1e-9)


def test_a_fit_with_other_class_weights_is_another_fit(tmp_path):
    X, y = customers(60)
    how = {"steps": 5, "run_dir": tmp_path, "batch": 16, "config": SMALL}
    Classifier(**how).fit(X, y)
    with pytest.raises(CheckpointMismatch, match="a fit to another table: .* class_weight"):
        Classifier(**how, class_weight={"left": 3.0}).fit(X, y)


def test_another_fit_in_the_same_run_directory_is_refused(tmp_path):
    X, y = curve()
    how = {"steps": 20, "run_dir": tmp_path, "batch": 16, "config": SMALL}
    made = Regressor(**how).fit(X, y)
    for few in (X, y + 1), (X[:60], y[:60]):
        with pytest.raises(CheckpointMismatch, match="a fit to another table: give the same X"):
            made.fit(*few)
    for changes, told in (
        ({"seed": 1}, "seed 0, this one has 1: set seed back, or give another run_dir"),
        ({"batch": 8}, "batch 16, this one has 8"),
        ({"model": "resnet", "config": {}}, "model mlp, this one has resnet"),
        ({"quantiles": (0.5,)}, r"quantiles \[\], this one has \[0.5\]: set quantiles back"),
        ({"config": SMALL | {"model.hidden": 8}}, "model.hidden 16, this one has 8"),
        ({"config": EXACT}, "precision.dtype float32, this one has float64"),
        ({"steps": 21}, "steps 20, this one has 21"),
        ({"lr": 0.1}, "lr 0.002, this one has 0.1: set lr back"),
        ({"patience": 3}, "patience 16, this one has 3"),
        ({"config": SMALL | {"model.dropout": 0.5}}, "model.dropout 0.1, this one has 0.5"),
        ({"config": SMALL | {"optimizer.schedule": "cosine"}}, "optimizer.schedule constant"),
    ):
        with pytest.raises(CheckpointMismatch, match=f"run_dir .* has a fit with {told}"):
            Regressor(**how | changes).fit(X, y)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="which has the history of the fit, cannot be read"):
        Regressor(**how).fit(X, y)


@pytest.mark.parametrize("switched", [torch.no_grad, torch.inference_mode, bfloat16])
def test_what_a_program_has_switched_changes_no_fit(switched):
    how = {"steps": 3, "batch": 16, "config": SMALL}
    X, y = curve()
    expected = Regressor(**how).fit(X, y).predict(X)
    with switched():
        before = torch.is_grad_enabled()
        np.testing.assert_array_equal(Regressor(**how).fit(X, y).predict(X), expected)
        assert torch.is_grad_enabled() == before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [3, 5])
def test_two_ranks_share_the_batch_of_a_small_table(group, rows):
    X, y = curve(rows)
    Regressor(steps=1, config=SMALL).fit(X, y, runtime=runtime(group))


def test_a_fit_leaves_the_random_generators_as_they_were():
    np.random.seed(3)
    expected = np.random.random(3)
    np.random.seed(3)
    Regressor(steps=2, config=SMALL).fit(*curve())
    np.testing.assert_array_equal(np.random.random(3), expected)
