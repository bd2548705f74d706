"""Checkpoints that are no longer there."""

from __future__ import annotations

import pytest

from hpc_train.checkpoint.catalogue import LATEST, name_of, newest, start_candidates
from hpc_train.errors import CheckpointMismatch


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
