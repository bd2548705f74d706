"""Reads a table as a model does that was trained on another table.

A numeric feature that both tables have keeps the statistics with which the model has learnt to read
it: center, scale and edges. So the same value of a column is the same number in both tables.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpc_train.data.tables.features import NumericFeature, TableFeatures


def with_statistics_of(features: TableFeatures, earlier: TableFeatures) -> TableFeatures:
    """The features of a table, the shared numeric ones with the statistics of another table.

    Args:
        features: the features of the table that is read.
        earlier: the features of the table that a model was trained on.
    """
    known = {(one.name, one.part): one for one in earlier.numeric}

    def read(feature: NumericFeature) -> NumericFeature:
        other = known.get((feature.name, feature.part), feature)
        return replace(feature, center=other.center, scale=other.scale, edges=other.edges)

    return replace(features, numeric=tuple(map(read, features.numeric)))


def rescaling(stored: TableFeatures, read: TableFeatures) -> tuple[np.ndarray, np.ndarray] | None:
    """The factors and summands that turn stored numbers into those that a model reads.

    Args:
        stored: the features whose numbers are stored.
        read: the same features with other statistics.

    Returns:
        float64 (number of numeric features) each; None if they change nothing.
    """
    pairs = list(zip(stored.numeric, read.numeric, strict=True))
    factors = np.array([old.scale / new.scale for old, new in pairs])
    summands = np.array([(old.center - new.center) / new.scale for old, new in pairs])
    same = not len(pairs) or ((factors == 1).all() and (summands == 0).all())
    return None if same else (factors, summands)
