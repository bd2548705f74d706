"""The words of messages."""

from __future__ import annotations

import pytest

from hpc_train.errors import plural


@pytest.mark.parametrize(
    ("count", "nouns", "text"),
    [
        (1, ["row"], "1 row"),
        (0, ["row"], "0 rows"),
        (2, ["micro-batch"], "2 micro-batches"),
        (1, ["step is", "steps are"], "1 step is"),
        (3, ["step is", "steps are"], "3 steps are"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count, nouns, text):
    assert plural(count, *nouns) == text
