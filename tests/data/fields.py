"""Files of others, as the tests of `Arrays` write them."""

from __future__ import annotations

import json

import h5py
import numpy as np

from hpc_train.data.arrays import hdf5_index, indexing

ROWS = 32


def field(path, seed=0):
    """Write the same field twice, contiguous and in compressed chunks; returns it."""
    values = np.random.default_rng(seed).standard_normal((ROWS, 5, 7)).astype("<f4")
    with h5py.File(path, "w") as file:
        file["contiguous"] = values
        file.create_dataset(
            "chunked", data=values, chunks=(3, 5, 4), compression=1, shuffle=True, fletcher32=True
        )
    return values


def answers_here(monkeypatch):
    """Let this process look into files. Files that are damaged could end it."""

    def ask(paths, names):
        for path in paths:
            tree = json.loads(json.dumps(hdf5_index.answer(str(path), names)))
            if "error" in tree:
                raise indexing.DataError(f"{path}: {tree['error']}")
            yield path.stat(), tree["variables"]

    monkeypatch.setattr(indexing, "ask_helper", ask)
