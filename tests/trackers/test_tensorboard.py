"""Event files, read by TensorBoard itself."""

from __future__ import annotations

import pytest

from hpc_train.cli.log import export_run
from hpc_train.trackers.source import TrackedRun
from tests.trackers.runs import MadeRun, losses, of_tensorboard, steps_and_losses

pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the package


def test_tensorboard_reads_each_step_once_also_after_resumes(tmp_path):
    run = MadeRun(tmp_path / "run")
    for after, last in ((0, 9), (6, 8), (8, 20), (2, 11)):
        run.job(after, last)
        export_run(TrackedRun(run.path, run.path), "tensorboard")
        scalars, text = of_tensorboard(run.path / "tensorboard")
        assert steps_and_losses(scalars["train/loss"]) == losses(run.path)
    assert [one[0] for one in scalars["validation/auc"]] == [4, 8]
    assert scalars["train/loss"][-1][2] == 4011.0
    assert "| optimizer.lr | 0.5 |" in text
    assert "| start.commit | c0ffee |" in text


def test_a_file_that_a_kill_has_cut_off_hides_nothing(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.job(0, 9)
    export_run(TrackedRun(run.path, run.path), "tensorboard")
    (cut,) = (run.path / "tensorboard").glob("events.*")
    cut.write_bytes(cut.read_bytes()[:-5])
    run.job(8, 12)
    export_run(TrackedRun(run.path, run.path), "tensorboard")
    scalars, _ = of_tensorboard(run.path / "tensorboard")
    assert steps_and_losses(scalars["train/loss"]) == losses(run.path)
