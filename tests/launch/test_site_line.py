"""A site's own launcher line, with the numbers and hosts of each attempt."""

from __future__ import annotations

import pytest

from hpc_train.errors import SetupError, UserError
from hpc_train.launch import site_line
from hpc_train.launch.hosts import Host
from hpc_train.launch.lines import LaunchedJob

HOSTS = [Host("n1", 8), Host("n2", 8), Host("n4", 8)]
SAYS = {
    "mpiexec": "mpiexec version 1.8.0 revision 7d1b8a5",
    "mpirun": "mpirun (Open MPI) 4.1.8",
    "mpiexec.mpich": "HYDRA build details:",
    "other": "words",
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    for name, text in SAYS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def words(text, **fields):
    """What is added to a site's line for a job, as one text."""
    job = LaunchedJob(["train"], **{"ranks": 24, "hosts": HOSTS, "threads": 7, **fields})
    return str(site_line.launcher_of(text).make(job))


def test_its_numbers_and_hosts_are_those_of_the_attempt(path):
    line = "mpiexec -n {ranks} --ppn {ranks_per_node} --depth {threads} --cpu-bind depth"
    start = "mpiexec -n 24 --ppn 8 --depth 7 --cpu-bind depth --hosts n1,n2,n4 train"
    assert words(line) == start
    assert "-n 16 " in words(line, ranks=16, hosts=HOSTS[:2])
    assert "--hosts n1,n2 train" in words(line, ranks=16, hosts=HOSTS[:2])
    text = words("mpirun -np {ranks}", environ={"OMP_NUM_THREADS": "7"})
    assert "mpirun -np 24 --host n1:8,n2:8,n4:8 -x " in text
    assert " -x OMP_NUM_THREADS " in text
    assert " -x PATH " in text
    assert "-hosts n1:8,n2:8,n4:8 train" in words("mpiexec.mpich -n {ranks}")


def test_srun_is_told_its_nodes_and_keeps_the_sites_binding(path):
    text = words("srun --cpu-bind=mask_cpu:7e,7e00 --cpus-per-task={threads}")
    assert text.startswith("srun --cpu-bind=mask_cpu:7e,7e00 --cpus-per-task=7 --ntasks=24 ")
    assert "--nodes=3 '--nodelist=n[1-2,4]' --ntasks-per-node=8 train" in text
    assert "--job-name=hpc-train-" in text
    assert "SLURM_OVERLAP=1 srun" in words("srun", again=True)


def test_the_script_of_intel_mpi_is_replaced_by_what_it_starts(path, monkeypatch):
    """A signal would end the script before its mpiexec.hydra could pass the signal on."""
    for name in ("mpirun", "mpiexec.hydra"):
        (path / name).write_text("#!/bin/sh\necho 'Intel(R) MPI Library for Linux* OS'\n")
        (path / name).chmod(0o755)
    start = f"{path}/mpiexec.hydra -n 24 -ppn 8 -hosts n1,n2,n4 train"
    assert words("mpirun -n {ranks} -ppn {ranks_per_node}").endswith(start)


def test_without_hosts_the_line_stays_as_it_is(path):
    assert words("mpiexec.mpich -n {ranks}", hosts=[]).endswith("mpiexec.mpich -n 24 train")


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("", UserError, "names no launcher"),
        ("srun 'a", UserError, "cannot be read"),
        ("mpiexec -n {rank}", UserError, "has {rank}"),
        ("mpiexec -n {ranks.x}", UserError, "braces .* use {nodes}"),
        ("mpiexec -n {ranks[0]}", UserError, "braces .* use {nodes}"),
        ("mpiexec -n {ranks:zz}", UserError, "braces .* use {nodes}"),
        ("mpiexec -n {ranks", UserError, "braces .* write {{ and }} for"),
        ("mpiexec -n {}", UserError, "braces .* use {nodes}"),
        ("other -n {ranks}", SetupError, "other is no launcher that is known"),
        ("none -n {ranks}", SetupError, "there is no program none"),
    ],
)
def test_lines_that_cannot_be_used_are_refused(path, line, error, message):
    with pytest.raises(error, match=message):
        site_line.launcher_of(line)
