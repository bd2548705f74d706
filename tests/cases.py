"""Makes parameters of tests by name. `make test-long` alone runs some of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def cases(values: Mapping[str, Any], *, later: Collection[str]) -> list:
    """The parameters of a test by their names, for `parametrize`.

    Args:
        values: the parameter of each name, or a tuple of all parameters.
        later: the names that `make test-long` alone runs.
    """
    assert set(later) <= set(values), later
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=[pytest.mark.long] if name in later else [],
        )
        for name, value in values.items()
    ]
