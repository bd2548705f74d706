"""Models of tables for users of scikit-learn: `Classifier` and `Regressor`.

estimators.py  the two estimators: their parameters, targets and predictions
base.py        what they share: the arguments of `fit`, and what scikit-learn asks of them
columns.py     reads the columns of arrays and pandas DataFrames
held_out.py    chooses the rows that early stopping is decided by
settings.py    makes a configuration of an estimator's parameters
fitting.py     trains on the ranks of the job
fitted.py      a model that predicts
session.py     the runtime of programs that fit estimators

Importing this package loads neither torch nor MPI nor scikit-learn.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from hpc_train.errors import SetupError

if TYPE_CHECKING:
    from hpc_train.tabular.estimators import Classifier as Classifier
    from hpc_train.tabular.estimators import Regressor as Regressor

__all__ = ["Classifier", "Regressor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("sklearn") is None:
        raise SetupError(
            f"hpc_train.tabular.{name} needs scikit-learn, which is not installed here",
            "pip install 'hpc_train[tabular]'",
        )
    from hpc_train.tabular import estimators

    return getattr(estimators, name)
