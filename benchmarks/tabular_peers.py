"""Candidates of benchmarks/tabular.py: ours and its peers, each with the space of its search.

Each gets a table in the form in which its users would give it. Gradient boosting and ours read the
categories themselves. The others get them one-hot, and all but the forest get scaled numbers. The
MLP of a regression learns the scaled target, as it hardly learns another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from scipy.stats import loguniform, randint, uniform
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import ParameterSampler
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.tables_data import Table

Settings = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A way to learn from a table.

    Args:
        make: makes an estimator for a table from a seed and settings.
        space: the settings that the random search draws, as scikit-learn's ParameterSampler takes
            them.
        module: what is imported.
        neural: whether it is a neural network.
        more_defaults: gives the defaults that are no parameters of the estimator.
    """

    make: Callable[[Table, int, Settings], Any]
    space: Mapping[str, Any]
    module: str = "sklearn"
    neural: bool = False
    more_defaults: Callable[[], str] = str

    @property
    def present(self) -> bool:
        """Whether it can be imported."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def trials(self, count: int, seed: int) -> list[Settings]:
        """The settings of a random search: the defaults, and count - 1 drawn ones."""
        drawn = ParameterSampler(self.space, count - 1, random_state=seed)
        return [{}, *({key: plain(value) for key, value in one.items()} for one in drawn)]

    def identity(self, table: Table, tuned: bool) -> str:
        """A short hash that changes with the version, the defaults, the space, and the table."""
        version = str(import_module(self.module.partition(".")[0]).__version__)
        parameters = repr(self.make(table, 0, {}).get_params())
        parts = [version, parameters, self.more_defaults(), table.digest]
        if tuned:
            parts += [f"{key} {words(value)}" for key, value in sorted(self.space.items())]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def plain(value: Any) -> Any:
    """A drawn value as JSON takes it."""
    return value.item() if isinstance(value, np.generic) else value


def words(space: Any) -> str:
    """The space of a setting in words."""
    if isinstance(space, list):
        return repr(space)
    return f"{space.dist.name}{space.args}"


def one_hot(table: Table, *, scaled: bool = True) -> Any:
    """Numbers as they are or scaled to variance 1, and one column for each category."""
    numbers = StandardScaler() if scaled else "passthrough"
    categories = OneHotEncoder(handle_unknown="ignore")
    return make_column_transformer((numbers, table.numeric), (categories, table.categorical))


def ours(table: Table, seed: int, settings: Settings) -> Any:
    """The estimator of hpc_train, which takes categories from the columns' types.

    Settings with a dot in their name are keys of its argument `config`.

    Raises:
        RuntimeError: this version of hpc_train has none.
    """
    try:
        from hpc_train.tabular import Classifier, Regressor
    except ImportError as error:
        raise RuntimeError(f"hpc_train.tabular cannot be imported: {error}") from error
    config = {key: value for key, value in settings.items() if "." in key}
    others = {key: value for key, value in settings.items() if "." not in key}
    kind = Classifier if table.classes else Regressor
    return kind(seed=seed, config=config or None, **others)


def defaults_of_ours() -> str:
    """The defaults of hpc_train that are no arguments of its estimators, and that decide a fit."""
    from hpc_train.config.file import load

    kinds = ("tabular", "tabular_mlp", "tabular_resnet")
    given = [load(options=[f"--model.kind={kind}"]) for kind in kinds]
    return repr([(one.model, one.optimizer, one.data, one.precision) for one in given])


def boosting(table: Table, seed: int, settings: Settings) -> Any:
    """HistGradientBoosting, which takes categories from the columns' types."""
    kind = HistGradientBoostingClassifier if table.classes else HistGradientBoostingRegressor
    return kind(random_state=seed, **settings)


def forest(table: Table, seed: int, settings: Settings) -> Any:
    """A random forest."""
    kind = RandomForestClassifier if table.classes else RandomForestRegressor
    return make_pipeline(
        one_hot(table, scaled=False), kind(random_state=seed, n_jobs=1, **settings)
    )


def linear(table: Table, seed: int, settings: Settings) -> Any:
    """Logistic or ridge regression. The strength of both is given as that of ridge, `alpha`."""
    if not table.classes:
        return make_pipeline(one_hot(table), Ridge(random_state=seed, **settings))
    strength = {"C": 1 / settings["alpha"]} if settings else {}
    return make_pipeline(one_hot(table), LogisticRegression(random_state=seed, **strength))


def mlp(table: Table, seed: int, settings: Settings) -> Any:
    """scikit-learn's multilayer perceptron."""
    if table.classes:
        return make_pipeline(one_hot(table), MLPClassifier(random_state=seed, **settings))
    inner = MLPRegressor(random_state=seed, **settings)
    target = TransformedTargetRegressor(inner, transformer=StandardScaler())
    return make_pipeline(one_hot(table), target)


def xgboost(table: Table, seed: int, settings: Settings) -> Any:
    """XGBoost with its own handling of categories."""
    from xgboost import XGBClassifier, XGBRegressor

    kind = XGBClassifier if table.classes else XGBRegressor
    return kind(enable_categorical=True, n_jobs=1, random_state=seed, **settings)


def lightgbm(table: Table, seed: int, settings: Settings) -> Any:
    """LightGBM, which takes categories from the columns' types."""
    from lightgbm import LGBMClassifier, LGBMRegressor

    kind = LGBMClassifier if table.classes else LGBMRegressor
    return kind(n_jobs=1, random_state=seed, verbose=-1, **settings)


OURS = "ours"
CANDIDATES: dict[str, Candidate] = {
    OURS: Candidate(
        ours,
        {
            "lr": loguniform(3e-4, 1e-2),
            "optimizer.weight_decay": loguniform(1e-4, 1),
            "model.dropout": uniform(0, 0.5),
            "model.layers": randint(1, 3),
            "model.hidden": [64, 128, 192],
            "model.embedding_width": [8, 16, 24],
            "model.numeric": ["piecewise_linear", "periodic", "linear"],
        },
        module="hpc_train.tabular",
        neural=True,
        more_defaults=defaults_of_ours,
    ),
    "HistGradientBoosting": Candidate(
        boosting,
        {
            "learning_rate": loguniform(0.01, 0.5),
            "max_iter": randint(50, 501),
            "max_leaf_nodes": randint(4, 65),
            "min_samples_leaf": randint(2, 61),
            "l2_regularization": loguniform(1e-6, 10),
            "max_features": uniform(0.3, 0.7),
        },
    ),
    "RandomForest": Candidate(
        forest,
        {
            "max_features": uniform(0.1, 0.9),
            "min_samples_leaf": randint(1, 21),
            "max_depth": [None, 4, 8, 16],
            "n_estimators": randint(50, 401),
        },
    ),
    "linear": Candidate(linear, {"alpha": loguniform(1e-3, 1e4)}),
    "MLP": Candidate(
        mlp,
        {
            "hidden_layer_sizes": [[64], [128], [256], [64, 64], [128, 128], [256, 256]],
            "alpha": loguniform(1e-6, 10),
            "learning_rate_init": loguniform(1e-4, 1e-2),
            "batch_size": [32, 64, 128],
            "early_stopping": [False, True],
        },
        neural=True,
    ),
    "XGBoost": Candidate(
        xgboost,
        {
            "learning_rate": loguniform(0.01, 0.5),
            "n_estimators": randint(50, 501),
            "max_depth": randint(2, 11),
            "min_child_weight": loguniform(0.5, 50),
            "subsample": uniform(0.5, 0.5),
            "colsample_bytree": uniform(0.5, 0.5),
            "reg_lambda": loguniform(1e-3, 10),
        },
        module="xgboost",
    ),
    "LightGBM": Candidate(
        lightgbm,
        {
            "learning_rate": loguniform(0.01, 0.5),
            "n_estimators": randint(50, 501),
            "num_leaves": randint(4, 65),
            "min_child_samples": randint(2, 61),
            "subsample": uniform(0.5, 0.5),
            "subsample_freq": [1],
            "colsample_bytree": uniform(0.5, 0.5),
            "reg_lambda": loguniform(1e-6, 10),
        },
        module="lightgbm",
    ),
}
