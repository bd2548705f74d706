"""Features of tables: values become numbers in the same way, however a column holds them."""

from __future__ import annotations

import numpy as np

from hpc_train.data.tables.features import Categories, category_codes


def test_categories_have_the_codes_of_their_texts():
    column = Categories(np.array([2, -1, 0, 1, 0], np.int32), ("red", "green", "blue"))
    assert column.texts().tolist() == ["blue", None, "red", "green", "red"]
    assert category_codes(column, ("red", "blue")).tolist() == [3, 1, 2, 0, 2]
    assert category_codes(column.texts(), ("red", "blue")).tolist() == [3, 1, 2, 0, 2]
    assert column[column.codes >= 0].texts().tolist() == ["blue", "red", "green", "red"]
