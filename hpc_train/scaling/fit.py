"""The model of docs/scaling.md, fitted to measured times of steps, and its predictions.

On n nodes a step takes

    strong:  compute / n + inside + ring * 2 (n - 1) / n + message * m(n)
    weak:    compute + ring * 2 (n - 1) / n + message * m(n)

inside is the work that more nodes do not divide. ring is the time in which a node's link carries
the gradients once, and m(n) the number of messages one after the other. In weak scaling compute and
inside are one constant, because neither changes with n. No coefficient is below zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpc_train.planning.predict import rounds_of_messages

_Array = NDArray[np.float64]
Basis = Mapping[str, Callable[[int], float]]

LEAST_ERROR = 0.01  # share of a time; the model is not better than that
ROUNDING = 1e-6  # difference of two criteria that is only rounding
DRAWS = 1000  # of the bootstrap
INTERVAL = (0.05, 0.95)  # the quantiles that bound a prediction
LEAST_FREEDOM = 3  # degrees of freedom of the errors; with fewer the draws have no variance

_RING_AND_MESSAGES: Basis = {
    "ring": lambda nodes: 2 * (nodes - 1) / nodes,
    "message": lambda nodes: float(rounds_of_messages(nodes)),
}
STRONG: Basis = {
    "compute": lambda nodes: 1 / nodes,
    "inside": lambda nodes: 1.0,
    **_RING_AND_MESSAGES,
}
WEAK: Basis = {"compute": lambda nodes: 1.0, **_RING_AND_MESSAGES}


@dataclass(frozen=True)
class TimePoint:
    """The measured time of a step.

    Args:
        nodes: number of nodes.
        seconds: the median over the runs.
        error: its standard error in seconds.
        runs: number of runs.
    """

    nodes: int
    seconds: float
    error: float
    runs: int = 1


@dataclass(frozen=True)
class PredictedTime:
    """The time of a step that a model predicts.

    Args:
        nodes: number of nodes.
        seconds: the prediction.
        low, high: an interval that has the time in nine of ten cases, if the model holds.
    """

    nodes: int
    seconds: float
    low: float
    high: float


def least_squares(rows: ArrayLike, values: ArrayLike, errors: ArrayLike) -> _Array:
    """The linear model with the least weighted squares whose coefficients are 0 or more.

    All subsets of the coefficients are tried, so there may be only a few of them. The subset counts
    that has the least Akaike information criterion, with known errors: the squared distances in
    units of the errors, plus 2 for each coefficient (Akaike, "A new look at the statistical model
    identification", IEEE Transactions on Automatic Control 19, 1974). Of several that are equal the
    one counts whose functions stand first.

    Args:
        rows: the functions at each point, (points, functions).
        values: the values, (points,); or several sets of them, (points, sets).
        errors: their standard errors, (points,), all above 0.

    Returns:
        The coefficients, (functions,) or (functions, sets).
    """
    matrix, given = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    weights = 1 / np.asarray(errors, dtype=float)[:, None]
    wanted = given.reshape(len(matrix), -1) * weights
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale * weights
    best = np.zeros((len(scale), wanted.shape[1]))
    least = np.full(wanted.shape[1], np.inf)
    for count in range(1, min(matrix.shape) + 1):
        for used in map(list, itertools.combinations(range(len(scale)), count)):
            found, _, rank, _ = np.linalg.lstsq(scaled[:, used], wanted, rcond=None)
            if rank < count:
                continue
            criterion = ((scaled[:, used] @ found - wanted) ** 2).sum(axis=0) + 2 * count
            better = (found.min(axis=0) >= 0) & (criterion < least - ROUNDING)
            best[:, better] = 0.0
            best[np.ix_(used, better)] = found[:, better]
            least[better] = criterion[better]
    coefficients: _Array = (best / scale[:, None]).reshape(len(scale), *given.shape[1:])
    return coefficients


def _functions(basis: Basis, nodes: Sequence[int]) -> list[list[float]]:
    """The functions at each number of nodes, a row for each."""
    return [[function(count) for function in basis.values()] for count in nodes]


def _errors(points: Sequence[TimePoint]) -> list[float]:
    """The errors of the points, but none below LEAST_ERROR."""
    return [max(point.error, LEAST_ERROR * point.seconds) for point in points]


@dataclass(frozen=True)
class StepTimeModel:
    """A fitted model of the time of a step.

    Args:
        basis: the functions of the number of nodes, by name: STRONG or WEAK.
        coefficients: seconds, by the names of the functions.
    """

    basis: Basis
    coefficients: Mapping[str, float]

    @classmethod
    def of(cls, points: Sequence[TimePoint], basis: Basis) -> StepTimeModel:
        """Fit it to points, each weighted by its error, but no closer than LEAST_ERROR."""
        rows = _functions(basis, [point.nodes for point in points])
        found = least_squares(rows, [point.seconds for point in points], _errors(points))
        return cls(basis, dict(zip(basis, found.tolist(), strict=True)))

    def seconds(self, nodes: int) -> float:
        """The seconds of a step on this number of nodes."""
        return sum(
            self.coefficients[name] * function(nodes) for name, function in self.basis.items()
        )

    def share_of_messages(self, nodes: int) -> float:
        """The share of the messages' latency in the time of a step on this number of nodes."""
        latency = self.coefficients["message"] * self.basis["message"](nodes)
        return latency / self.seconds(nodes) if latency else 0.0

    @property
    def serial_share(self) -> float | None:
        """Amdahl's share of a strong model; None if the model gives no time on one node.

        It is the part of the time on one node that stays however many nodes there are: the work
        that is not divided, and the transfer of the gradients. Messages are not in it, because
        their time grows. Amdahl, "Validity of the single processor approach to achieving large
        scale computing capabilities", AFIPS Conference Proceedings 30, 1967.
        """
        alone = self.seconds(1)
        stays = self.coefficients["inside"] + 2 * self.coefficients["ring"]
        return stays / alone if alone > 0 else None


def predictions(
    points: Sequence[TimePoint], basis: Basis, targets: Sequence[int]
) -> list[PredictedTime]:
    """Predict the time of a step on several numbers of nodes.

    A number for which the model gives no time above 0 is left out. One node is such a number if the
    model has nothing but communication, as where more nodes were slower.

    The interval is that of a parametric bootstrap (Efron and Tibshirani, "An introduction to the
    bootstrap", 1993): the model is fitted again to points that are drawn from the measured ones and
    their errors. It is no narrower than the error of `left_out`, which the draws do not know.
    """
    model = StepTimeModel.of(points, basis)
    targets = [nodes for nodes in targets if model.seconds(nodes) > 0]
    seconds, errors = np.array([point.seconds for point in points]), _errors(points)
    freedom = max(LEAST_FREEDOM, sum(point.runs - 1 for point in points))
    random = np.random.default_rng(0)  # the same data give the same page
    scatter = random.standard_t(freedom, (len(points), DRAWS)) * np.array(errors)[:, None]
    drawn = np.maximum(seconds[:, None] + scatter, seconds[:, None] / 10)
    found = least_squares(_functions(basis, [point.nodes for point in points]), drawn, errors)
    times = np.array(_functions(basis, targets)).reshape(-1, len(basis)) @ found
    low, high = np.quantile(times, INTERVAL, axis=1)
    missed = abs(left_out(points, basis) or 0.0)
    predicted = []
    for nodes, least, most in zip(targets, low.tolist(), high.tolist(), strict=True):
        middle = model.seconds(nodes)
        wide = (min(least, middle * max(0.0, 1 - missed)), max(most, middle * (1 + missed)))
        predicted.append(PredictedTime(nodes, middle, *wide))
    return predicted


def left_out(points: Sequence[TimePoint], basis: Basis) -> float | None:
    """How far the model is off on the largest number of nodes if it is fitted to the others only.

    Returns:
        The error as a share of the measured time; None if there are fewer than three numbers of
        nodes.
    """
    ordered = sorted(points, key=lambda point: point.nodes)
    if len(ordered) < 3:
        return None
    last = ordered[-1]
    return StepTimeModel.of(ordered[:-1], basis).seconds(last.nodes) / last.seconds - 1


def gustafson_share(nodes: float, speedup: float) -> float:
    """The serial share of a scaled speed-up.

    Gustafson, "Reevaluating Amdahl's law", Communications of the ACM 31, 1988.

    Args:
        nodes: how many times as many nodes, more than 1.
        speedup: how many times as much work is done in the same time.
    """
    return (nodes - speedup) / (nodes - 1)


def largest_worthwhile(
    model: StepTimeModel,
    measured: Mapping[int, float],
    most: int,
    least: float,
    *,
    weak: bool,
    can_run: Callable[[int], bool],
) -> int:
    """The number of nodes up to which the parallel efficiency is at least `least`.

    Args:
        model: the fitted model, for numbers of nodes that were not measured.
        measured: the seconds of a step by number of nodes. Efficiency is relative to the smallest.
        most: the largest number that is looked at.
        least: the least efficiency, from 0 to 1.
        weak: whether the work grows with the nodes.
        can_run: whether the training can be divided over a number of nodes.
    """
    first = min(measured)

    def pays(nodes: int) -> bool:
        grown = 1.0 if weak else first / nodes
        if nodes in measured:
            return measured[first] * grown / measured[nodes] >= least
        return model.seconds(first) * grown / model.seconds(nodes) >= least and can_run(nodes)

    slow = min((nodes for nodes in measured if nodes > first and not pays(nodes)), default=most + 1)
    return next((nodes for nodes in range(min(most, slow - 1), first, -1) if pays(nodes)), first)
