"""What the estimators of tables share: the arguments of `fit`, and the rows that it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from hpc_train.data.tables.far_values import FarValues
from hpc_train.data.tables.features import TargetValues
from hpc_train.data.tables.fit import fit_features
from hpc_train.data.tables.schema import ColumnKind
from hpc_train.mpi.runtime import Runtime
from hpc_train.tabular.columns import check_even, is_frame, read_columns
from hpc_train.tabular.fitted import FittedTable
from hpc_train.tabular.fitting import TableRows, fit_table
from hpc_train.tabular.held_out import choose_held_out
from hpc_train.tabular.session import checking, fitting_runtime, heed_errors
from hpc_train.tabular.settings import FitSettings

MOST_WEIGHT = 1e100  # whose product with others, and sums, are finite
PARAMETERS = tuple(FitSettings.__dataclass_fields__)


class TableEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What `Classifier` and `Regressor` share."""

    patience: int
    validation_fraction: float
    seed: int
    run_dir: str | Path | None
    quantiles: tuple[float, ...] = ()
    n_features_in_: int
    feature_names_in_: np.ndarray
    history_: list[dict[str, float]]
    _labels: list[Any] | None = None  # of the columns, if `fit` got a DataFrame
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
            y: classes or values, of shape (N,); or labels, 0 and 1 of shape (N, labels).
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
        with _unchanged_by_errors(self), fitting_runtime(runtime, files=files) as job:
            with checking(job.world):
                settings = FitSettings(**{name: getattr(self, name) for name in PARAMETERS})
                settings.check()
                training, held_out, factors = self._rows(X, y, sample_weight, eval_set)
                target = self._target_values(training)
                mean = float(training.weight.mean())
                training = _scaled(training, target, mean)
                held_out = None if held_out is None else _scaled(held_out, target, mean)
                far = FarValues()
                features = fit_features(training.columns, self._kinds, target, far)
            if job.world.rank == 0:
                far.warn()
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
            raise ValueError("no row has a weight above 0: change class_weight or sample_weight")
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
        share = self.validation_fraction
        if not isinstance(share, Real) or not 0 < share < 1:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction!r}: give a number above 0 and "
                "below 1; patience 0 holds nothing out"
            )

    def _columns(
        self, X: Any, *, fitting: bool
    ) -> tuple[dict[str, np.ndarray], dict[str, ColumnKind]]:
        """Read the columns of X. A DataFrame's are found by their names."""
        check_even(X, "X")
        if isinstance(X, (list, tuple)):
            X = np.asarray(X, object)  # so that numbers beside texts stay numbers
        if fitting:
            self._labels = [*X.columns] if is_frame(X) else None
        if is_frame(X):
            if not X.columns.is_unique:
                name = X.columns[X.columns.duplicated()][0]
                raise ValueError(f"two columns of X have the name {name!r}: rename one of them")
            X = self._in_order(X)
            validate_data(self, X, reset=fitting, skip_check_array=True)
            for least, count in zip((1, 1), X.shape, strict=True):
                if count < least:
                    raise ValueError(f"Found array with 0 sample(s) or feature(s), shape {X.shape}")
        else:
            X = validate_data(self, X, dtype=None, ensure_all_finite=False, reset=fitting)
        named = getattr(self, "feature_names_in_", None)
        names = [f"x{n}" for n in range(X.shape[1])] if named is None else named.tolist()
        return read_columns(X, names, None if fitting else self._kinds)

    def _in_order(self, X: Any) -> Any:
        """A DataFrame with its columns in the order that they had in the DataFrame of `fit`."""
        if self._labels is None:
            return X
        places = {label: place for place, label in enumerate(X.columns)}
        if places.keys() == {*self._labels}:
            return X.iloc[:, [places[label] for label in self._labels]]
        if all(isinstance(label, str) for label in (*self._labels, *places)):
            return X  # scikit-learn's checks say what is wrong
        fewer = [label for label in self._labels if label not in places]
        more = [label for label in places if label not in self._labels]
        lacks, has = ("X", "fit") if fewer else ("fit", "X")
        raise ValueError(
            f"{lacks} had no column {[*fewer, *more][0]!r}, but {has} had it: name the columns as "
            "in fit, or give arrays, whose columns are known by their places"
        )

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
        try:
            columns, _ = self._columns(X, fitting=False)
            target = self._checked_target(y, fitting=False)
            check_consistent_length(X, target)
            weights = _weights(weight[0] if weight else None, target)
        except (ValueError, TypeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"eval_set: {error}") from error
        return TableRows(columns=columns, target=target, weight=weights)

    def _checked_target(self, y: Any, *, fitting: bool) -> np.ndarray:
        raise NotImplementedError

    def _target_values(self, rows: TableRows) -> TargetValues:
        raise NotImplementedError

    def _predictions(self, X: Any) -> np.ndarray:
        heed_errors()
        check_is_fitted(self)
        columns, _ = self._columns(X, fitting=False)
        return self._fitted.predictions(columns)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        # Texts are taken, too. The tag `string` would also promise that objects of any type are.
        return tags


@contextmanager
def _unchanged_by_errors(estimator: object) -> Iterator[None]:
    """Undo what a block has set in an estimator if it fails, so that an earlier fit stays whole."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def _weights(sample_weight: Any, y: np.ndarray) -> np.ndarray:
    """The weight of each row, float64."""
    try:
        np.asarray([] if sample_weight is None else sample_weight, np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sample_weight has a value that is no number: {error}") from error
    weights: np.ndarray = _check_sample_weight(
        sample_weight, y, dtype=np.float64, ensure_non_negative=True, copy=True
    )
    if weights.max() > MOST_WEIGHT:
        raise ValueError(f"sample_weight has the value {weights.max():g}: divide all weights")
    if not weights.any():
        raise ValueError("all values of sample_weight are 0: give some rows a weight")
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
