"""Which checkpoints a start finds."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpc_train.checkpoint import reading
from hpc_train.checkpoint.catalogue import (
    LATEST,
    find_checkpoints,
    name_of,
    newest,
    start_candidates,
)
from hpc_train.errors import CheckpointMismatch, CheckpointUnreadable


@pytest.mark.parametrize("source", ["auto", "none"])
def test_a_run_does_not_start_again_if_all_its_checkpoints_are_gone(tmp_path, source):
    """A site has removed old files: the start would drop the records of all steps."""
    (tmp_path / LATEST).write_text(f"{name_of(12)}\n")
    with pytest.raises(CheckpointMismatch, match=r"are gone, up to step-000000012") as told:
        start_candidates(tmp_path, source)
    assert told.value.remedy == f"restore them, or remove {tmp_path / LATEST} to start again"
    (tmp_path / LATEST).unlink()
    assert start_candidates(tmp_path, source) == []


@pytest.mark.parametrize("link", [False, True])
def test_a_warning_tells_the_steps_of_a_newest_checkpoint_that_is_gone(tmp_path, caplog, link):
    left = tmp_path / name_of(8)
    left.touch()
    if link:  # to a file system that is not there
        (tmp_path / name_of(12)).symlink_to(tmp_path / "elsewhere" / name_of(12))
    else:
        (tmp_path / LATEST).write_text(f"{name_of(12)}\n")
    for find in (newest, lambda folder: start_candidates(folder, "auto")[0]):
        assert find(tmp_path) == left
        assert f"{name_of(12)} is gone, and with it 4 steps" in caplog.text
        caplog.clear()
    # A job that was killed has not named its last checkpoint, and the one before is not missed.
    (tmp_path / name_of(12)).unlink(missing_ok=True)
    (tmp_path / LATEST).write_text(f"{name_of(4)}\n")
    assert start_candidates(tmp_path, "auto") == [left]
    assert not caplog.text


def test_a_link_alone_that_leads_nowhere_is_no_fresh_start(tmp_path):
    link = tmp_path / name_of(4)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointMismatch, match=f"or remove {link} to start again"):
        start_candidates(tmp_path, "auto")


def test_a_start_with_checkpoints_of_its_own_does_not_need_its_source(tmp_path):
    """The source is removed by its own run, or is the run itself, which passed over a file."""
    run = tmp_path / "run"
    folder = run / "checkpoints"
    folder.mkdir(parents=True)
    for step in (4, 8, 12):
        (folder / name_of(step)).touch()
    (folder / LATEST).write_text(f"{name_of(8)}\n")  # that of step 12 was damaged
    own = [folder / name_of(step) for step in (12, 8, 4)]
    for source in (tmp_path / "gone" / name_of(1), tmp_path / "gone", folder / name_of(1), run):
        assert start_candidates(folder, str(source)) == own
    with pytest.raises(CheckpointMismatch, match="beyond this start"):
        start_candidates(folder, str(own[1]))
    with pytest.raises(CheckpointMismatch, match="no such checkpoint"):
        start_candidates(tmp_path / "other", str(tmp_path / "gone"))


def test_the_latest_is_found_if_the_list_of_the_folder_is_an_old_one(tmp_path, monkeypatch):
    """As a network file system gives it from its cache."""
    for step in (4, 8):
        (tmp_path / name_of(step)).touch()
    (tmp_path / LATEST).write_text(f"{name_of(8)}\n")
    for old in ([tmp_path / name_of(4)], []):
        monkeypatch.setattr(Path, "iterdir", lambda _, old=old: iter(old))
        assert start_candidates(tmp_path, "auto") == [tmp_path / name_of(8), *old]


@pytest.mark.parametrize("method", ["stat", "iterdir"])
@pytest.mark.parametrize("times", [1, 9])
def test_an_error_of_the_file_system_is_no_missing_checkpoint(tmp_path, monkeypatch, method, times):
    (tmp_path / name_of(4)).touch()
    look, failed = getattr(Path, method), []

    def stale(path, **how):
        if len(failed) < times:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return look(path, **how)

    monkeypatch.setattr(reading, "PAUSES", (0.0,))
    monkeypatch.setattr(Path, method, stale)
    if times == 1:
        assert find_checkpoints(tmp_path, "auto") == [tmp_path / name_of(4)]
        return
    with pytest.raises(CheckpointUnreadable, match="cannot be read .Stale"):
        find_checkpoints(tmp_path, "auto")
