"""The SLURM over emulated hosts: it runs jobs as others do, notices what fails, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import ROOT, hosts
from tests.cluster.slurm import Slurm, slurm
from tests.programs import run
from tests.waiting import wait_until

HOSTS = ["node1", "node2", "node3", "node4"]


@pytest.fixture(scope="module")
def up():
    with hosts(4, 2) as cluster, slurm(cluster) as started:
        yield started


@pytest.fixture(scope="module")
def other():
    """A second cluster, whose jobs find PBS's variables."""
    with hosts(3, 2) as cluster, slurm(cluster, pbs=True) as started:
        yield started


@pytest.fixture(scope="module")
def limited(other: Slurm, tmp_path_factory) -> int:
    """The other cluster's first job, which is over its time soon; SLURM takes its time to look."""
    job = other.submit(script(tmp_path_factory.mktemp("limited"), "sleep 1000", "--time=1"))
    wait_until(lambda: other.state(job) == "RUNNING")
    other.end_in(job, 2)
    return job


def script(folder: Path, text: str, options: str = "") -> Path:
    """A job script, whose output goes to a file `out` beside it."""
    path = folder / "job.sh"
    header = f"#!/bin/bash\n#SBATCH --output=out --open-mode=append {options}\n"
    path.write_text(header + text + "\n")
    return path


def seconds_until(holds, timeout: float, what: str) -> None:
    begin = time.monotonic()
    wait_until(holds, timeout)
    print(f"{what} after {time.monotonic() - begin:.1f} s")


def test_hosts_are_idle_and_have_their_slots(up):
    done = up.run(["sinfo", "--noheader", "--format=%D %T %C %N"])
    assert done.stdout == "4 idle 0/8/0/8 node[1-4]\n"


def test_clusters_stand_side_by_side(up, other, limited, tmp_path):
    job = up.submit(script(tmp_path, "sleep 1000"))
    assert limited == job == 1
    assert len(up.nodes()) == 4
    assert len(other.nodes()) == 3
    up.run(["scancel", str(job)]).check_returncode()
    assert up.wait(job) == "CANCELLED"
    assert other.state(limited) in ("RUNNING", "TIMEOUT")


@pytest.mark.parametrize("launcher", ["mpirun", "srun --mpi=pmix"])
def test_ranks_are_where_slurm_puts_them(up, tmp_path, launcher):
    text = f"{launcher} python -m tests.cluster.place"
    job = up.submit(script(tmp_path, text, "--nodes=4 --ntasks-per-node=2"))
    assert up.wait(job) == "COMPLETED"
    places = [(host, 2) for host in HOSTS for _ in range(2)]
    assert (tmp_path / "out").read_text() == f"{places}\n"


BARRIER = """
import os, time
time.sleep(2 * (os.environ["SLURM_PROCID"] == "7"))
begin = time.time()
from mpi4py import MPI
end = time.time()
assert MPI.COMM_WORLD.allreduce(begin, MPI.MAX) <= MPI.COMM_WORLD.allreduce(end, MPI.MIN)
"""


def test_ranks_of_srun_leave_mpi_init_together(up, tmp_path):
    (tmp_path / "late.py").write_text(BARRIER)
    alone = "OMPI_MCA_pmix_base_async_modex=1 OMPI_MCA_pmix_base_collect_data=0"  # no other barrier
    text = f"{alone} srun --mpi=pmix --kill-on-bad-exit python late.py"
    job = up.submit(script(tmp_path, text, "--nodes=4 --ntasks-per-node=2"))
    assert up.wait(job) == "COMPLETED"


def test_tasks_have_their_own_hosts_temporary_files(up, tmp_path):
    text = "echo $TMPDIR; srun sh -c 'echo $TMPDIR'"
    assert up.wait(up.submit(script(tmp_path, text, "--nodes=2"))) == "COMPLETED"
    first, *others = (tmp_path / "out").read_text().split()
    folders = [str(up.cluster.folder / host) for host in HOSTS[:2]]
    assert (first, sorted(others)) == (folders[0], folders)


@pytest.mark.long
def test_a_requeued_job_starts_again_soon(up, tmp_path):
    text = "date +%s; [ $SLURM_RESTART_COUNT ] || { scontrol requeue $SLURM_JOB_ID; sleep 1000; }"
    job = up.submit(script(tmp_path, text))
    assert up.wait(job) == "COMPLETED"
    assert up.job(job)["Restarts"] == "1"
    lines = (tmp_path / "out").read_text().splitlines()
    delay = int(lines[-1]) - int(lines[0])
    print(f"requeued for {delay} s")
    assert delay < 60  # 121 without cred_expire


# Its first run prints its hosts and hangs, the second one only prints them.
HANG = "echo $SLURM_JOB_NODELIST; [ $SLURM_RESTART_COUNT ] || srun sleep 1000"


def hang(up: Slurm, folder: Path, nodes: int) -> int:
    """A job that hangs on so many hosts until it is requeued."""
    before = up.cluster.processes()
    job = up.submit(script(folder, HANG, f"--nodes={nodes} --ntasks-per-node=2"))
    wait_until(lambda: sleeping(up, before) == 2 * nodes)
    return job


def sleeping(up: Slurm, before: set[int]) -> int:
    names = [Path(f"/proc/{pid}/comm") for pid in up.cluster.processes() - before]
    return sum(name.exists() and name.read_text() == "sleep\n" for name in names)


@pytest.mark.long
@pytest.mark.slow("SLURM has to notice that a daemon is gone")
def test_a_job_goes_on_elsewhere_when_a_slurmd_is_killed(up, tmp_path):
    job = hang(up, tmp_path, 2)
    up.kill_slurmd("node2")
    seconds_until(lambda: up.nodes()["node2"] == "down*", 60, "slurmd killed: down")
    assert up.wait(job) == "COMPLETED"
    assert up.job(job)["Restarts"] == "1"
    lines = (tmp_path / "out").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("node[1-2]", "node[3-4]")
    up.start_slurmd("node2")
    seconds_until(lambda: up.nodes()["node2"] == "idle", 30, "slurmd started: idle")


@pytest.mark.long
@pytest.mark.slow("SLURM has to notice that a host is gone, and that it is back")
def test_a_job_waits_for_a_host_that_was_powered_off(up, tmp_path):
    job = hang(up, tmp_path, 4)
    up.power_off("node3")
    seconds_until(lambda: up.nodes()["node3"] == "down*", 60, "host powered off: down")
    up.boot("node3")
    seconds_until(lambda: up.nodes()["node3"] == "idle", 30, "host booted: idle")
    assert up.wait(job) == "COMPLETED"
    assert up.job(job)["Restarts"] == "1"
    lines = (tmp_path / "out").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("node[1-4]", "node[1-4]")


PBS = """#!/bin/bash
#PBS -N small
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -l walltime=00:05:00
cd "$PBS_O_WORKDIR"
echo $PWD $PBS_JOBID $PBS_JOBNAME
cat "$PBS_NODEFILE"
mpirun python -m tests.cluster.place
"""


def test_qsub_runs_a_pbs_job(other, tmp_path):
    job = tmp_path / "job.pbs"
    job.write_text(PBS)
    number = int(other.run(["qsub", str(job)], cwd=tmp_path).stdout)
    assert f"{number} " in other.run(["qstat"]).stdout
    assert other.wait(number) == "COMPLETED"
    where, *nodes, places = (tmp_path / f"job.pbs.o{number}").read_text().splitlines()
    assert where == f"{tmp_path} {number} small"
    assert nodes == sorted(2 * list(set(nodes)))
    assert places == str([(host, 2) for host in nodes])
    assert other.job(number)["TimeLimit"] == "00:05:00"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_nothing_is_left_of_a_cluster_by_hand(tmp_path, end):
    words = [sys.executable, "-m", "tests.cluster", "up", "--hosts=2", "--slots=1"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=environ, **how) as held:
        shell = next(line for line in held.stdout if "/shell" in line).split()[0]
        assert run(shell, "head", "sinfo", "-ho%N").stdout == "node[1-2]\n"
        run(shell, "head", "srun", "sleep", "1000", ">/dev/null", "2>&1", "&")
        running = psutil.Process(held.pid).children(recursive=True)
        assert len(running) > 8
        if end:
            held.send_signal(end)
        else:
            held.stdin.close()
    assert not psutil.wait_procs(running, timeout=30)[1]
    assert held.returncode == (-end if end == signal.SIGKILL else 0)
    assert end == signal.SIGKILL or not list(tmp_path.iterdir())


def test_a_job_over_its_time_is_ended(other, limited):
    assert other.wait(limited, 90) == "TIMEOUT"


def test_a_daemon_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr("tests.cluster.slurm.CONFIGURATION", "NoSuchOption=1")
    with hosts(1, 1) as cluster:
        before = cluster.processes()
        with pytest.raises(RuntimeError, match="NoSuchOption"), slurm(cluster):
            pass
        assert cluster.processes() == before
