"""HDF5 shards, sample order and the loader. The rank and their number are passed as integers.

`Arrays` is a data set of other people's HDF5 and NetCDF-4 files. Importing this package loads no
torch; its names do so when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.data.array_statistics import ArrayStatistics as ArrayStatistics
    from hpc_train.data.arrays import Arrays as Arrays
    from hpc_train.data.arrays import Tile as Tile
    from hpc_train.data.arrays import Window as Window

__all__ = ["ArrayStatistics", "Arrays", "Tile", "Window"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "array_statistics" if name == "ArrayStatistics" else "arrays"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
