"""The estimators of scikit-learn that train a model of a table on all ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_array, column_or_1d, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target

from hpc_train.data.tables.features import TargetValues
from hpc_train.tabular.base import MOST_WEIGHT, TableEstimator
from hpc_train.tabular.columns import check_even, is_frame, stands_for_none
from hpc_train.tabular.fitting import TableRows
from hpc_train.tabular.settings import TableModel


class Classifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """A neural network that classifies the rows of a table, or finds several labels for each.

    `fit` trains on all ranks of the job, and `predict` computes on each rank alone. In a program
    without a launcher there is one rank. A process gets the same model with any number of ranks,
    but for the order of additions. With y of shape (N, labels), whose values are 0 and 1, each row
    has any number of the labels.

    Args:
        model: "mlp" is an ensemble of MLPs, "resnet" a residual network, and "transformer" a
            transformer whose tokens are the columns.
        epochs: number of passes over the training rows. By default it follows from steps.
        steps: number of optimizer steps. If neither is given, they are 2000 or those of 100 passes,
            whichever is more.
        batch: rows of a step over all ranks. A table of fewer rows has smaller batches. By default
            it is the largest power of two that makes 8 steps of an epoch, but 32 at least and 256
            at most.
        lr: learning rate of AdamW. The model "mlp" has a weight decay of 0.3 unless `config` gives
            `optimizer.weight_decay`.
        patience: number of validations in a row that do not lower the validation loss, after which
            training ends. Then the model is that of the lowest loss. With 0 no rows are held out,
            and the model is that of the last step.
        validation_fraction: share of the rows that is held out for the validations, unless `fit` is
            given an eval_set. Of fewer than 20 rows none is held out.
        seed: seed of the initial weights, the rows held out, the order of rows and the dropout.
        class_weight: "balanced" multiplies the weight of each row by the inverse of its class's
            frequency; a dict has a factor for each class; None: there are no factors. Labels have
            none.
        run_dir: folder in which checkpoints and metrics are written. A fit that was stopped or
            killed continues there when it is called again with the same arguments. One that has
            ended is read from there. By default nothing is written, and the fit cannot continue.
        config: values of other keys of the configuration, such as {"model.hidden": 256,
            "precision.dtype": "float64"}; `hpc-train train --help` lists them.
        verbose: whether to print the losses.

    Attributes:
        classes_: the classes, rising; or the numbers of the labels, from 0.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a DataFrame with texts as names.
        history_: a dict for each recorded step: step and loss, and after a validation
            validation_loss and the scores of the rows that are held out: validation_accuracy,
            validation_balanced_accuracy, validation_auc, validation_log_loss and
            validation_calibration_error. Of labels each score is the mean over them. Class weights
            count in losses and not in scores.
    """

    classes_: np.ndarray
    _has_labels: bool

    def __init__(
        self,
        model: TableModel = "mlp",
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
        lr: float = 2e-3,
        patience: int = 16,
        validation_fraction: float = 0.1,
        seed: int = 0,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        run_dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.class_weight = class_weight
        self.run_dir = run_dir
        self.config = config
        self.verbose = verbose

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest probability for each row of X, of shape (N,).

        Of labels: 1 for each whose probability is above 0.5, else 0; int64 (N, labels).
        """
        probabilities = self._predictions(X)
        if self._has_labels:
            return (probabilities > 0.5).astype(np.int64)
        found: np.ndarray = self.classes_[probabilities.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each of `classes_` for each row of X: float64 (N, classes).

        The probabilities of classes have the sum 1. Those of labels are independent of each other.
        """
        return self._predictions(X)

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        """The number of each row's class, int64 (N,), or its labels, float64 (N, labels)."""
        y = _of_target(y)
        if fitting:
            self._has_labels = type_of_target(y, input_name="y") == "multilabel-indicator"
        if self._has_labels:
            return self._checked_labels(y, fitting=fitting)
        if y.ndim > 1 and y.shape[1] > 1 and fitting:
            raise ValueError(
                f"y should be a 1d array, got an array of shape {y.shape} instead: if its columns "
                "are labels, give them the values 0 and 1"
            )
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if fitting:
            self.classes_ = np.unique(y)
            if len(self.classes_) < 2:
                raise ValueError(
                    f"y has one class, {self.classes_.tolist()[0]!r}: give two or more classes"
                )
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise ValueError(f"its y has the class {y[unknown].tolist()[0]!r}, which y has not")
        numbers: np.ndarray = np.searchsorted(self.classes_, y).astype(np.int64)
        return numbers

    def _checked_labels(self, y: np.ndarray, *, fitting: bool) -> np.ndarray:
        """The labels of each row, float64 (N, labels)."""
        if not np.isin(y, (0, 1)).all():
            raise ValueError("y has labels, and a value that is neither 0 nor 1")
        if fitting:
            self.classes_ = np.arange(y.shape[1])
        if y.shape[1:] != self.classes_.shape:
            raise ValueError(
                f"its y has the shape {y.shape}, but y has {len(self.classes_)} columns of labels"
            )
        labels: np.ndarray = y.astype(np.float64)
        return labels

    def _class_factors(self, y: np.ndarray) -> np.ndarray | None:
        if self.class_weight is None:
            return None
        if self._has_labels:
            raise ValueError("class_weight is given, but y has labels: give sample_weight")
        factors: np.ndarray = compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_[y]
        )
        if not ((factors >= 0) & (factors <= MOST_WEIGHT)).all():
            raise ValueError(
                f"class_weight is {self.class_weight!r}: give numbers from 0 to {MOST_WEIGHT:g}"
            )
        return factors

    def _target_values(self, rows: TableRows) -> TargetValues:
        if self._has_labels:
            shares = tuple(rows.target.mean(0).tolist())
            names = tuple(f"y{number}" for number in range(len(shares)))
            return TargetValues(task="multilabel", names=names, shares=shares)
        counts = np.bincount(rows.target, minlength=len(self.classes_))
        return TargetValues(
            task="classification",
            names=("y",),
            classes=tuple(map(str, self.classes_.tolist())),
            shares=tuple((counts / len(rows)).tolist()),
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class Regressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """A neural network that predicts a number for the rows of a table.

    `fit` trains on all ranks of the job, and `predict` computes on each rank alone; see
    `Classifier`, which has the same arguments but quantiles, and class_weight besides.

    Args:
        quantiles: the quantiles of the target to learn, such as (0.1, 0.5, 0.9), in place of its
            mean; 0.5 is among them. By default the mean is learned.

    Attributes:
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a DataFrame with texts as names.
        history_: a dict for each recorded step: step and loss, and after a validation
            validation_loss and the scores of the rows that are held out: validation_rmse,
            validation_r2 and validation_mae, in the unit of the target. Losses are squared errors
            in units of the target's variance. With quantiles the scores are those of the median,
            validation_pinball, and validation_pinball_0.1 and so on; losses are pinball losses in
            units of the target's standard deviation.
    """

    def __init__(
        self,
        model: TableModel = "mlp",
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
        lr: float = 2e-3,
        patience: int = 16,
        validation_fraction: float = 0.1,
        seed: int = 0,
        quantiles: tuple[float, ...] = (),
        run_dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.quantiles = quantiles
        self.run_dir = run_dir
        self.config = config
        self.verbose = verbose

    def predict(self, X: Any) -> np.ndarray:
        """The mean of the target for each row of X, or with quantiles its median: float64 (N,)."""
        found = self._predictions(X)
        return found[:, self._levels.index(0.5)] if self._levels else found

    def predict_quantiles(self, X: Any) -> np.ndarray:
        """The quantiles of the target for each row of X: float64 (N, quantiles), in their order.

        A higher quantile is never below a lower one.

        Raises:
            ValueError: the estimator was fitted without quantiles.
        """
        found = self._predictions(X)
        if not self._levels:
            raise ValueError("fit was called without quantiles: give the parameter quantiles")
        return found

    @property
    def _levels(self) -> tuple[float, ...]:
        """The quantiles of the last fit."""
        return self._fitted.loss.quantiles

    def _check_parameters(self, eval_set: Any) -> None:
        super()._check_parameters(eval_set)
        if np.ndim(self.quantiles) != 1 or np.asarray(self.quantiles).dtype.kind not in "iuf":
            raise ValueError(
                f"quantiles is {self.quantiles!r}: give a tuple, as in (0.1, 0.5, 0.9)"
            )
        levels = [*self.quantiles]
        if any(not 0 < level < 1 for level in levels) or len({*levels}) < len(levels):
            raise ValueError(f"quantiles is {levels}: give different numbers above 0 and below 1")
        if levels and 0.5 not in levels:
            raise ValueError(f"quantiles is {levels}: add 0.5, the median, which predict returns")

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        """The values of the target."""
        y = column_or_1d(_of_target(y), warn=True)
        if y.dtype.kind in "mM":
            raise ValueError(
                f"y has dates or durations ({y.dtype}): give numbers, such as days since a date"
            )
        try:
            values: np.ndarray = y.astype(np.float64)
        except (ValueError, TypeError) as error:
            raise ValueError(f"y has a value that is no number: {error}") from error
        if not np.isfinite(values).all():
            raise ValueError("Input y contains infinity: leave such rows out")
        return values

    def _target_values(self, rows: TableRows) -> TargetValues:
        with np.errstate(over="ignore"):
            center, scale = float(rows.target.mean()), float(rows.target.std())
        if not np.isfinite(scale):
            raise ValueError("y has values whose squares exceed float64: scale y down")
        if not scale and np.ptp(rows.target) > 0:
            raise ValueError("y has differences whose squares are 0 in float64: scale y up")
        return TargetValues(task="regression", names=("y",), center=center, scale=scale or 1.0)


def _of_target(y: Any) -> np.ndarray:
    """The target as an array without missing values."""
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")
    check_even(y, "y")
    # scikit-learn would make float64 of pandas' integers and truth values.
    if is_frame(y):
        y = _of_labels(y)
    elif hasattr(y, "isna") and getattr(y.dtype, "kind", "O") in "biu" and not y.isna().any():
        y = y.to_numpy(_plain(y.dtype))
    values: np.ndarray = check_array(
        y, ensure_2d=False, dtype=None, ensure_all_finite=False, input_name="y"
    )
    missing = values.dtype.kind in "fc" and np.isnan(values).any()
    if missing or (values.dtype == object and any(map(stands_for_none, values.flat))):
        raise ValueError("Input y contains NaN or None: leave rows without a target out")
    if values.dtype != object:
        assert_all_finite(values, input_name="y")
    return values


def _of_labels(y: Any) -> Any:
    """A DataFrame of integers or truth values as an array; others as they are."""
    if not all(one.kind in "biu" for one in y.dtypes) or y.isna().any(axis=None):
        return y
    return y.to_numpy(np.int64 if y.shape[1] > 1 else _plain(y.dtypes.iloc[0]))


def _plain(dtype: Any) -> np.dtype[Any]:
    """NumPy's type for a type of pandas."""
    made: np.dtype[Any] = np.dtype(getattr(dtype, "numpy_dtype", dtype))
    return made
