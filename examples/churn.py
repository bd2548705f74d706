"""Which customers leave? A classifier of scikit-learn's kind, for a pandas DataFrame.

Run python examples/churn.py, or mpirun -np 4 python examples/churn.py: then all ranks fit together.
The customers are made up. Their table has numbers, texts, dates and missing values.
"""

import sys

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from hpc_train.tabular import Classifier


def customers(rows=2000):
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "contract": random.choice(["monthly", "yearly", "two years"], rows, p=[0.5, 0.3, 0.2]),
            "since": pd.Timestamp("2018-01-01")
            + pd.to_timedelta(random.integers(0, 2000, rows), "D"),
            "price": random.normal(50, 15, rows).round(2),
            "calls": random.poisson(1.5, rows),
            "paperless": random.choice([True, False], rows),
        }
    )
    risk = table["price"] / 15 + table["calls"] - 3.0 * (table["contract"] != "monthly")
    risk -= (pd.Timestamp("2024-01-01") - table["since"]).dt.days / 500
    left = risk + random.logistic(0, 0.5, rows) > 1.5
    table.loc[random.random(rows) < 0.1, "price"] = np.nan
    table.loc[random.random(rows) < 0.05, "contract"] = None
    return table, np.where(left, "left", "stayed")


table, outcome = customers()
training, held_out, outcomes, expected = train_test_split(table, outcome, random_state=0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
model = Classifier(steps=steps).fit(training, outcomes)
chance = model.predict_proba(held_out)[:, model.classes_.tolist().index("left")]
print(f"accuracy: {model.score(held_out, expected):.3f}")
print(f"area under the ROC curve: {roc_auc_score(expected == 'left', chance):.3f}")
