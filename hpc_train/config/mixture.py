"""Check a list of folders with weights, which `data.path` may be."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from hpc_train.config.keys import check_key
from hpc_train.errors import ConfigError

FORM = "{path: FOLDER, weight: NUMBER}"  # of an item


def check_mixture(parts: Sequence[Any]) -> None:
    """Check the value of `data.path` if it is a list.

    Raises:
        ConfigError: it is empty, an item is not {path, weight}, a weight is not a number above 0,
            or two items have the same folder.
    """
    if not parts:
        raise ConfigError("data.path is an empty list", f"give a folder, or a list of {FORM}")
    seen: set[str] = set()
    for part in parts:
        if not isinstance(part, dict):
            raise ConfigError(f"data.path has {part!r} in its list", f"write it as {FORM}")
        for key in part:
            check_key(f"data.path.{key}", ("data.path.path", "data.path.weight"))
        path, weight = part.get("path"), part.get("weight", 1)
        if not isinstance(path, str) or not path:
            raise ConfigError(f"data.path has {part!r} in its list", "give its path: a folder")
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"the weight of {path} in data.path is {weight!r}", "give a finite number above 0"
            )
        folder = os.path.realpath(path)
        if folder in seen:
            raise ConfigError(
                f"data.path has {path} twice in its list", "give it once, with a larger weight"
            )
        seen.add(folder)
