"""Scores that say how good predictions are: plain functions of NumPy arrays.

N samples, C classes. `weight` holds the weight of each sample, float (N,), none below 0. Sums are
made in float64 in the order of the samples, so equal arrays give equal scores to the last bit. A
function returns None where its score is not defined, such as an AUC where all samples have one
class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CALIBRATION_BINS = 15  # bins of equal width that confidences from 0 to 1 are sorted into
_Floats = NDArray[np.float64]


def accuracy(right: np.ndarray, weight: np.ndarray) -> float | None:
    """The share of the weight that was predicted right.

    Args:
        right: whether each prediction is right, bool (N,).
        weight: weights of the samples.
    """
    return _mean(right.astype(np.float64), weight)


def balanced_accuracy(
    target: np.ndarray, predicted: np.ndarray, weight: np.ndarray
) -> float | None:
    """The mean over the classes of the share of their weight that was predicted right.

    Classes without samples do not count.

    Args:
        target: numbers of the samples' classes, int (N,).
        predicted: numbers of the predicted classes, int (N,).
        weight: weights of the samples.
    """
    right = predicted == target
    every = [accuracy(right[mine], weight[mine]) for mine in _of_classes(target)]
    found = [share for share in every if share is not None]
    return sum(found) / len(found) if found else None


def auc(positive: np.ndarray, score: np.ndarray, weight: np.ndarray) -> float | None:
    """The area under the receiver operating characteristic of two classes.

    That is the probability that a sample of the class has a higher score than one that is not of
    the class. Equal scores count half.

    Args:
        positive: whether each sample is of the class, bool (N,).
        score: a number that is higher for samples of the class, float (N,).
        weight: weights of the samples.

    Returns:
        The area; None if all weight is in the class, or none is.
    """
    order = np.argsort(score, kind="stable")
    ranked = score[order]
    begins = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))[: len(ranked)]
    weights = weight.astype(np.float64)[order]
    inside = np.where(positive[order], weights, 0.0)
    outside = weights - inside
    if not (inside.sum() > 0 and outside.sum() > 0):
        return None
    gains, losses = np.add.reduceat(inside, begins), np.add.reduceat(outside, begins)
    below = np.cumsum(losses) - losses
    area = (gains * (below + losses / 2)).sum() / (inside.sum() * outside.sum())
    return float(area)


def auc_of_classes(
    target: np.ndarray, probabilities: np.ndarray, weight: np.ndarray
) -> float | None:
    """The AUC of two classes, or of more the mean AUC of each against the rest.

    The mean is that of the classes for which it is defined.

    Args:
        target: numbers of classes, int (N,).
        probabilities: of each class, float (N, C).
        weight: weights of the samples.
    """
    count = probabilities.shape[1]
    classes = [1] if count == 2 else range(count)
    every = [auc(target == number, probabilities[:, number], weight) for number in classes]
    found = [area for area in every if area is not None]
    return sum(found) / len(found) if found else None


def log_loss(target: np.ndarray, probabilities: np.ndarray, weight: np.ndarray) -> float | None:
    """The mean of minus the natural logarithm of the probability of the sample's class.

    A probability counts as the distance of two float64 numbers near 1, 2.2e-16, if it is below.

    Args:
        target: numbers of classes, int (N,).
        probabilities: of each class, float (N, C).
        weight: weights of the samples.
    """
    own = probabilities[np.arange(len(target)), target].astype(np.float64)
    return _mean(-np.log(np.clip(own, np.finfo(np.float64).eps, 1.0)), weight)


def calibration_error(
    right: np.ndarray, confidence: np.ndarray, weight: np.ndarray, bins: int = CALIBRATION_BINS
) -> float | None:
    """The expected calibration error: how far confidences are from the shares that are right.

    Samples are sorted into bins by confidence. Bin k of n has those above (k - 1) / n, up to k / n.
    The result is the mean over the bins, by their weights, of the distance between the mean
    confidence and the accuracy. From Guo et al., "On calibration of modern neural networks",
    https://arxiv.org/abs/1706.04599.

    Args:
        right: whether each prediction is right, bool (N,).
        confidence: the probability of the predicted class, float (N,).
        weight: weights of the samples.
        bins: number of bins.
    """
    weights = weight.astype(np.float64)
    total = weights.sum()
    if not total > 0 or not np.isfinite(confidence).all():
        return None
    number = np.clip(
        np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1
    )
    gaps = np.bincount(number, weights * (confidence - right), bins)
    return float(np.abs(gaps).sum() / total)


def rmse(target: np.ndarray, predicted: np.ndarray, weight: np.ndarray) -> float | None:
    """The root of the mean squared error, in the target's unit.

    Args:
        target: values, float (N,).
        predicted: predicted values, float (N,).
        weight: weights of the samples.
    """
    mean = _mean(np.square(predicted - target), weight)
    return None if mean is None else mean**0.5


def mean_absolute_error(
    target: np.ndarray, predicted: np.ndarray, weight: np.ndarray
) -> float | None:
    """The mean absolute error, in the target's unit; arguments as those of `rmse`."""
    return _mean(np.abs(predicted - target), weight)


def r_squared(target: np.ndarray, predicted: np.ndarray, weight: np.ndarray) -> float | None:
    """The share of the target's variance that is explained; arguments as those of `rmse`.

    Returns:
        1 minus squared errors by squared distances from the mean; None if all targets are equal.
    """
    center = _mean(target.astype(np.float64), weight)
    spread = None if center is None else _mean(np.square(target - center), weight)
    error = _mean(np.square(predicted - target), weight)
    if error is None or not spread or (target == target[0]).all():
        return None
    return 1 - error / spread


def pinball_loss(
    target: np.ndarray, predicted: np.ndarray, weight: np.ndarray, quantile: float
) -> float | None:
    """The mean pinball loss of predicted quantiles, in the target's unit.

    An error counts `quantile` times where the target is above the prediction, and 1 - `quantile`
    times where it is below. Arguments as those of `rmse`.
    """
    above = target - predicted
    return _mean(np.maximum(quantile * above, (quantile - 1) * above), weight)


def _mean(values: _Floats, weight: np.ndarray) -> float | None:
    weights = weight.astype(np.float64)
    total = weights.sum()
    return float((values * weights).sum() / total) if total > 0 else None


def _of_classes(target: np.ndarray) -> list[np.ndarray]:
    """The places of the samples of each class, in the order of the classes."""
    order = np.argsort(target, kind="stable")
    _, begins = np.unique(target[order], return_index=True)
    return np.split(order, begins[1:])
