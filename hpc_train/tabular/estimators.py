"""The estimators of scikit-learn that train a model of a table on all ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, column_or_1d, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from hpc_train.data.tables.features import TargetValues
from hpc_train.data.tables.fit import fit_features
from hpc_train.data.tables.schema import ColumnKind
from hpc_train.mpi.runtime import Runtime
from hpc_train.tabular.columns import is_frame, read_columns
from hpc_train.tabular.fitted import FittedTable
from hpc_train.tabular.fitting import TableRows, fit_table
from hpc_train.tabular.held_out import choose_held_out
from hpc_train.tabular.session import checking, fitting_runtime
from hpc_train.tabular.settings import FitSettings, TableModel

PARAMETERS = tuple(FitSettings.__dataclass_fields__)


class TableEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What `Classifier` and `Regressor` share."""

    patience: int
    validation_fraction: float
    seed: int
    run_dir: str | Path | None
    n_features_in_: int
    feature_names_in_: np.ndarray
    history_: list[dict[str, float]]
    _kinds: dict[str, ColumnKind]
    _fitted: FittedTable

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        eval_set: Any = None,
        *,
        runtime: Runtime | None = None,
    ) -> Self:
        """Train a model. Collective: all ranks of a job call it with the same arguments.

        Args:
            X: a DataFrame or an array of shape (N, columns). Texts, dates and missing values are
                taken as they are; see `hpc_train.tabular.columns.read_columns`.
            y: classes or values, of shape (N,).
            sample_weight: weights of the rows, from 0, of shape (N,); None: all rows weigh 1.
            eval_set: other rows whose loss decides when training ends: (X, y), or with weights
                (X, y, sample_weight). By default validation_fraction of the rows are held out.
            runtime: the runtime that `hpc_train.run` has passed to the program. By default that of
                this process, which its first fit starts.

        Returns:
            The estimator.

        Raises:
            ValueError, TypeError: an argument or a parameter has no possible value. Under a
                launcher all ranks raise a UserError with the same text.
            ConfigError: `config` has a wrong key or value, or the batch does not fit the ranks.
            UserError: the ranks have different data, or do not all fit.
            Stopped: a signal or the time limit stopped the training, with a checkpoint in run_dir.
                Without `runtime` it is a SystemExit with the code 75.
        """
        files = self.run_dir is not None
        with fitting_runtime(runtime, files=files) as job:
            with checking(job.world):
                settings = FitSettings(**{name: getattr(self, name) for name in PARAMETERS})
                training, held_out, factors = self._rows(X, y, sample_weight, eval_set)
                target = self._target_values(training)
                mean = float(training.weight.mean())
                training = _scaled(training, target, mean)
                held_out = None if held_out is None else _scaled(held_out, target, mean)
                features = fit_features(training.columns, self._kinds, target)
            result = fit_table(settings, features, training, held_out, factors, job)
        self._fitted, self.history_ = result.model, result.history
        return self

    def _rows(
        self, X: Any, y: Any, sample_weight: Any, eval_set: Any
    ) -> tuple[TableRows, TableRows | None, np.ndarray | None]:
        """Check the arguments of `fit`, and choose the rows that are held out.

        Returns:
            The rows to train on, those held out, and the factors of the classes.
        """
        self._check_parameters(eval_set)
        columns, self._kinds = self._columns(X, fitting=True)
        y = self._checked_target(y, fitting=True)
        check_consistent_length(X, y)
        weight = _weights(sample_weight, y)
        factors = self._class_factors(y)
        used = (weight if factors is None else weight * factors[y]) > 0
        if not used.any():
            raise ValueError("all values of sample_weight are 0: give some rows a weight")
        rows = TableRows(columns=columns, target=y, weight=weight)
        if not used.all():
            rows = _chosen(rows, used)  # a row without weight is as good as none
        held_out = None
        if eval_set is not None:
            held_out = self._evaluated(eval_set)
        elif self.patience:
            classes = rows.target if rows.target.dtype == np.int64 else None
            mask = choose_held_out(len(rows), self.validation_fraction, self.seed, classes)
            if mask.any():
                held_out, rows = _chosen(rows, mask), _chosen(rows, ~mask)
        if factors is not None:  # on average they change no weight
            factors /= (rows.weight * factors[rows.target]).sum() / rows.weight.sum()
        return rows, held_out, factors

    def _check_parameters(self, eval_set: Any) -> None:
        if eval_set is not None and not self.patience:
            raise ValueError("eval_set is given, but patience is 0, so nothing is evaluated")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction!r}: give a number above 0 and "
                "below 1; patience 0 holds nothing out"
            )

    def _columns(
        self, X: Any, *, fitting: bool
    ) -> tuple[dict[str, np.ndarray], dict[str, ColumnKind]]:
        """Read the columns of X. A DataFrame's are found by their names."""
        if isinstance(X, (list, tuple)):
            X = np.asarray(X, object)  # so that numbers beside texts stay numbers
        if is_frame(X):
            if not fitting:
                X = self._in_order(X)
            validate_data(self, X, reset=fitting, skip_check_array=True)
            for least, count in zip((1, 1), X.shape, strict=True):
                if count < least:
                    raise ValueError(f"Found array with 0 sample(s) or feature(s), shape {X.shape}")
        else:
            X = validate_data(self, X, dtype=None, ensure_all_finite=False, reset=fitting)
        named = getattr(self, "feature_names_in_", None)
        names = [f"x{n}" for n in range(X.shape[1])] if named is None else named.tolist()
        if len(set(names)) < len(names):
            raise ValueError("two columns of X have the same name: rename one of them")
        return read_columns(X, names, None if fitting else self._kinds)

    def _in_order(self, X: Any) -> Any:
        """A DataFrame with its columns in the order that they had in `fit`."""
        names = getattr(self, "feature_names_in_", None)
        if names is None or {*X.columns} != {*names} or len(X.columns) != len(names):
            return X  # scikit-learn's checks say what is wrong
        return X[names.tolist()]

    def _class_factors(self, y: np.ndarray) -> np.ndarray | None:
        """What the weight of a row of each class is multiplied by, float64 (C,)."""
        return None

    def _evaluated(self, eval_set: Any) -> TableRows:
        """The rows of eval_set."""
        if isinstance(eval_set, list) and len(eval_set) == 1:
            eval_set = eval_set[0]
        if not isinstance(eval_set, tuple) or len(eval_set) not in (2, 3):
            raise ValueError("eval_set is no tuple of (X, y) or (X, y, sample_weight)")
        X, y, *weight = eval_set
        columns, _ = self._columns(X, fitting=False)
        target = self._checked_target(y, fitting=False)
        check_consistent_length(X, target)
        weights = _weights(weight[0] if weight else None, target)
        return TableRows(columns=columns, target=target, weight=weights)

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        raise NotImplementedError

    def _target_values(self, rows: TableRows) -> TargetValues:
        raise NotImplementedError

    def _predictions(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        columns, _ = self._columns(X, fitting=False)
        return self._fitted.predictions(columns)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        # Texts are taken, too. The tag `string` would also promise that objects of any type are.
        return tags


class Classifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """A neural network that classifies the rows of a table.

    `fit` trains on all ranks of the job, and `predict` computes on each rank alone. In a program
    without a launcher there is one rank. A process gets the same model with any number of ranks,
    but for the order of additions.

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
            frequency; a dict has a factor for each class; None: there are no factors.
        run_dir: folder in which checkpoints and metrics are written. A fit that was stopped or
            killed continues there when it is called again with the same arguments. One that has
            ended is read from there. By default nothing is written, and the fit cannot continue.
        config: values of other keys of the configuration, such as {"model.hidden": 256,
            "precision.dtype": "float64"}; `hpc-train train --help` lists them.
        verbose: whether to print the losses.

    Attributes:
        classes_: the classes, rising.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a DataFrame with texts as names.
        history_: a dict for each recorded step: step and loss, and after a validation
            validation_loss and the scores of the rows that are held out: validation_accuracy,
            validation_balanced_accuracy, validation_auc, validation_log_loss and
            validation_calibration_error. Class weights count in losses and not in scores.
    """

    classes_: np.ndarray

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
        """The class with the largest probability for each row of X, of shape (N,)."""
        probabilities = self._predictions(X)
        found: np.ndarray = self.classes_[probabilities.argmax(1)]
        return found

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each of `classes_` for each row of X: float64 (N, classes)."""
        return self._predictions(X)

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        """The number of each row's class."""
        y = column_or_1d(_of_target(y), warn=True)
        check_classification_targets(y)
        if fitting:
            self.classes_ = np.unique(y)
            if len(self.classes_) < 2:
                raise ValueError(
                    f"y has one class, {self.classes_.tolist()[0]!r}: give two or more classes"
                )
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise ValueError(f"eval_set has the class {y[unknown].tolist()[0]!r}, which y has not")
        numbers: np.ndarray = np.searchsorted(self.classes_, y).astype(np.int64)
        return numbers

    def _class_factors(self, y: np.ndarray) -> np.ndarray | None:
        if self.class_weight is None:
            return None
        factors: np.ndarray = compute_class_weight(
            self.class_weight, classes=self.classes_, y=self.classes_[y]
        )
        return factors

    def _target_values(self, rows: TableRows) -> TargetValues:
        counts = np.bincount(rows.target, minlength=len(self.classes_))
        return TargetValues(
            task="classification",
            names=("y",),
            classes=tuple(map(str, self.classes_.tolist())),
            shares=tuple((counts / len(rows)).tolist()),
        )


class Regressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """A neural network that predicts a number for the rows of a table.

    `fit` trains on all ranks of the job, and `predict` computes on each rank alone; see
    `Classifier`, which has the same arguments but class_weight.

    Attributes:
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns, if X was a DataFrame with texts as names.
        history_: a dict for each recorded step: step and loss, and after a validation
            validation_loss and the scores of the rows that are held out: validation_rmse,
            validation_r2 and validation_mae, in the unit of the target. Losses are squared errors
            in units of the target's variance.
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
        self.run_dir = run_dir
        self.config = config
        self.verbose = verbose

    def predict(self, X: Any) -> np.ndarray:
        """The mean of the target for each row of X: float64 (N,)."""
        return self._predictions(X)

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        """The values of the target."""
        values: np.ndarray = column_or_1d(_of_target(y), warn=True, dtype=np.float64)
        return values

    def _target_values(self, rows: TableRows) -> TargetValues:
        center, scale = float(rows.target.mean()), float(rows.target.std())
        return TargetValues(task="regression", names=("y",), center=center, scale=scale or 1.0)


def _of_target(y: Any) -> np.ndarray:
    """The target as an array without missing values."""
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")
    values: np.ndarray = check_array(y, ensure_2d=False, dtype=None, input_name="y")
    if values.dtype == object and any(value is None for value in values.flat):
        raise ValueError("Input y contains None, a missing value: leave such rows out")
    return values


def _weights(sample_weight: Any, y: np.ndarray) -> np.ndarray:
    """The weight of each row, float64."""
    weights: np.ndarray = _check_sample_weight(
        sample_weight, y, dtype=np.float64, ensure_non_negative=True, copy=True
    )
    return weights


def _scaled(rows: TableRows, target: TargetValues, mean_weight: float) -> TableRows:
    """The rows with the target that a model learns, and weights of mean 1 in training."""
    values = rows.target
    if target.task == "regression":
        values = (values - target.center) / target.scale
    return TableRows(columns=rows.columns, target=values, weight=rows.weight / mean_weight)


def _chosen(rows: TableRows, mask: np.ndarray) -> TableRows:
    columns = {name: values[mask] for name, values in rows.columns.items()}
    return TableRows(columns=columns, target=rows.target[mask], weight=rows.weight[mask])
