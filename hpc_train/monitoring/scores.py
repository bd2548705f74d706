"""Scores that say how good predictions are, of more samples than memory should hold.

N samples, C classes. Samples are added in batches, on all ranks, and each on one rank. `weight` has
the weight of each, float64 (N,), none below 0. Sums are exact until they are rounded once, so the
scores depend neither on the batches nor on the ranks, to the last bit. A score is None or NaN where
it is not defined, such as an AUC where all samples have one class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.monitoring.exact_sums import ExactSums
from hpc_train.mpi.group import Group

CALIBRATION_BINS = 15  # bins of equal width that confidences from 0 to 1 are sorted into
Scores = dict[str, float | None]


class RocCurve:
    """The receiver operating characteristic of samples that come in the order of their scores.

    A sample is a complex number: the real part is its score, and the imaginary part its weight, or
    minus its weight if it is not of the class.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(2)  # weights so far: of the class, not of the class
        self._corner = np.zeros(2)  # the same up to the last score that differs from the one before
        self._score = math.nan
        self._area = 0.0

    def add(self, samples: NDArray[np.complex128]) -> None:
        """Add samples, (N,), N at least 1; none has a lower score than one before."""
        weights = samples.imag
        parts = np.stack([np.maximum(weights, 0), np.maximum(-weights, 0)])
        # One addition after the other: so bits do not depend on how samples are cut into calls.
        sums = np.cumsum(np.concatenate([self._sums[:, None], parts], 1), axis=1)
        before = np.concatenate([[self._score], samples.real[:-1]])
        self._turn(sums[:, :-1][:, samples.real != before])
        self._sums, self._score = sums[:, -1], float(samples.real[-1])

    def area(self) -> float | None:
        """The area under the curve, once all samples have been added.

        That is the probability that a sample of the class has a higher score than one that is not
        of the class. Equal scores count half. It is None if all weight is in the class, or none is.
        """
        self._turn(self._sums[:, None])
        inside, outside = self._sums.tolist()
        return self._area / (inside * outside) if inside > 0 and outside > 0 else None

    def _turn(self, corners: NDArray[np.float64]) -> None:
        """Add the area up to further corners of the curve, (2, N)."""
        inside, outside = np.concatenate([self._corner[:, None], corners], 1)
        areas = np.diff(inside) * (outside[1:] + outside[:-1]) / 2
        self._area = float(np.cumsum(np.concatenate([[self._area], areas]))[-1])
        self._corner = np.array([inside[-1], outside[-1]])


class ClassScores:
    """The scores of a classification.

    Accuracy is the share of the weight that was predicted right, and balanced accuracy the mean of
    this share over the classes that have weight. For two classes the AUC is that of the second one.
    For more it is the mean over the classes of each against the rest, as far as that is defined.
    The log loss is the mean of minus the natural logarithm of the probability of a sample's class;
    a probability counts as the distance of two float64 numbers near 1, 2.2e-16, if it is below.

    The calibration error is the expected calibration error: how far confidences are from the shares
    that are right. Samples are sorted into bins by confidence. Bin k of n has those above (k - 1) /
    n, up to k / n. The result is the mean over the bins, by their weights, of the distance between
    the mean confidence and the accuracy. From Guo et al., "On calibration of modern neural
    networks", https://arxiv.org/abs/1706.04599.

    Args:
        classes: number of classes, at least 2.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.columns = 1 if classes == 2 else classes
        """Number of ROC curves."""
        self._sums = ExactSums(2 * classes + 1 + CALIBRATION_BINS)

    def add(
        self, target: np.ndarray, probabilities: np.ndarray, weight: np.ndarray
    ) -> NDArray[np.complex128]:
        """Add samples.

        Args:
            target: numbers of classes, int (N,).
            probabilities: of each class, float64 (N, C).
            weight: weights of the samples.

        Returns:
            What the ROC curves need, (N, columns).
        """
        count, bins = self.classes, CALIBRATION_BINS
        right = probabilities.argmax(1) == target
        own, confidence = probabilities[np.arange(len(target)), target], probabilities.max(1)
        number = np.nan_to_num(np.clip(np.ceil(confidence * bins) - 1, 0, bins - 1))
        losses = -np.log(np.clip(own, np.finfo(np.float64).eps, 1.0))
        self._sums.add(
            (weight, target),
            (weight * right, count + target),
            (weight * losses, 2 * count),
            (weight * (confidence - right), 2 * count + 1 + number.astype(np.int64)),
        )
        shown = range(1, 2) if count == 2 else range(count)
        samples = np.empty((len(target), len(shown)), np.complex128)
        samples.real = np.nan_to_num(probabilities[:, shown])
        samples.imag = np.where(target[:, None] == [*shown], weight[:, None], -weight[:, None])
        return samples

    def of_all(self, group: Group, areas: Sequence[float | None]) -> Scores:
        """The scores of the samples of all ranks. Collective.

        Args:
            group: the ranks.
            areas: the areas under the ROC curves of all samples.
        """
        sums = self._sums.over(group)
        weights, right = sums[: self.classes], sums[self.classes : 2 * self.classes]
        loss, *gaps = sums[2 * self.classes :]
        shares = [one / own for one, own in zip(right, weights, strict=True) if own > 0]
        total = sum(weights)
        distance = sum(map(abs, gaps))  # NaN if a probability was
        return {
            "accuracy": _mean(sum(right), total),
            "balanced_accuracy": sum(shares) / len(shares) if shares else None,
            "auc": _mean_of_defined(areas) if math.isfinite(distance) else None,
            "log_loss": _mean(loss, total),
            "calibration_error": _mean(distance, total),
        }


class LabelScores:
    """The scores of a multilabel task: means over the labels for which they are defined.

    Args:
        labels: number of labels. Each is a classification of two classes.
    """

    def __init__(self, labels: int) -> None:
        self.columns = labels
        """Number of ROC curves."""
        self._each = [ClassScores(2) for _ in range(labels)]

    def add(
        self, target: np.ndarray, probabilities: np.ndarray, weight: np.ndarray
    ) -> NDArray[np.complex128]:
        """Add samples.

        Args:
            target: whether each label is given, bool (N, labels).
            probabilities: of each label, float64 (N, labels).
            weight: weights of the samples.

        Returns:
            What the ROC curves need, (N, columns).
        """
        every = zip(self._each, target.T.astype(np.int64), probabilities.T, strict=True)
        found = [
            one.add(own, np.stack([1 - chance, chance], 1), weight) for one, own, chance in every
        ]
        return np.concatenate(found, 1)

    def of_all(self, group: Group, areas: Sequence[float | None]) -> Scores:
        """The scores of the samples of all ranks; see `ClassScores`. Collective."""
        every = [one.of_all(group, [area]) for one, area in zip(self._each, areas, strict=True)]
        return {name: _mean_of_defined([one[name] for one in every]) for name in every[0]}


class ValueScores:
    """The scores of a regression, in the unit of the target.

    "rmse" is the root of the mean squared error, "mae" the mean absolute error, and "r2" 1 minus
    squared errors by squared distances from the target's mean, None if all targets are equal. If
    quantiles are predicted, these are those of the quantile 0.5, if it is among them. Each quantile
    has its mean pinball loss, in which an error counts `quantile` times where the target is above
    the prediction, and 1 - `quantile` times where it is below. "pinball" is the mean of these.

    Args:
        quantiles: the quantiles that are predicted.
        center: a value near the targets. Squared distances are rounded least if it is their mean.
    """

    columns = 0

    def __init__(self, quantiles: Sequence[float] = (), center: float = 0.0) -> None:
        self.quantiles, self.center = tuple(quantiles), center
        self._sums = ExactSums(5 + len(self.quantiles))
        self._different: dict[float, None] = {}  # up to two values of the target

    def add(self, target: np.ndarray, predicted: np.ndarray, weight: np.ndarray) -> None:
        """Add samples.

        Args:
            target: values, float64 (N,).
            predicted: float64 (N,), or with quantiles (N, number of quantiles).
            weight: weights of the samples.
        """
        levels = zip(self.quantiles, predicted.T, strict=True) if self.quantiles else ()
        losses = [
            (weight * np.maximum(level * above, (level - 1) * above), 5 + place)
            for place, (level, one) in enumerate(levels)
            for above in [target - one]
        ]
        away = target - self.center
        terms = [(weight, 0), (weight * away, 1), (weight * np.square(away), 2), *losses]
        if (point := self._point(predicted)) is not None:
            error = point - target
            terms += [(weight * np.square(error), 3), (weight * np.abs(error), 4)]
        self._sums.add(*terms)
        if len(self._different) < 2:
            self._different |= dict.fromkeys((float(target.min()), float(target.max())))

    def _point(self, predicted: np.ndarray) -> np.ndarray | None:
        if not self.quantiles:
            return predicted
        return predicted[:, self.quantiles.index(0.5)] if 0.5 in self.quantiles else None

    def of_all(self, group: Group, areas: Sequence[float | None] = ()) -> Scores:
        """The scores of the samples of all ranks. Collective."""
        total, away, squares, errors, absolute, *losses = self._sums.over(group)
        varied = len(group.united(self._different)) > 1
        found: Scores = {}
        if self.quantiles:
            means = [_mean(loss, total) for loss in losses]
            names = [f"pinball_{level_name(level)}" for level in self.quantiles]
            found = {"pinball": _mean_of_defined(means), **dict(zip(names, means, strict=True))}
            if 0.5 not in self.quantiles:
                return found
        mean = _mean(errors, total)
        spread = squares - away * away / total if total > 0 else 0.0
        return found | {
            "rmse": None if mean is None else math.sqrt(mean),
            "r2": 1 - errors / spread if varied and spread > 0 else None,
            "mae": _mean(absolute, total),
        }


def level_name(level: float) -> str:
    """A quantile as the names of scores and predictions have it, different for each."""
    short = f"{level:g}"
    return short if float(short) == level else repr(float(level))


def _mean(value: float, total: float) -> float | None:
    return value / total if total > 0 else None


def _mean_of_defined(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None
