"""Files that cannot be read."""

from __future__ import annotations

import pytest

from hpc_train.checkpoint.reading import read_header
from hpc_train.errors import CheckpointUnreadable


def test_a_checkpoint_that_a_run_removes_meanwhile_is_no_fault_of_the_file_system(tmp_path):
    with pytest.raises(CheckpointUnreadable, match="as newer checkpoints are kept"):
        read_header(tmp_path / "step-000000004.safetensors")
