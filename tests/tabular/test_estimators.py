"""Classifier and Regressor as estimators of scikit-learn."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from hpc_train.errors import ConfigError, NotFiniteError
from hpc_train.tabular import Classifier, Regressor
from tests.tabular.tables import SMALL, curve, customers

CHECKED = {"model.members": 1, "model.hidden": 32, "model.embedding_width": 4}
HOW = {"steps": 60, "lr": 0.01, "patience": 3, "config": CHECKED | {"model.dropout": 0.0}}
FAILS = {
    "check_sample_weight_equivalence_on_dense_data": (
        "a row of weight 2 is in a batch once, and a row that is there twice in two batches"
    ),
}


@parametrize_with_checks(
    [Classifier(**HOW), Regressor(**HOW)], expected_failed_checks=lambda estimator: FAILS
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


QUICK = {"steps": 150, "lr": 0.01, "batch": 32, "config": SMALL}


@pytest.fixture(scope="module")
def customer_model():
    X, y = customers(400)
    return Classifier(**QUICK).fit(X, y), X, y


def test_a_data_frame_of_many_types_is_learned(customer_model):
    made, X, y = customer_model
    assert made.score(X, y) > 0.85
    assert [*made.feature_names_in_] == [*X.columns]
    assert [*made.classes_] == ["left", "stays"]
    probabilities = made.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert (made.predict(X) == made.classes_[probabilities.argmax(1)]).all()


def test_columns_are_found_by_name_and_unknown_categories_are_taken(customer_model):
    made, X, _ = customer_model
    expected = made.predict_proba(X)
    np.testing.assert_array_equal(made.predict_proba(X[X.columns[::-1]]), expected)
    other = X.assign(plan="business", region=pd.Categorical(["west"] * len(X)), paid=np.nan)
    assert np.isfinite(made.predict_proba(other)).all()
    with pytest.raises(ValueError, match=r"Feature names seen at fit time.*missing.*\n- plan"):
        made.predict(X.drop(columns="plan"))
    with pytest.raises(ValueError, match="'months' held numbers in fit, but could not convert"):
        made.predict(X.assign(months="many"))


def test_columns_are_found_by_labels_that_are_no_texts():
    X, y = curve(60, columns=3)
    frame = pd.DataFrame(X, columns=[7, 0, 3])
    made = Regressor(steps=5, config=SMALL).fit(frame, y, eval_set=(frame[[0, 3, 7]], y))
    expected = made.predict(X)
    np.testing.assert_array_equal(made.predict(frame[[3, 7, 0]]), expected)
    assert not hasattr(made, "feature_names_in_")  # by scikit-learn's convention it has texts
    for other in (frame.rename(columns={7: 1}), frame[[7, 0]], frame.add_prefix("x")):
        with pytest.raises(ValueError, match="X had no column 7|X had no column 3"):
            made.predict(other)
    made.fit(X, y)  # columns of arrays have no names
    np.testing.assert_array_equal(made.predict(frame[[0, 7, 3]]), made.predict(X[:, [1, 0, 2]]))


def test_predictions_are_those_of_the_numbers_that_training_had():
    """Training reads float32, in which the values beside a very large one are few."""
    random = np.random.default_rng(0)
    X = random.uniform(0, 1000, (600, 1))
    y = X[:, 0] + random.normal(0, 200, 600) > 500
    X[0] = 1e13
    made = Classifier(**QUICK).fit(X[:400], y[:400], eval_set=(X[400:], y[400:]))
    best = min(made.history_, key=lambda one: one.get("validation_loss", np.inf))
    loss = metrics.log_loss(y[400:], made.predict_proba(X[400:]))
    assert loss == pytest.approx(best["validation_log_loss"], rel=1e-4)


def test_a_fit_that_fails_leaves_the_earlier_one(customer_model):
    made, X, _ = customer_model
    expected = made.predict_proba(X)
    with pytest.raises(ValueError, match="class"):
        made.fit(X[["plan"]], np.zeros(len(X), int))
    np.testing.assert_array_equal(made.predict_proba(X), expected)


@pytest.mark.parametrize("copied", [pickle, joblib], ids=lambda module: module.__name__)
def test_a_copy_on_disk_predicts_the_same_and_holds_plain_arrays(customer_model, copied, tmp_path):
    made, X, _ = customer_model
    expected = made.predict_proba(X)
    with (tmp_path / "model").open("wb") as file:
        copied.dump(made, file)
    assert b"torch._utils" not in (tmp_path / "model").read_bytes()
    with (tmp_path / "model").open("rb") as file:
        again = copied.load(file)
    np.testing.assert_array_equal(again.predict_proba(X), expected)


@pytest.mark.slow("two processes import everything")
def test_a_search_in_a_pipeline_by_two_processes():
    X, y = curve(80)
    steps = [("scale", StandardScaler()), ("net", Regressor(steps=40, lr=0.01, config=SMALL))]
    grid = {"net__lr": [1e-6, 0.02]}
    found = []
    for jobs in (1, 2):
        search = GridSearchCV(Pipeline(steps), grid, cv=2, n_jobs=jobs).fit(X, y)
        assert search.best_params_ == {"net__lr": 0.02}
        found.append(search.cv_results_["mean_test_score"])
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_weights_decide_between_rows_that_contradict_each_other():
    X = np.repeat([[0.0], [1.0]], 60, axis=0)
    y = np.tile(["a", "b"], 60)
    heavy = Classifier(**QUICK).fit(X, y, sample_weight=np.where(y == "b", 9.0, 1.0))
    np.testing.assert_allclose(heavy.predict_proba([[0.0]])[0], [0.1, 0.9], atol=0.05)
    same = Classifier(**QUICK, class_weight={"a": 1.0, "b": 9.0}).fit(X, y)
    np.testing.assert_allclose(same.predict_proba(X), heavy.predict_proba(X))


def test_labels_are_predicted_each_for_itself():
    X = np.random.default_rng(0).normal(size=(300, 2))
    y = np.stack([X[:, 0] > 0, X[:, 1] > 0.5, X[:, 0] < 9], 1).astype(int)  # the last one always is
    made = Classifier(**QUICK).fit(X[:200], y[:200], eval_set=(X[200:], y[200:]))
    assert made.classes_.tolist() == [0, 1, 2]
    chances = made.predict_proba(X[200:])
    np.testing.assert_array_equal(made.predict(X[200:]), chances > 0.5)
    assert (made.predict(X[200:]) == y[200:]).mean(0) == pytest.approx(1, abs=0.1)
    every = [metrics.log_loss(y[200:, n], chances[:, n], labels=[0, 1]) for n in range(3)]
    best = min(made.history_, key=lambda one: one.get("validation_loss", np.inf))
    assert best["validation_log_loss"] == pytest.approx(np.mean(every))
    for wrong, told in (
        ({"y": y * 2}, "neither 0 nor 1"),
        ({"y": y, "eval_set": (X, y[:, :2])}, r"shape \(300, 2\), but y has 3 columns of labels"),
        ({"y": [[0, 1, 1]] * 299 + [[0, 1]]}, "y has rows of different lengths"),
        ({"y": pd.Series([["a"], ["a", "b"]] * 150)}, "y has rows .*MultiLabelBinarizer"),
    ):
        with pytest.raises(ValueError, match=told):
            Classifier().fit(X, **wrong)
    with pytest.raises(ValueError, match="class_weight is given, but y has labels"):
        Classifier(class_weight="balanced").fit(X, y)


def test_quantiles_hold_their_shares_of_the_rows_and_do_not_cross():
    X, y = curve(600)
    y = y + np.random.default_rng(1).exponential(1.0, 600)
    made = Regressor(steps=300, lr=0.01, config=SMALL, quantiles=(0.5, 0.9, 0.1)).fit(X, y)
    found = made.predict_quantiles(X)
    assert (y[:, None] < found).mean(0) == pytest.approx([0.5, 0.9, 0.1], abs=0.07)
    assert (np.diff(found[:, [2, 0, 1]]) >= 0).all()
    np.testing.assert_array_equal(made.predict(X), found[:, 0])
    assert {"validation_pinball_0.9", "validation_r2"} <= made.history_[-1].keys()
    for wrong in ((0.1, 0.9), (0.5, 0.5), (0.5, 1.0)):
        with pytest.raises(ValueError, match="quantiles is"):
            Regressor(quantiles=wrong).fit(X, y)
    with pytest.raises(ValueError, match="fit was called without quantiles"):
        Regressor(steps=1).fit(X, y).predict_quantiles(X)


def test_texts_are_missing_values_and_numbers_in_arrays_of_objects():
    X = np.array([["red", 1.0], [None, np.nan], ["blue", 3]] * 30, object)
    y = np.tile([0, 1, 2], 30)
    made = Classifier(**QUICK).fit(X, y)
    assert made.predict([["red", 1], [None, None], ["blue", 3.0]]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"model": "forest"}, ValueError, "model is 'forest': give one of mlp, resnet"),
        ({"epochs": 1, "steps": 2}, ValueError, "epochs and steps are both given"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction is 1.0"),
        ({"validation_fraction": None}, ValueError, "validation_fraction is None"),
        ({"batch": 0}, ValueError, "batch is 0: give a whole number, 1 or more"),
        ({"steps": "9"}, ValueError, "steps is '9': give a whole number"),
        ({"seed": None}, ValueError, "seed is None: give a whole number, 0 or more"),
        ({"config": ["model.hidden"]}, ValueError, "config is .*: give a dict"),
        ({"config": {"hidden": 3}}, ConfigError, "unknown key 'hidden': give keys as"),
        ({"config": {"data.validation_every": "9"}}, ConfigError, "validation_every is '9'"),
        ({"config": {"data.validation_every": -3}}, ConfigError, "data.validation_every is -3"),
        ({"config": {"run.seed": 3}}, ConfigError, "config has run.seed.*the parameter seed"),
        (
            {"config": {"checkpoint.verify": True}},
            ConfigError,
            "without run_dir nothing is written",
        ),
        ({"config": {"checkpoint.weights": "x"}}, ConfigError, "does not take: leave it out"),
        *(
            ({"config": {f"checkpoint.{key}": 3}}, ConfigError, "does not take: leave it out")
            for key in ("every", "minutes", "mtbf_hours", "keep", "keep_best")
        ),
        ({"config": {"model.quantiles": [0.5]}}, ConfigError, "quantiles of a Regressor"),
        ({"config": {"data.sampling": "balanced"}}, ConfigError, "does not take: leave it out"),
        ({"config": {"data.class_weights": "balanced"}}, ConfigError, "the parameter class_weight"),
        (
            {"config": {"finetune.head": True}},
            ConfigError,
            "finetune.head, which an estim",
        ),
        ({"config": {"model.hiden": 3}}, ConfigError, "model.hiden.*model.hidden"),
        ({"config": {"model.hidden": "wide"}}, ConfigError, "model.hidden is 'wide'"),
        ({"lr": -1.0}, ConfigError, "optimizer.lr"),
        (
            {"lr": 1e30, "steps": 50},
            NotFiniteError,
            "loss of nan.*: set a smaller lr, [^:]*config$",
        ),
        ({"quantiles": 0.5}, ValueError, "quantiles is 0.5: give a tuple, as in"),
        ({"quantiles": None}, ValueError, "quantiles is None: give a tuple"),
        ({"quantiles": ("0.5",)}, ValueError, "quantiles is .*: give a tuple"),
    ],
)
def test_wrong_parameters_are_named(changes, error, told):
    with pytest.raises(error, match=told):
        Regressor(**changes).fit(*curve(30))


def test_a_fit_that_diverges_in_a_run_directory_begins_anew_in_another(tmp_path):
    how = {"steps": 50, "run_dir": tmp_path, "config": SMALL}
    with pytest.raises(NotFiniteError, match="smaller lr, .* in config, and give another run_dir$"):
        Regressor(**how, lr=1e30).fit(*curve(30))


def test_targets_that_cannot_be_learned_are_named():
    X, y = curve(30)
    for wrong in pd.Series([1.5, None] * 15, dtype=object), pd.array(["a", None] * 15, "string"):
        for made in Regressor(), Classifier():
            with pytest.raises(ValueError, match="Input y contains NaN or None: leave rows"):
                made.fit(X, wrong)
    with pytest.raises(ValueError, match="class_weight is {'a': -1}: give numbers from 0"):
        Classifier(class_weight={"a": -1}).fit(X, ["a", "b"] * 15)
    with pytest.raises(ValueError, match="sample_weight has a value that is no number"):
        Regressor().fit(X, y, sample_weight=["a"] * 30)
    with pytest.raises(
        ValueError, match=r"sample_weight has the value 1e\+308: divide all weights"
    ):
        Regressor().fit(X, y, sample_weight=[1e308] * 30)
    with pytest.raises(ValueError, match=r"class_weight is .*: give numbers from 0 to 1e\+100"):
        Classifier(class_weight={"a": 1e308}).fit(X, ["a", "b"] * 15)
    with pytest.raises(ValueError, match="two columns of X have the name 'a'"):
        Regressor().fit(pd.DataFrame(X, columns=[*"abca"]), y)
    with pytest.raises(ValueError, match="if its columns are labels, give them the values 0 and 1"):
        Classifier().fit(X, np.tile([[0, 1], [1, 2], [2, 0]], (10, 1)))
    with pytest.raises(ValueError, match="y has values whose squares exceed float64"):
        Regressor().fit(X, y * 1e300)
    with pytest.raises(ValueError, match="y has differences whose squares are 0 in float64"):
        Regressor().fit(X, y * 1e-200)
    with pytest.raises(ValueError, match="y has a value that is no number: .*'tall'"):
        Regressor().fit(X, ["tall"] * 30)
    with pytest.raises(ValueError, match="X has rows of different lengths"):
        Regressor().fit([[1, 2]] * 29 + [[1]], y)
    for dates in (pd.Series(pd.date_range("2020", periods=30)), np.zeros(30, "timedelta64[D]")):
        with pytest.raises(ValueError, match="y has dates or durations .*: give numbers"):
            Regressor().fit(X, dates)
    with pytest.raises(ValueError, match="run_dir is '': give a folder"):
        Regressor(run_dir="").fit(X, y)


def test_truth_values_of_pandas_are_classes():
    X, y = curve(40)
    model = Classifier(steps=2).fit(X, pd.Series(y > np.median(y), dtype="boolean"))
    assert model.classes_.dtype == bool
    assert model.predict(X).dtype == bool
    with pytest.raises(ValueError, match="Input y contains NaN or None: leave rows"):
        Classifier().fit(X, pd.Series([True, None] * 20, dtype="boolean"))


@pytest.mark.filterwarnings("ignore:A column-vector y")
@pytest.mark.parametrize("frame", [False, True])
def test_large_integers_of_pandas_are_classes(frame):
    X, y = curve(40)
    large = pd.Series((y > np.median(y)) + 2**60, dtype="Int64")
    model = Classifier(steps=2).fit(X, large.to_frame() if frame else large)
    assert model.classes_.tolist() == [2**60, 2**60 + 1]


@pytest.mark.parametrize("dtype", ["Int64", "boolean"])
def test_numbers_of_pandas_are_labels(dtype):
    X, y = curve(40)
    labels = pd.DataFrame({"high": y > np.median(y), "left": X[:, 0] < 0})
    made = Classifier(steps=2).fit(X, labels.astype(dtype))
    expected = Classifier(steps=2).fit(X, labels.to_numpy(np.int64))
    np.testing.assert_array_equal(made.predict(X), expected.predict(X))
    with pytest.raises(ValueError, match="Input y contains NaN or None: leave rows"):
        Classifier().fit(X, labels.astype(dtype).mask(labels))


def test_wrong_rows_to_evaluate_with_are_named():
    X, y = customers(60)
    with pytest.raises(ValueError, match="patience is 0, so nothing is evaluated"):
        Classifier(patience=0).fit(X, y, eval_set=(X, y))
    for wrong, told in (
        ((X, np.full(60, "other")), "its y has the class 'other', which y has not"),
        ((X.iloc[:, 1:], y), "The feature names should match.*\n- months"),
        ((X.assign(months="few"), y), "column 'months' held numbers in fit"),
        ((X, y[1:]), ".*inconsistent numbers of samples"),
        ((X, np.stack([y, y], 1)), "y should be a 1d array"),
        ((X, y, np.zeros(60)), "(?:all values of sample_weight are 0|Sample weights must)"),
    ):
        with pytest.raises(ValueError, match=rf"(?s)eval_set: {told}"):
            Classifier().fit(X, y, eval_set=wrong)
    with pytest.raises(ValueError, match="eval_set is no tuple"):
        Classifier().fit(X, y, eval_set=X)
