"""Tables of benchmarks/tabular.py: scikit-learn's, and three made ones whose best score is known.

A made table comes from a fixed seed. Its rows have the best prediction that anybody could make: the
expected value, or the probability of each class, given the row's features. The score of these is
the best that can be attained, and is computed on the same rows as all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from sklearn import datasets, metrics
from sklearn.model_selection import KFold, StratifiedKFold

Scores = dict[str, float]


@dataclass(frozen=True)
class Table:
    """A table with its target.

    Args:
        name: its name.
        frame: the features: float64 columns, and columns of the type category with texts.
        target: int64 class numbers from 0, or float64 values.
        ideal: the best predictions: probabilities (N, classes), or values (N,). None: not known.
    """

    name: str
    frame: pd.DataFrame
    target: np.ndarray
    ideal: np.ndarray | None = None

    @property
    def classes(self) -> int:
        """Number of classes; 0 for a regression."""
        return int(self.target.max()) + 1 if self.target.dtype == np.int64 else 0

    @property
    def categorical(self) -> list[str]:
        """Names of the categorical columns."""
        return list(self.frame.select_dtypes("category").columns)

    @property
    def numeric(self) -> list[str]:
        """Names of the numeric columns."""
        return [name for name in self.frame.columns if name not in self.categorical]

    @property
    def digest(self) -> str:
        """A short hash of all values."""
        found = hashlib.blake2b(self.target.tobytes(), digest_size=6)
        found.update(pd.util.hash_pandas_object(self.frame, index=False).to_numpy().tobytes())
        return found.hexdigest()

    def folds(self, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The row numbers of the training and test part of each fold.

        The folds of a classification are stratified.
        """
        kind = StratifiedKFold if self.classes else KFold
        split = kind(count, shuffle=True, random_state=seed).split(self.frame, self.target)
        return list(split)

    def at(self, rows: np.ndarray) -> Table:
        """The table of some rows."""
        ideal = None if self.ideal is None else self.ideal[rows]
        return Table(self.name, self.frame.iloc[rows], self.target[rows], ideal)

    def scores(self, predicted: np.ndarray) -> Scores:
        """Scores of predictions: probabilities (N, classes), or values (N,).

        Raises:
            ValueError: the predictions are not finite, or are no probabilities.
        """
        if not np.isfinite(predicted).all():
            raise ValueError(f"{self.name}: predictions are not finite")
        if not self.classes:
            return {
                "rmse": float(metrics.root_mean_squared_error(self.target, predicted)),
                "r2": float(metrics.r2_score(self.target, predicted)),
            }
        if predicted.shape != (len(self.target), self.classes) or (predicted < 0).any():
            raise ValueError(f"{self.name}: these are no probabilities of {self.classes} classes")
        if not np.allclose(predicted.sum(1), 1, atol=1e-4):
            raise ValueError(f"{self.name}: probabilities do not sum to 1")
        sure = np.asarray(predicted, np.float64)
        labels = np.arange(self.classes)
        return {
            "accuracy": float(metrics.accuracy_score(self.target, sure.argmax(1))),
            "log_loss": float(
                metrics.log_loss(self.target, sure / sure.sum(1, keepdims=True), labels=labels)
            ),
        }


def frame_of(
    numbers: np.ndarray, categories: Sequence[tuple[np.ndarray, int]] = ()
) -> pd.DataFrame:
    """A table of features.

    Args:
        numbers: float (N, numeric features). They are named x0, x1 ...
        categories: for each categorical feature the number of each row's category (N,), and how
            many categories there are. The features are named c0, c1 ...
    """
    columns: dict[str, object] = {f"x{n}": numbers[:, n] for n in range(numbers.shape[1])}
    for number, (values, count) in enumerate(categories):
        names = [f"v{value}" for value in range(count)]
        columns[f"c{number}"] = pd.Categorical.from_codes(values, names)
    return pd.DataFrame(columns)


def frequent_first(draws: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Numbers of categories (N,) below `count`. The lowest numbers are the most frequent."""
    shares = 1 / np.arange(2, count + 2)
    return draws.choice(count, rows, p=shares / shares.sum())


def labels_of(draws: np.random.Generator, probabilities: np.ndarray) -> np.ndarray:
    """Classes, int64 (N,), drawn with probabilities (N, classes)."""
    borders = probabilities.cumsum(1)[:, :-1]
    found: np.ndarray = (draws.random((len(borders), 1)) > borders).sum(1)
    return found.astype(np.int64)


def rules() -> Table:
    """Two classes by rules on single features, with one label of ten turned over."""
    draws = np.random.default_rng(101)
    x = draws.random((4000, 10))
    clean = (x[:, 0] > 0.5) & (x[:, 1] > 0.3) & (x[:, 4] < 0.9)
    clean |= (x[:, 2] < 0.4) & (x[:, 3] > 0.4) & (x[:, 1] < 0.7)
    positive = np.where(clean, 0.9, 0.1)
    ideal = np.stack([1 - positive, positive], 1)
    return Table("rules", frame_of(x), labels_of(draws, ideal), ideal)


def smooth() -> Table:
    """A smooth function of seven of ten features, with normal noise of standard deviation 0.5."""
    draws = np.random.default_rng(102)
    x = draws.standard_normal((3000, 10))
    ideal = np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 2 * np.exp(-(x[:, 3] ** 2))
    ideal += np.tanh(x[:, 4] + x[:, 5]) + 0.3 * x[:, 6]
    target = ideal + 0.5 * draws.standard_normal(len(x))
    return Table("smooth", frame_of(x), target, ideal)


def categories() -> Table:
    """Effects of 40, 100 and 200 categories, with normal noise of standard deviation 0.5.

    A numeric feature has another slope for each of the 40 categories.
    """
    draws = np.random.default_rng(103)
    counts, rows = (40, 100, 200), 4000
    x = draws.standard_normal((rows, 3))
    values = [frequent_first(draws, rows, count) for count in counts]
    ideal = 0.5 * x[:, 1] + draws.standard_normal(counts[0])[values[0]] * x[:, 0]
    for codes, count in zip(values, counts, strict=True):
        ideal += draws.standard_normal(count)[codes]
    target = ideal + 0.5 * draws.standard_normal(rows)
    return Table("categories", frame_of(x, list(zip(values, counts, strict=True))), target, ideal)


def of_sklearn(name: str) -> Table:
    """A table that comes with scikit-learn. Its columns are renamed, as some have odd names."""
    found = getattr(datasets, f"load_{name}")()
    target = found.target.astype(np.float64 if name == "diabetes" else np.int64)
    return Table(name, frame_of(found.data.astype(np.float64)), target)


TABLES: dict[str, Callable[[], Table]] = {
    "breast_cancer": lambda: of_sklearn("breast_cancer"),
    "digits": lambda: of_sklearn("digits"),
    "wine": lambda: of_sklearn("wine"),
    "diabetes": lambda: of_sklearn("diabetes"),
    "rules": rules,
    "smooth": smooth,
    "categories": categories,
}
