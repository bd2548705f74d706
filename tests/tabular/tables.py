"""Small tables and quick estimators."""

from __future__ import annotations

import numpy as np
import pandas as pd

SMALL = {"model.members": 2, "model.hidden": 16, "model.embedding_width": 4}
EXACT = {**SMALL, "precision.dtype": "float64", "run.log_every": 1}


def customers(rows: int = 120, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """A table with columns of several types and missing values, and whether a customer has left."""
    random = np.random.default_rng(seed)
    months = random.integers(1, 60, rows)
    plan = random.choice(["basic", "plus", "family"], rows)
    paid = random.normal(40, 12, rows)
    left = (months < 20) ^ (plan == "family") ^ (random.random(rows) < 0.05)
    paid[random.random(rows) < 0.1] = np.nan
    table = pd.DataFrame(
        {
            "months": months,
            "plan": plan,
            "paid": paid,
            "region": pd.Categorical(random.choice(["north", "south"], rows)),
            "since": pd.Timestamp("2020-01-01")
            + pd.to_timedelta(random.integers(0, 900, rows), "D"),
            "paperless": pd.array(random.choice([True, False, None], rows), "boolean"),
        }
    )
    return table, np.where(left, "left", "stays")


def curve(rows: int = 120, columns: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, and a smooth function of two of them."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(rows, columns))
    return X, 3 + 2 * np.sin(X[:, 0]) + X[:, 1]
