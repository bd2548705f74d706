"""Fingerprints of data sets: which two are told apart, and which are not."""

from __future__ import annotations

import json
import shutil
import threading

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.data import Arrays, Mixture, TokenDataset
from hpc_train.data.fingerprint import alike, fingerprint
from hpc_train.data.leaves import leaves
from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.reader import Reader
from tests.data.fields import answers_here


def look(dataset, **how):
    found = fingerprint(Reader(dataset), **how)
    return json.loads(json.dumps(found, allow_nan=False))  # as a checkpoint has it


def numbers(seed, kind=torch.float64):
    drawn = torch.randn(40, 3, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset((drawn * 1e-9).to(kind))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (numbers(1), numbers(2)),
        (numbers(1, torch.bfloat16), numbers(2, torch.bfloat16)),
        ([{"text": "a"}] * 5, [{"text": "b"}] * 5),
        ([(1, 2.5)] * 5, [(1, 2.75)] * 5),
        ([np.arange(4)] * 5, [np.arange(4).reshape(2, 2)] * 5),
        ([np.zeros(4)] * 5, [np.ones(4)] * 5),
        ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 7]]),
    ],
    ids=["floats", "bfloat16", "texts", "numbers", "shapes", "zeros", "lists"],
)
def test_other_samples_are_told_apart(one, other):
    assert alike(look(one), look(one))
    assert not alike(look(one), look(other))


def test_samples_that_another_processor_computes_are_alike():
    (drawn,) = numbers(1).tensors
    assert alike(look(TensorDataset(drawn)), look(TensorDataset(drawn * (1 + 1e-6))))


@pytest.mark.parametrize("mixed", [False, True])
def test_prepared_texts_are_told_apart_without_a_look_at_their_samples(text_data, tmp_path, mixed):
    def opened(folder, **how):
        one = TokenDataset.open(folder, **{"sequence": 8, **how})
        return look(Mixture([(one, 1), (one, 2)]) if mixed else one)

    copy = shutil.copytree(text_data, tmp_path / "copy")
    for shard in copy.rglob("*.h5"):
        shard.write_bytes(b"")
    assert alike(opened(text_data), opened(copy))
    (tmp_path / "others.txt").write_text("other words" * 9, encoding="utf-8")
    prepare_text([tmp_path / "others.txt"], tmp_path / "others")
    assert not alike(opened(text_data), opened(tmp_path / "others"))
    assert not alike(opened(text_data), opened(text_data, sequence=9))


def test_arrays_are_told_apart(tmp_path, monkeypatch):
    answers_here(monkeypatch)

    def opened(name, first):
        with h5py.File(tmp_path / name, "w") as file:
            file["x"] = np.arange(first, first + 12.0).reshape(6, 2)
        return look(Arrays(tmp_path / name, "x"))

    assert alike(opened("a.h5", 0), opened("b.h5", 0))
    assert not alike(opened("a.h5", 0), opened("c.h5", 1))


class Odd:
    """Its samples draw numbers, hold things of unknown types, or cannot be read."""

    def __init__(self, size, seed=None):
        self.size, self.rng = size, np.random.default_rng(seed)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.size // 2:
            raise OSError("gone")
        return {"drawn": self.rng.random(3), "unknown": object(), "nan": float("nan")}


@pytest.mark.parametrize("size", [0, 1, 2, 9])
def test_drawn_numbers_are_seeded_and_what_cannot_be_read_is_left_out(size):
    found = look(Odd(size))
    assert len(found) == min(size, 3)
    assert found == look(Odd(size))


class OpensLate:
    """As data sets of HDF5 files do, it opens something in its first sample."""

    lock = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.lock = self.lock or threading.Lock()
        return index


def test_a_data_set_that_workers_will_be_sent_is_not_touched():
    dataset = OpensLate()
    assert look(dataset, copied=True) == look(OpensLate())
    assert dataset.lock is None


def test_leaves_of_mappings_and_images():
    image = type("Image", (), {"__array_interface__": np.eye(2).__array_interface__})
    assert leaves([{"a": (1, None)}, "b"]) == [1, None, "b"]
    assert not alike(look([image()] * 2), look([object()] * 2))
