"""What several tests of the Trainer compare with."""

from __future__ import annotations

import pytest

from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from tests.training.test_trainer import config, make


@pytest.fixture
def reference(together, job):
    """The run directory of one rank."""
    if job.world.rank == 0:
        make(config(together / "reference"), Runtime(Group(), Group())).train()
    job.world.barrier()
    return together / "reference"
