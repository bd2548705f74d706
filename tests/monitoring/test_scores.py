"""The scores are those of scikit-learn, also with ties, weights, and a single class."""

import numpy as np
import pytest
from sklearn import metrics

from hpc_train.monitoring import scores

SAMPLES = 400


@pytest.fixture(params=["equal weights", "weights"])
def weight(request):
    if request.param == "equal weights":
        return np.ones(SAMPLES)
    drawn = np.random.default_rng(3).gamma(1.0, size=SAMPLES)
    drawn[::7] = 0
    return drawn


def classes(count, decimals):
    """Targets, and probabilities with ties if they have few decimals."""
    generator = np.random.default_rng(count)
    target = generator.integers(0, count, SAMPLES)
    logits = generator.normal(size=(SAMPLES, count)) + 1.5 * np.eye(count)[target]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if decimals is not None:
        probabilities = np.round(probabilities, decimals) + 1e-3
        probabilities /= probabilities.sum(1, keepdims=True)
    return target, probabilities


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("decimals", [None, 1])
def test_scores_of_classes_are_those_of_scikit_learn(count, decimals, weight):
    target, probabilities = classes(count, decimals)
    predicted = probabilities.argmax(1)
    found = [
        scores.accuracy(predicted == target, weight),
        scores.balanced_accuracy(target, predicted, weight),
        scores.log_loss(target, probabilities, weight),
        scores.auc_of_classes(target, probabilities, weight),
    ]
    score = probabilities[:, 1] if count == 2 else probabilities
    expected = [
        metrics.accuracy_score(target, predicted, sample_weight=weight),
        metrics.balanced_accuracy_score(target, predicted, sample_weight=weight),
        metrics.log_loss(target, probabilities, sample_weight=weight),
        metrics.roc_auc_score(target, score, sample_weight=weight, multi_class="ovr"),
    ]
    assert found == pytest.approx(expected, rel=1e-12)


def test_scores_of_values_are_those_of_scikit_learn(weight):
    generator = np.random.default_rng(0)
    target = generator.normal(size=SAMPLES) * 10 + 100
    predicted = target + generator.normal(size=SAMPLES)
    found = [
        scores.rmse(target, predicted, weight),
        scores.mean_absolute_error(target, predicted, weight),
        scores.r_squared(target, predicted, weight),
        scores.pinball_loss(target, predicted, weight, 0.9),
    ]
    expected = [
        metrics.root_mean_squared_error(target, predicted, sample_weight=weight),
        metrics.mean_absolute_error(target, predicted, sample_weight=weight),
        metrics.r2_score(target, predicted, sample_weight=weight),
        metrics.mean_pinball_loss(target, predicted, sample_weight=weight, alpha=0.9),
    ]
    assert found == pytest.approx(expected, rel=1e-12)


def test_an_auc_needs_samples_of_the_class_and_others():
    score, weight = np.array([0.1, 0.4, 0.4]), np.ones(3)
    assert scores.auc(np.array([True, True, True]), score, weight) is None
    assert scores.auc(np.array([False, False, False]), score, weight) is None
    assert scores.auc(np.array([True, False, False]), score, np.array([0.0, 1, 1])) is None
    one_class = np.zeros(3, np.int64), np.tile([0.6, 0.3, 0.1], (3, 1)), weight
    assert scores.auc_of_classes(*one_class) is None


def test_an_auc_of_more_classes_leaves_out_those_without_samples():
    target, probabilities = classes(3, None)
    wider = np.concatenate([probabilities, np.zeros((SAMPLES, 1))], axis=1)
    weight = np.ones(SAMPLES)
    expected = scores.auc_of_classes(target, probabilities, weight)
    assert scores.auc_of_classes(target, wider, weight) == expected


def test_equal_scores_count_half():
    positive = np.array([True, False, True, False])
    assert scores.auc(positive, np.full(4, 0.5), np.ones(4)) == 0.5


def test_a_certain_mistake_has_a_finite_log_loss():
    loss = scores.log_loss(np.array([0]), np.array([[0.0, 1.0]]), np.ones(1))
    assert loss == pytest.approx(-np.log(np.finfo(float).eps))


def test_r_squared_of_a_constant_target_is_not_defined():
    assert scores.r_squared(np.full(3, 0.1), np.arange(3.0), np.ones(3)) is None


def test_nothing_is_defined_without_weight():
    nothing, weight = np.zeros(0), np.zeros(0)
    target = np.zeros(0, np.int64)
    assert scores.accuracy(nothing > 0, weight) is None
    assert scores.balanced_accuracy(target, target, weight) is None
    assert scores.auc_of_classes(target, np.zeros((0, 2)), weight) is None
    assert scores.log_loss(target, np.zeros((0, 2)), weight) is None
    assert scores.calibration_error(nothing > 0, nothing, weight) is None
    assert scores.r_squared(nothing, nothing, weight) is None
    assert scores.rmse(nothing, nothing, weight) is None


def test_the_calibration_error_compares_confidence_with_accuracy_in_each_bin():
    # Two bins: 3 samples of confidence 0.8, one of them right; 1 sample of confidence 0.4, right.
    right = np.array([True, False, False, True])
    confidence = np.array([0.8, 0.8, 0.8, 0.4])
    found = scores.calibration_error(right, confidence, np.ones(4), bins=2)
    assert found == pytest.approx((3 * (0.8 - 1 / 3) + (1 - 0.4)) / 4)


def test_a_confidence_on_an_edge_is_in_the_bin_below():
    right, confidence = np.array([True, False]), np.array([0.5, 0.6])
    found = scores.calibration_error(right, confidence, np.ones(2), bins=2)
    assert found == pytest.approx((0.5 + 0.6) / 2)
    assert scores.calibration_error(np.array([True]), np.array([1.0]), np.ones(1)) == 0
