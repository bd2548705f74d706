from __future__ import annotations

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi.environment import Launch, for_launcher, read, visible_device

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (OPEN_MPI, Launch("Open MPI", 5, 8, 1, 4)),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Launch("Hydra", 3, 4, 1, 2),
        ),
        (
            {
                "PALS_RANKID": "3",
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "PALS_LOCAL_RANKID": "1",
                "PALS_LOCAL_SIZE": "2",
            },
            Launch("PALS", 3, 4, 1, 2),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "6",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
            },
            Launch("Slurm", 3, 6, 1, 2),
        ),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "3",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2,1",
            },
            Launch("Slurm", 0, 3, 0, None),
        ),
        (
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"},
            Launch("Flux", 1, 2, 1, None),
        ),
        ({}, None),
    ],
)
def test_each_launcher_is_read_from_its_own_variables(variables, launch):
    assert read(variables) == launch


def test_a_batch_shell_is_no_rank_and_does_not_hide_mpirun():
    batch_shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert read(batch_shell) is None
    assert read(batch_shell | OPEN_MPI) == Launch("Open MPI", 5, 8, 1, 4)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "HOROVOD_RANK"])
def test_launchers_without_mpi_are_refused(variable):
    with pytest.raises(SetupError, match="starts no MPI ranks: use mpirun"):
        read({variable: "0"})
    assert read({variable: "0"} | OPEN_MPI) is not None


@pytest.mark.parametrize(
    ("environ", "local_rank", "devices", "expected"),
    [
        ({}, 2, 4, "2"),
        ({}, 5, 4, "1"),
        ({}, 1, 1, None),
        ({}, 1, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, 1, 8, "7"),
        ({"CUDA_VISIBLE_DEVICES": "4"}, 1, 8, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, 8, None),
    ],
)
def test_local_ranks_share_out_the_devices(environ, local_rank, devices, expected):
    assert visible_device(environ, local_rank, devices) == expected


def test_only_root_needs_to_consent():
    assert for_launcher({"A": "1"}, uid=1000) == {"A": "1"}
    assert for_launcher({}, uid=0)["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
