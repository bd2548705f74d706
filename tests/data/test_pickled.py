"""Copies of data sets have the values, and no memory, of the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from hpc_train.data.pickled import copy_of, deep_copies_of


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.arange(5000.0)[::2],
        torch.arange(5000.0).view(50, 100).t(),
        torch.ones(3000, dtype=torch.bfloat16),
        torch.full((3000,), 1 + 2j).conj(),
        torch.full((3000,), 1 + 2j).conj().imag,
    ],
    ids=["empty", "strided", "turned", "16 bits", "conjugate", "negative"],
)
def test_a_tensor_is_copied_with_its_values(tensor):
    made = copy_of(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride() or tensor.is_neg()
    if tensor.numel():
        assert made.data_ptr() != tensor.data_ptr()


def test_tensors_of_one_memory_have_one_in_the_copy_too():
    whole = torch.arange(5000.0)
    made = copy_of({"whole": whole, "part": whole[10:], "array": np.ones(5000)})
    made["whole"][10] = -1
    assert made["part"][0] == -1
    assert whole[10] == 10
    made["array"][0] = 2
    made["whole"].resize_(6000)
    whole.resize_(6000)


@pytest.fixture
def mapped(tmp_path):
    whole = np.memmap(tmp_path / "a.bin", "<u2", "w+", offset=6000, shape=(4000,))
    whole[:] = np.arange(4000)
    whole.flush()
    return whole


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_an_array_that_is_mapped_from_a_file_is_mapped_again(mapped, mode):
    whole = np.memmap(mapped.filename, "<u2", mode, offset=6000, shape=(40, 100))
    for array in (whole, whole[3:, ::-2], np.asarray(whole)[5], whole.T):
        made = copy_of([array])[0]
        assert type(made) is type(array)
        np.testing.assert_array_equal(made, array)
        before = int(array.flat[1])
        mapped[before] = 9999  # a change of the file is seen where it is mapped
        assert int(made.flat[1]) == (before if mode == "c" else 9999)
        mapped[before] = before
    made = copy_of(copy_of(whole[2:]))
    np.testing.assert_array_equal(made, whole[2:])


def test_a_mapped_array_whose_file_is_gone_is_copied(mapped):
    Path(mapped.filename).unlink()
    np.testing.assert_array_equal(copy_of(mapped), np.arange(4000))


def test_a_mapped_array_whose_path_leads_to_another_file_is_copied(mapped):
    other = Path(f"{mapped.filename}.new")
    other.write_bytes(bytes(Path(mapped.filename).stat().st_size))
    other.replace(mapped.filename)
    np.testing.assert_array_equal(copy_of(mapped[5:])[:-1], np.arange(5, 3999))


def test_all_views_of_a_file_are_mapped_again_together(mapped):
    whole = np.memmap(mapped.filename, "<u2", "r", offset=6000, shape=(40, 100), order="F")
    views = [whole[n : n + 2] for n in range(38)] + [np.asarray(whole)[:, n] for n in range(100)]
    before = _times_mapped(mapped.filename)
    made = copy_of(views)
    assert _times_mapped(mapped.filename) == before + 1
    for one, view in zip(made, views, strict=True):
        np.testing.assert_array_equal(one, view)


def _times_mapped(path):
    return Path("/proc/self/maps").read_text().count(str(path))


def test_what_is_written_to_a_copy_of_a_mapped_array_stays_there(mapped):
    made = copy_of(mapped)
    made[0] = 7
    assert (made[0], mapped[0]) == (7, 0)


def test_threads_share_mapped_arrays_that_nobody_can_write_to(mapped):
    read = np.memmap(mapped.filename, "<u2", "r")

    class Tokens(torch.utils.data.Dataset):
        def __init__(self):
            self.shards, self.own, self.scratch = [read, {"more": read[10:]}], np.ones(3), mapped

    tokens = Subset(Tokens(), [0])
    one, other = (made.dataset for made in deep_copies_of(tokens, [tokens], 2))
    assert one.shards[0] is other.shards[0] is read
    assert one.shards[1]["more"] is tokens.dataset.shards[1]["more"]
    assert len({id(of) for of in (one, other, tokens.dataset)}) == 3
    assert one.own is not tokens.dataset.own
    one.scratch[0] = 7
    assert other.scratch[0] == mapped[0] == 0
