from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint import fileformat, restore
from hpc_train.checkpoint.fileformat import format_dtypes
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.checkpoint.restore import CheckpointReader
from hpc_train.checkpoint.routes import owned
from hpc_train.errors import CheckpointError, CheckpointMismatch
from hpc_train.mpi.group import Group
from tests.checkpoint.states import save_tensors

ALONE = Group()


@pytest.fixture(autouse=True)
def small_extents(monkeypatch):
    """Extents of 1 KiB, so that small states have many."""
    monkeypatch.setattr(fileformat, "EXTENT_BYTES", 1024)


def held(tensors):
    return {name: fileformat.LocalTensor.whole(tensor) for name, tensor in tensors.items()}


@st.composite
def tensors(draw):
    """Named tensors of all types and many shapes, empty and scalar ones among them."""
    made = {}
    for name in draw(st.sets(st.text("abc.0", min_size=1, max_size=6), max_size=6)):
        dtype = draw(st.sampled_from(list(format_dtypes())))
        shape = draw(st.lists(st.integers(0, 20), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        made[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return made


@settings(max_examples=50)
@given(tensors(), st.binary(min_size=1, max_size=3000))
def test_saved_tensors_are_read_back_also_by_safetensors(tmp_path_factory, named, state):
    path = tmp_path_factory.mktemp("c") / "c.safetensors"
    save_tensors(path, held(named), b'{"x":"' + state.hex().encode() + b'"}', ALONE)
    reader = CheckpointReader.open(path)
    empty = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    restore.load_tensors(reader, held(empty), ALONE)
    assert restore.load_state(reader, ALONE) == {"x": state.hex()}
    theirs = safetensors.torch.load_file(path)
    for name, tensor in named.items():
        assert reader.entries[name].shape == tuple(tensor.shape)
        for other in (empty[name], theirs[name]):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(as_bytes(other), as_bytes(tensor))
    assert set(theirs) == {*named, fileformat.STATE, fileformat.HASHES}


@given(st.integers(0, 200), st.integers(1, 20))
def test_every_extent_has_one_writer(extents, ranks):
    runs = [owned(extents, rank, ranks) for rank in range(ranks)]
    assert [number for run in runs for number in run] == list(range(extents))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "c.safetensors"
    named = {"a": torch.arange(900.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    save_tensors(path, held(named), b'{"step": 1}', ALONE)
    return path, named


def opened_and_loaded(path, named):
    reader = CheckpointReader.open(path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    restore.load_tensors(reader, held(loaded), ALONE)
    assert restore.load_state(reader, ALONE) == {"step": 1}
    return loaded


def test_every_flipped_bit_is_noticed(saved):
    path, named = saved
    sound = path.read_bytes()
    start = int.from_bytes(sound[:8], "little") + 8
    text = len(sound[8:start].rstrip())
    places = [*range(0, 8 + text, 7), start - 5, *range(start, len(sound), 11)]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"c.safetensors"):
            opened_and_loaded(path, named)
    path.write_bytes(sound)
    assert torch.equal(opened_and_loaded(path, named)["a"], named["a"])


@pytest.mark.parametrize("size", [0, 7, 8, 1000, 1 << 20, (1 << 20) + 100, -1])
def test_a_truncated_file_is_noticed(saved, size):
    path, named = saved
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointError):
        opened_and_loaded(path, named)


def test_bytes_behind_the_end_are_noticed(saved):
    path, named = saved
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError):
        opened_and_loaded(path, named)


def test_a_file_without_its_commit_record_is_refused_by_us_and_by_safetensors(saved):
    path, _ = saved
    with path.open("r+b") as file:
        file.write(bytes(8))
    with pytest.raises(CheckpointError, match="was never completed"):
        CheckpointReader.open(path)
    with pytest.raises(Exception, match="[Hh]eader"):
        safetensors.torch.load_file(path)


def test_a_safetensors_file_of_others_is_not_taken_for_ours(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "theirs")
    with pytest.raises(CheckpointMismatch, match="theirs: it has tensors alone"):
        CheckpointReader.open(tmp_path / "theirs")


def test_a_type_that_has_no_name_in_the_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"x has dtype torch.bits8"):
        save_tensors(
            tmp_path / "c",
            held({"x": torch.zeros(1, dtype=torch.uint8).view(torch.bits8)}),
            b"{}",
            ALONE,
        )
    assert list(tmp_path.iterdir()) == []


VERSION_1 = Path(__file__).parent / "fixtures" / "version-1.safetensors"


def of_version_1():
    """What is in the file of the fixtures."""
    named = {
        "model.weight": torch.arange(600.0).view(30, 20),
        "model.flags": torch.arange(9) % 2 == 0,
        "model.half": (torch.arange(33.0) / 16 - 1).bfloat16(),
        "optim.weight.exp_avg": torch.arange(600.0, dtype=torch.float64).view(30, 20) / 512,
        "optim.weight.step": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    return named, b'{"step":7}'


def test_files_of_version_1_open():
    named, _ = of_version_1()
    saved = restore.Tensors(VERSION_1)
    assert set(saved.names) == named.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in named.items())
    assert saved.state() == {"step": 7}


def test_the_same_state_still_gives_the_same_bytes(tmp_path):
    named, state = of_version_1()
    save_tensors(tmp_path / "c.safetensors", held(named), state, ALONE)
    assert (tmp_path / "c.safetensors").read_bytes() == VERSION_1.read_bytes()
