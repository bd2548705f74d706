"""Fingerprints of data sets, which tell two data sets of one size apart.

They are made of a few samples, or of the hash that a prepared text has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import TensorDataset

from hpc_train.data.leaves import leaves
from hpc_train.data.methods import fetch_of
from hpc_train.data.mixture import datasets_in
from hpc_train.data.order import number_of_samples
from hpc_train.data.pickled import copy_of
from hpc_train.data.reader import Reader
from hpc_train.data.shards import TokenDataset
from hpc_train.seeds import mix

LOOK_STREAM = 5  # part of the samples' seeds
PIECES = 8  # number of pieces of a floating-point tensor whose means are compared
CLOSE = 1e-3  # largest difference of equal samples, which two kinds of processor may compute
VALUES_AT_ONCE = 1 << 20  # number of values that are converted at once
OF_NUMPY = (torch.float16, torch.float32, torch.float64)  # the floating-point types that it has

Fingerprint = list[list[Any] | None]
"""For each sample a hash and some numbers, as plain JSON values; None: it cannot be read."""


def fingerprint(reader: Reader, *, copied: bool = False) -> Fingerprint:
    """The fingerprint of a reader's data set: of its first, its middle and its last sample.

    Random numbers that the data set draws are seeded for each sample. A sample that cannot be read
    is left out: training ends with an error once it needs that sample. Of a `TokenDataset` no
    sample is read: its identity is the fingerprint.

    Args:
        reader: reads the data set.
        copied: whether to read from a copy, made by pickle, because workers will be sent the data
            set. It may open files in its first sample, and cannot be sent after that.

    Returns:
        The fingerprint. It is empty for data sets that only runs of this package have.
    """
    every = datasets_in(reader.dataset)
    if all(type(one) is TokenDataset for one in every):
        return [[one.identity, []] for one in every]
    if all(map(_is_compared_elsewhere, every)):
        return []
    with suppress(Exception):  # whatever somebody's data set raises
        last = number_of_samples(reader.dataset) - 1
        dataset = copy_of(reader.dataset) if copied else reader.dataset
        whole = fetch_of(dataset) is not None or type(dataset) is TensorDataset
        samples = Reader(dataset, reader.lock, None if whole else _as_they_are)
        return [_of_sample(samples, number) for number in sorted({0, last // 2, last}) if last >= 0]
    return []


def alike(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints may be of the same data set."""
    pairs = zip(one, other, strict=False)
    return all(None in (a, b) or _is_close(a, b) for a, b in pairs)


def _is_compared_elsewhere(dataset: Any) -> bool:
    """Whether only runs of this package have such a data set. They compare hashes of their own."""
    module = type(dataset).__module__
    return module.startswith("hpc_train.") and not module.startswith("hpc_train.data.arrays.")


def _is_close(a: Any, b: Any) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and np.allclose(a[1], b[1], rtol=0, atol=CLOSE)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _of_sample(reader: Reader, number: int) -> list[Any] | None:
    try:
        sample = reader.read([number], lambda _: mix(LOOK_STREAM, number))
    except Exception:  # noqa: BLE001  # whatever somebody's data set raises
        return None
    exact, numbers = xxhash.xxh3_64(), list[float]()
    for leaf in leaves(sample):
        with suppress(Exception):  # somebody's types, or tensors of special layouts
            for part in _parts(leaf):
                if isinstance(part, bytes):
                    exact.update(part)
                else:
                    numbers += part
    return [exact.hexdigest(), numbers]


def _parts(leaf: Any) -> Iterator[bytes | list[float]]:
    """What tells a leaf from others: bytes that are equal, or numbers that are close."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu()
        other = leaf.is_floating_point() and leaf.dtype not in OF_NUMPY
        leaf = (leaf.float() if other else leaf).numpy()
    if isinstance(leaf, float | complex) or hasattr(leaf, "__array_interface__"):
        array = np.asarray(leaf)  # an image of PIL, too
        yield repr(array.shape).encode()
        if np.iscomplexobj(array):
            array = np.stack([array.real, array.imag])
        if np.issubdtype(array.dtype, np.floating):
            yield _numbers(array.ravel())
        elif not array.dtype.hasobject:
            yield array.tobytes()
    elif leaf is None or isinstance(leaf, int | str | bytes):
        yield repr(leaf).encode(errors="surrogateescape")


def _numbers(values: np.ndarray) -> list[float]:
    """The size of some values, and the means of pieces of them in proportion to it."""
    if not values.size:
        return []
    pieces = np.array_split(values, min(PIECES, values.size))
    sums = np.array([_sums(piece) for piece in pieces])
    size = float(sums[:, 1].sum() / values.size) or 1.0
    means = sums[:, 0] / [len(piece) for piece in pieces]
    return [math.log(size), *(means / size).tolist()]


def _sums(values: np.ndarray) -> tuple[float, float]:
    """The sum of some values, and that of their absolute values. Infinity and NaN count as 0."""
    total = amount = 0.0
    for begin in range(0, len(values), VALUES_AT_ONCE):  # a sample may take much of the memory
        block = values[begin : begin + VALUES_AT_ONCE].astype(np.float64)
        block = np.nan_to_num(block, copy=False, posinf=0.0, neginf=0.0)
        total += float(block.sum())
        amount += float(np.abs(block).sum())
    return total, amount
