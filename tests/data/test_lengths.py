"""Numbers of items that users' functions count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_train.data.lengths import items_in
from hpc_train.errors import UserError


@pytest.mark.parametrize(
    "found",
    [
        3,
        np.uint8(255),
        torch.tensor([7]),
        np.ones((1, 1), np.int32),
        torch.tensor(256, dtype=torch.bfloat16) - 1,
        torch.ones(3).sum(),
        2.0,
        0,
    ],
    ids=repr,
)
def test_whole_numbers_of_any_kind_are_taken(found):
    assert items_in([], lambda batch: found) == found


@pytest.mark.parametrize(
    "found",
    [
        2.7,
        torch.tensor(0.3),
        -1,
        torch.tensor([1, 2]),
        float("nan"),
        float("inf"),
        torch.tensor(2.0**24),  # so would be the sum of one more
        torch.tensor(256, dtype=torch.bfloat16),
        None,
        "3",
    ],
    ids=repr,
)
def test_what_is_no_number_of_items_is_refused(found):
    with pytest.raises(UserError, match="`counted` returned .*: let it return the number of items"):
        items_in([], lambda batch: found)
