"""Classifier and Regressor as estimators of scikit-learn."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from hpc_train.tabular import Classifier, Regressor

SMALL = {"model.members": 1, "model.hidden": 32, "model.embedding_width": 4, "model.dropout": 0.0}
HOW = {"steps": 60, "lr": 0.01, "patience": 3, "config": SMALL}
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
