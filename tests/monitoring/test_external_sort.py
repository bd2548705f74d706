"""The external sort: as a sort in memory, whatever the limit, on any ranks, and its failures."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train import files
from hpc_train.errors import DataError, HpcTrainError
from hpc_train.monitoring import external_sort
from hpc_train.monitoring.external_sort import ExternalSort, merged
from hpc_train.mpi.group import Group

ROWS, COLUMNS = 700, 3
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few rows are many blocks."""
    monkeypatch.setattr(external_sort, "BLOCK", 16)
    monkeypatch.setattr(external_sort, "LEAST_BLOCK", 4)


def made(rows=ROWS):
    """Rows with many equal real parts."""
    generator = np.random.default_rng(1)
    return generator.integers(0, 30, (rows, COLUMNS)) + 1j * generator.normal(size=(rows, COLUMNS))


def filled(group, rows, kept):
    """A sort that has this rank's share of rows."""
    found = ExternalSort(COLUMNS, kept)
    mine = rows[group.rank :: group.size]
    for begin in range(0, len(mine), 50):
        found.add(mine[begin : begin + 50])
    return found


def in_order(group, rows, kept):
    """The columns as rank 0 gets them."""
    columns = [[] for _ in range(COLUMNS)]
    one = filled(group, rows, kept)
    one.to_first(group, [column.extend for column in columns])
    one.close()
    return columns


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kept", [1, 100, 10_000])
def test_rank_0_gets_all_rows_in_order(group, kept):
    rows = made(40 if kept == 1 else ROWS)
    found = in_order(group, rows, kept)
    if group.rank == 0:
        assert (np.array(found) == np.sort(rows.T)).all()
    else:
        assert found == [[]] * COLUMNS


@pytest.mark.ranks(4)
def test_a_rank_may_have_no_rows(group):
    rows = made(2)
    found = in_order(group, rows, 100)
    if group.rank == 0:
        assert (np.array(found) == np.sort(rows.T)).all()


streams = st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1)), max_size=5)


@given(streams)
def test_merged_blocks_have_all_numbers_in_order(streams):
    cut = []
    for blocks in streams:
        ordered = np.sort(np.array([one for block in blocks for one in block], complex))
        ends = np.cumsum([len(block) for block in blocks])
        cut.append(np.split(ordered, ends[:-1]) if blocks else [])
    found = [*merged([iter(blocks) for blocks in cut])]
    assert all(len(block) for block in found)
    every = [one for blocks in cut for block in blocks for one in block.tolist()]
    assert [one for block in found for one in block.tolist()] == sorted(every, key=abs)


def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len([*DESCRIPTORS.iterdir()])
    one = filled(Group(), made(), 100)
    assert len([*DESCRIPTORS.iterdir()]) == before + 1
    assert not [*tmp_path.iterdir()]  # also if the process is killed now
    one.close()
    assert len([*DESCRIPTORS.iterdir()]) == before


def test_what_fits_in_memory_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert (np.array(in_order(Group(), made(), COLUMNS * ROWS)) == np.sort(made().T)).all()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "write_at", full)
    one = ExternalSort(COLUMNS, 100)
    with pytest.raises(DataError, match=f"{tmp_path} .*No space left.*: set TMPDIR"):
        one.add(made())
    one.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_rank_that_cannot_read_its_file_ends_all_ranks(group, failing, monkeypatch):
    if failing >= group.size:
        return
    one = filled(group, made(), 100)
    calls = []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) > 9:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_into(*arguments)

    read_into = files.read_into
    with monkeypatch.context() as patched:
        if group.rank == failing:
            patched.setattr(files, "read_into", broken)
        with pytest.raises(DataError, match=rf"rank {failing} .* cannot give back .*output error"):
            one.to_first(group, [lambda _: None] * COLUMNS)
    one.close()


@pytest.mark.ranks(1, 4)
def test_a_consumer_that_fails_ends_all_ranks(group):
    def consume(block):
        raise HpcTrainError("it fails", "try again")

    one = filled(group, made(), 100)
    with pytest.raises(HpcTrainError, match="it fails"):
        one.to_first(group, [consume] * COLUMNS)
    one.close()
