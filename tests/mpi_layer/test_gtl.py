"""Cray's MPI that is told to use GPU memory, without its library for that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpc_train.mpi import gtl
from tests.programs import command, hpc_train, only_line, run

CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\nMPI BUILD INFO : ..."
GTL = "7f00-7f01 r-xp 00000000 00:1f 5 /opt/cray/pe/lib64/libmpi_gtl_hsa.so.0.0.0"
WANTED = {gtl.SWITCH: "1"}


@pytest.mark.parametrize(
    ("version", "maps", "aborts"),
    [
        (CRAY, "", True),
        (CRAY, GTL, False),
        ("MPICH Version:      4.2.3", "", False),
        ("Open MPI v4.1.8, package: ...", "", False),
        ("", "", False),
    ],
)
def test_only_crays_mpi_aborts_and_only_without_its_library(version, maps, aborts):
    assert gtl.would_abort(version, maps) == aborts


def test_other_mpis_run_with_the_variable():
    """In a process of its own, because this one may have started MPI."""
    check = f"from hpc_train.mpi import gtl; gtl.check_gtl({WANTED}); print(gtl.loaded_mpi())"
    done = run(sys.executable, "-c", f"{check}; import sys; assert 'mpi4py.MPI' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert "MPI" in done.stdout


@pytest.fixture
def cray(tmp_path):
    """The environment of a program that sees Cray's MPI."""
    (tmp_path / "sitecustomize.py").write_text(
        f"from hpc_train.mpi import gtl\ngtl.loaded_mpi = lambda: {CRAY!r}\n"
    )
    here = Path(gtl.__file__).parents[2]
    return WANTED | {"PYTHONPATH": f"{tmp_path}:{here}"}


def test_doctor_says_so_in_place_of_the_abort(cray):
    done = run(*hpc_train("doctor", "--json"), environ=cray)
    assert done.returncode == 1
    tree = json.loads(done.stdout)
    (finding,) = [one for one in tree["findings"] if one["topic"] == "MPI"]
    assert "MPI_Init would abort: MPICH_GPU_SUPPORT_ENABLED is 1" in finding["text"]
    assert "unset MPICH_GPU_SUPPORT_ENABLED" in finding["remedy"]


def test_ranks_end_with_one_line_and_2(cray):
    words = command("mpirun", 2, "plan", "--model.vocab=8", "--measure")
    done = run(*words, environ=cray)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "hpc-train: error" in line]
    assert "MPI_Init would abort" in only_line("\n".join(errors))
