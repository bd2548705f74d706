"""HDF5 shards, sample order and the loader. The rank and their number are passed as integers.

`TokenDataset` is a data set of prepared text, `Arrays` one of other people's HDF5 and NetCDF-4
files, and `Mixture` draws from several data sets. Importing this package loads no torch; its names
do so when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.data.arrays.dataset import Arrays as Arrays
    from hpc_train.data.arrays.dataset import Tile as Tile
    from hpc_train.data.arrays.dataset import Window as Window
    from hpc_train.data.arrays.statistics import ArrayStatistics as ArrayStatistics
    from hpc_train.data.mixture import Mixture as Mixture
    from hpc_train.data.shards import TokenDataset as TokenDataset

_HOMES = {
    "ArrayStatistics": "arrays.statistics",
    "Arrays": "arrays.dataset",
    "Mixture": "mixture",
    "Tile": "arrays.dataset",
    "TokenDataset": "shards",
    "Window": "arrays.dataset",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
