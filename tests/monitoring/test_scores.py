"""The scores are those of scikit-learn, also with ties, weights, and a single class."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from hpc_train.monitoring.scores import ClassScores, LabelScores, RocCurve, ValueScores
from hpc_train.mpi.group import Group

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


def area_of(samples, batch=64):
    """The area under the curve of samples in any order."""
    curve, ordered = RocCurve(), np.sort(samples)
    for begin in range(0, len(ordered), batch):
        curve.add(ordered[begin : begin + batch])
    return curve.area()


def scored(scores, target, predictions, weight, batch=64):
    """The scores of samples that come in batches."""
    added = [
        scores.add(target[some], predictions[some], weight[some])
        for some in (slice(begin, begin + batch) for begin in range(0, len(target), batch))
    ]
    areas = [area_of(column) for column in np.concatenate(added).T] if scores.columns else []
    return scores.of_all(Group(), areas)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("decimals", [None, 1])
def test_scores_of_classes_are_those_of_scikit_learn(count, decimals, weight):
    target, probabilities = classes(count, decimals)
    predicted = probabilities.argmax(1)
    found = scored(ClassScores(count), target, probabilities, weight)
    score = probabilities[:, 1] if count == 2 else probabilities
    balanced = metrics.balanced_accuracy_score(target, predicted, sample_weight=weight)
    area = metrics.roc_auc_score(target, score, sample_weight=weight, multi_class="ovr")
    expected = {
        "accuracy": metrics.accuracy_score(target, predicted, sample_weight=weight),
        "balanced_accuracy": balanced,
        "auc": area,
        "log_loss": metrics.log_loss(target, probabilities, sample_weight=weight),
        "calibration_error": found["calibration_error"],  # scikit-learn has none
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_scores_of_labels_are_means_of_those_of_scikit_learn(weight):
    probabilities = np.random.default_rng(0).random((SAMPLES, 3))
    target = probabilities + np.random.default_rng(1).normal(0, 0.5, (SAMPLES, 3)) > 0.5
    found = scored(LabelScores(3), target, probabilities, weight)
    assert found["auc"] == pytest.approx(
        metrics.roc_auc_score(target, probabilities, sample_weight=weight), rel=1e-12
    )
    right = ((probabilities > 0.5) == target).mean(1)
    assert found["accuracy"] == pytest.approx(np.average(right, weights=weight), rel=1e-12)


def test_scores_of_values_are_those_of_scikit_learn(weight):
    generator = np.random.default_rng(0)
    target = generator.normal(size=SAMPLES) * 10 + 100
    predicted = target + generator.normal(size=SAMPLES)
    how = {"sample_weight": weight}
    expected = {
        "rmse": metrics.root_mean_squared_error(target, predicted, **how),
        "r2": metrics.r2_score(target, predicted, **how),
        "mae": metrics.mean_absolute_error(target, predicted, **how),
    }
    for center in (0.0, 100.0):
        found = scored(ValueScores(center=center), target, predicted, weight)
        assert found == pytest.approx(expected, rel=1e-12)
    two = np.stack([predicted - 1, predicted], 1)
    found = scored(ValueScores((0.2, 0.9)), target, two, weight)
    expected = {
        f"pinball_{level}": metrics.mean_pinball_loss(target, two[:, at], alpha=level, **how)
        for at, level in enumerate((0.2, 0.9))
    }
    expected["pinball"] = np.mean([*expected.values()])
    assert found == pytest.approx(expected, rel=1e-12)


rows = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.2, 0.3, 1.0]), st.integers(0, 3)), max_size=30
)


@given(rows, st.integers(1, 9))
def test_an_area_is_the_share_of_pairs_in_order(rows, batch):
    samples = np.array([complex(score, own if yes else -own) for yes, score, own in rows])
    pairs = [
        (weight * other, (score > rival) + (score == rival) / 2)
        for yes, score, weight in rows
        for no, rival, other in rows
        if yes and not no
    ]
    total = sum(weight for weight, _ in pairs)
    area = area_of(samples, batch)
    if not total:
        assert area is None
    else:
        assert area == pytest.approx(sum(weight * won for weight, won in pairs) / total)


def test_an_area_does_not_depend_on_how_samples_are_cut():
    generator = np.random.default_rng(5)
    weight = generator.gamma(1, size=500) * generator.choice([-1, 1], 500)
    samples = generator.random(500).round(1) + 1j * weight
    assert len({area_of(samples, batch) for batch in (1, 7, 100, 500)}) == 1


def test_an_auc_needs_samples_of_the_class_and_others():
    assert area_of(np.array([0.1 + 1j, 0.4 + 1j])) is None
    assert area_of(np.array([0.1 - 1j, 0.4 - 1j])) is None
    assert area_of(np.array([0.1 + 0j, 0.4 - 1j])) is None
    one_class = np.zeros(3, np.int64), np.tile([0.6, 0.3, 0.1], (3, 1)), np.ones(3)
    assert scored(ClassScores(3), *one_class)["auc"] is None


def test_an_auc_of_more_classes_leaves_out_those_without_samples():
    target, probabilities = classes(3, None)
    wider = np.concatenate([probabilities, np.zeros((SAMPLES, 1))], axis=1)
    found = [
        scored(ClassScores(every.shape[1]), target, every, np.ones(SAMPLES))
        for every in (probabilities, wider)
    ]
    assert found[0] == found[1]


def test_a_certain_mistake_has_a_finite_log_loss():
    found = scored(ClassScores(2), np.array([0]), np.array([[0.0, 1.0]]), np.ones(1))
    assert found["log_loss"] == pytest.approx(-np.log(np.finfo(float).eps))


def test_a_probability_that_is_no_number_leaves_scores_undefined():
    target, probabilities = classes(2, None)
    probabilities[5] = math.nan
    found = scored(ClassScores(2), target, probabilities, np.ones(SAMPLES))
    assert found["auc"] is None
    assert math.isnan(found["log_loss"])
    assert math.isnan(found["calibration_error"])


def test_r_squared_of_a_constant_target_is_not_defined():
    found = scored(ValueScores(), np.full(3, 0.1), np.arange(3.0), np.ones(3), batch=1)
    assert found["r2"] is None
    assert found["rmse"] > 0


def test_r_squared_is_right_far_from_zero():
    target = 1e9 + np.arange(10.0)
    found = scored(ValueScores(center=1e9 + 3), target, target + 1, np.ones(10))
    assert found["r2"] == pytest.approx(1 - 1 / target.var(), rel=1e-12)


def test_nothing_is_defined_without_weight():
    target, probabilities = classes(3, None)
    found = scored(ClassScores(3), target, probabilities, np.zeros(SAMPLES))
    assert set(found.values()) == {None}
    values = scored(ValueScores((0.1, 0.5)), target, probabilities[:, :2], np.zeros(SAMPLES))
    assert set(values.values()) == {None}
    assert set(ClassScores(2).of_all(Group(), [None]).values()) == {None}


def calibration_error(right, confidence):
    """The calibration error of a second class that is always predicted."""
    probabilities = np.stack([1 - confidence, confidence], 1)
    found = scored(ClassScores(2), right.astype(np.int64), probabilities, np.ones(len(right)))
    return found["calibration_error"]


def test_the_calibration_error_compares_confidence_with_accuracy_in_each_bin():
    # Two of the 15 bins: 3 samples of confidence 0.8, one of them right; 1 of 0.6, which is right.
    right, confidence = np.array([True, False, False, True]), np.array([0.8, 0.8, 0.8, 0.6])
    assert calibration_error(right, confidence) == pytest.approx((3 * (0.8 - 1 / 3) + 0.4) / 4)


def test_a_confidence_on_an_edge_is_in_the_bin_below():
    right, confidence = np.array([True, False]), np.array([0.75, 0.8])
    assert calibration_error(right, confidence) == pytest.approx((0.8 - 0.25) / 2)
    assert calibration_error(np.array([True]), np.array([1.0])) == 0
