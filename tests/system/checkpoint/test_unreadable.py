"""A checkpoint that cannot be read is not one that is damaged."""

from __future__ import annotations

import errno
import os

import pytest

from hpc_train import files
from hpc_train.checkpoint import inspection, reading
from hpc_train.checkpoint.catalogue import find_checkpoints
from hpc_train.errors import CheckpointError, CheckpointUnreadable
from hpc_train.mpi.group import Group
from tests.checkpoint.states import found, save, store

pytestmark = pytest.mark.usefixtures("small_extents")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With two checkpoints."""
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.0))
    made = store(tmp_path / "run", Group())
    for step in (1, 2):
        save(made, step)
    return tmp_path / "run"


def failing(monkeypatch, number: int, times: int) -> list[int]:
    """Let so many reads fail with an error; returns the descriptors that were read from."""
    seen: list[int] = []

    def call(name, function, *arguments):
        if name == "read":
            seen.append(arguments[0])
            if len(seen) <= times:
                raise OSError(number, os.strerror(number))
        return function(*arguments)

    monkeypatch.setattr(files, "call", call)
    return seen


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT])
def test_an_error_that_passes_costs_no_step(folder, monkeypatch, number):
    failing(monkeypatch, number, times=2)
    assert found(folder, Group()) == 2


def test_each_attempt_opens_the_file_anew(folder, monkeypatch):
    opened = []

    def call(name, function, *arguments):
        if name == "open":
            opened.append(arguments[0])
            if len(opened) == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
        if name == "read" and len(opened) == 2:
            raise OSError(errno.ESTALE, "Stale file handle")
        return function(*arguments)

    monkeypatch.setattr(files, "call", call)
    assert found(folder, Group()) == 2
    newest = find_checkpoints(folder, "auto")[0]
    assert opened[:3] == [newest] * 3


def test_an_error_that_stays_ends_the_run_and_touches_nothing(folder, monkeypatch):
    newest, before = find_checkpoints(folder, "auto")[0], sorted(folder.iterdir())
    with monkeypatch.context() as patch:
        failing(patch, errno.ESTALE, times=1000)
        with pytest.raises(CheckpointUnreadable, match=str(newest)) as told:
            store(folder, Group()).resume()
    assert os.strerror(errno.ESTALE) in str(told.value)
    assert "damaged: use an older one" not in str(told.value)
    assert sorted(folder.iterdir()) == before


def test_a_file_without_permission_is_not_passed_over(folder, monkeypatch):
    def call(name, function, *arguments):
        if name == "open":
            raise OSError(errno.EACCES, "Permission denied")
        return function(*arguments)

    monkeypatch.setattr(files, "call", call)
    with pytest.raises(CheckpointUnreadable, match="Permission denied"):
        store(folder, Group()).resume()


def test_what_is_proven_to_be_damaged_is_passed_over(folder):
    newest = find_checkpoints(folder, "auto")[0]
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 1)
    assert found(folder, Group()) == 1


def test_verify_does_not_call_it_damaged(folder, monkeypatch):
    newest = find_checkpoints(folder, "auto")[0]
    real = inspection.CheckpointReader.open(newest)
    monkeypatch.setattr(inspection.CheckpointReader, "open", lambda _: real)
    failing(monkeypatch, errno.EIO, times=1000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(inspection.damaged(newest))
