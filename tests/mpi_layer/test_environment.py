from __future__ import annotations

import os

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi.environment import Launch, for_launcher, read_launch, without_launcher

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
            {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
            Launch("PALS", 3, None, 1, 2),  # with --pmi=pmix, only MPI knows the size
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
    assert read_launch(variables) == launch


def test_a_batch_shell_is_no_rank_and_does_not_hide_mpirun():
    batch_shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert read_launch(batch_shell) is None
    assert read_launch(batch_shell | OPEN_MPI) == Launch("Open MPI", 5, 8, 1, 4)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "HOROVOD_RANK"])
def test_launchers_without_mpi_are_refused(variable):
    with pytest.raises(SetupError, match="starts no MPI ranks: use mpirun"):
        read_launch({variable: "0"})
    assert read_launch({variable: "0"} | OPEN_MPI) is not None


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "1"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "2"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, "1"),
        (  # srun --mpi=pmi2
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
            },
            "2",
        ),
    ],
)
def test_torchrun_in_a_task_is_refused_and_srun_in_torchrun_is_not(variables, nodes):
    """All processes that torchrun starts in a task would have the rank of the task."""
    assert read_launch(variables) is not None
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "3", "GROUP_WORLD_SIZE": nodes}
    with pytest.raises(SetupError, match="started by torchrun, which starts no MPI ranks"):
        read_launch(variables | torchrun)
    srun = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    assert read_launch(torchrun | srun) == Launch("Slurm", 3, 4, None, None)


def test_a_variable_without_a_number_is_named_and_an_empty_one_is_not_set():
    with pytest.raises(SetupError, match=r"variable OMPI_COMM_WORLD_SIZE is 'x'.*: unset it"):
        read_launch(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"})
    assert read_launch({"PMI_RANK": "", "PMI_SIZE": "4"}) is None
    assert read_launch({"PMI_RANK": "", "PMI_SIZE": "4"} | OPEN_MPI) is not None


PMI2 = {  # srun --mpi=pmi2 for MPICH, Intel MPI and MVAPICH
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_what_one_launcher_does_not_tell_another_one_does():
    assert read_launch(PMI2) == Launch("Hydra", 3, 4, 1, 2)


@pytest.mark.parametrize(
    "inherited",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},  # of a batch shell
        {  # of a daemon that srun has started, one on each of two nodes
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
    ],
)
def test_variables_inherited_from_another_process_are_ignored(inherited):
    launch = read_launch({"PMI_RANK": "3", "PMI_SIZE": "4", **inherited})
    assert launch == Launch("Hydra", 3, 4, None, None)


def test_only_root_gets_the_variables_that_let_mpi_run_as_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert for_launcher({"A": "1"}) == {"A": "1"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert for_launcher({})["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_what_a_launcher_tells_a_rank_is_left_out_and_the_users_settings_stay():
    users = {
        "OMPI_MCA_btl": "^openib",
        "OMPI_MCA_orte_base_help_aggregate": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PMIX_MCA_gds": "hash",
        "HOROVOD_FUSION_THRESHOLD": "1",
        "SLURM_JOB_ID": "7",
    }
    told = dict.fromkeys(
        ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess", "OMPI_MCA_orte_hnp_uri", "OMPI_COMMAND"), "1"
    )
    told |= dict.fromkeys(("PMIX_RANK", "PMI_FD", "SLURM_PROCID", "HOROVOD_RANK"), "1")
    assert without_launcher({**users, **told}) == users
