"""Ranks in containers: MPI's settings for their user namespaces, and ranks that are alone."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi import namespaces
from hpc_train.mpi.environment import RANKS
from hpc_train.mpi.runtime import start_runtime

VADER = "OMPI_MCA_btl_vader_single_copy_mechanism"
SIGN = {"APPTAINER_CONTAINER": "/it.sif"}


@pytest.mark.parametrize(
    ("environ", "all_users", "inside", "set_"),
    [
        (SIGN, False, False, True),
        ({"SINGULARITY_CONTAINER": "/it.sif"}, False, False, True),
        ({RANKS: "4"}, False, False, True),
        (SIGN, True, False, False),  # one that is run by root or setuid has the host's namespace
        (SIGN, False, True, False),  # mpirun in the container: its ranks share the namespace
        ({}, False, False, False),  # of another container, which may be one for all ranks
    ],
)
def test_mpi_is_told_only_where_each_rank_has_a_namespace_of_its_own(
    monkeypatch, environ, all_users, inside, set_
):
    monkeypatch.setattr(namespaces, "sees_all_users", lambda: all_users)
    monkeypatch.setattr(namespaces, "launched_inside", lambda: inside)
    found = namespaces.own_namespace(environ)
    assert found == (namespaces.WITHOUT_ATTACH if set_ else {})
    assert VADER not in namespaces.own_namespace({**environ, VADER: "cma"}), "the user's own"


LOOK = "from hpc_train.mpi import namespaces as n; print(n.sees_all_users(), n.launched_inside())"


@pytest.mark.parametrize(("launcher", "inside"), [("sh", False), ("mpirun", True)])
def test_a_real_namespace_with_and_without_a_launcher_in_it(tmp_path, launcher, inside):
    shell = tmp_path / launcher
    shutil.copy("/bin/sh", shell)
    words = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no user namespaces")
    words += [str(shell), "-c", f'{sys.executable} -c "{LOOK}"; exit $?']
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", str(inside)], done.stderr


def test_a_rank_whose_container_hides_the_launchers_variables_does_not_run_alone(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RANKS, "8")
    with pytest.raises(SetupError, match="one of 8 ranks.*each rank would be alone"):
        start_runtime()
    monkeypatch.setenv(RANKS, "1")
    assert start_runtime().world.size == 1
