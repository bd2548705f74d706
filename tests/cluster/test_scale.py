"""`hpc-train scale` on a real SLURM over emulated hosts, from the command to the page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts
from tests.cluster.slurm import slurm
from tests.conftest import small_program
from tests.programs import hpc_train


@pytest.mark.slow("jobs of SLURM one after the other")
@pytest.mark.parametrize(
    ("nodes", "scheduler"),
    [
        ("1,2", "slurm"),
        pytest.param("1,2,4", "slurm", marks=pytest.mark.long),
        # By SLURM's translations of qsub and qstat.
        pytest.param("1,2", "pbs", marks=pytest.mark.long),
        pytest.param("1,2", "torque", marks=pytest.mark.long),
    ],
)
def test_a_study_goes_from_the_command_to_the_page(
    tmp_path: Path, text_data: Path, nodes, scheduler
):
    program = small_program(tmp_path, text_data)
    out = tmp_path / "study"
    words = ["scale", str(program.config), "--nodes", nodes, "--repeats", "1", "--steps", "6"]
    words += ["--out", str(out), "--jobs_at_once", "1", "--gradients.engine", "mpi"]
    words += ["--scheduler", scheduler]
    counts = nodes.split(",")
    pbs = scheduler != "slurm"
    with hosts(len(counts) if nodes == "1,2" else 4, 1) as cluster, slurm(cluster, pbs) as up:
        done = up.run(hpc_train(*words), cwd=tmp_path)
        again = up.run(hpc_train(*words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is submitted as job") == len(counts)
    assert again.returncode == 0, again.stderr
    assert "is submitted" not in again.stderr
    assert again.stdout == done.stdout == (out / "scale.txt").read_text()
    assert "Caution: hosts share cores: node1, node2" in done.stdout
    rows = list(csv.DictReader((out / "scale.csv").read_text().splitlines()))
    assert [row["nodes"] for row in rows if row["kind"] == "measured"] == counts
    assert "Hosts share cores" in (out / "scale.html").read_text()
    for count in counts:
        told = json.loads((out / f"nodes-{count}-run-1/performance.json").read_text())
        assert (told["hosts"], told["ranks"], told["batch"]) == (int(count), int(count), 16)
