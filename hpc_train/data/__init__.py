"""HDF5 shards, sample order and the loader. The rank and their number are passed as integers.

`Arrays` is a data set of other people's HDF5 and NetCDF-4 files. Importing this package loads no
torch; its names do so when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.data.arrays.dataset import Arrays as Arrays
    from hpc_train.data.arrays.dataset import Tile as Tile
    from hpc_train.data.arrays.dataset import Window as Window
    from hpc_train.data.arrays.statistics import ArrayStatistics as ArrayStatistics

__all__ = ["ArrayStatistics", "Arrays", "Tile", "Window"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "statistics" if name == "ArrayStatistics" else "dataset"
    return getattr(importlib.import_module(f"{__name__}.arrays.{module}"), name)
