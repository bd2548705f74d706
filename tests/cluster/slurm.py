"""A real SLURM over emulated hosts: its controller on a login host, a slurmd on every other one.

Jobs need nothing that they would not need elsewhere: what has to be known about emulated hosts is
put into the environment of every task. Daemons and jobs end with the hosts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster import hosts
from tests.cluster.hosts import ON_HOSTS, ROOT, Cluster, write_script
from tests.programs import ENVIRON
from tests.waiting import PATIENCE, wait_until

HEAD = "head"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")

# One munged serves all hosts: its socket lies in a folder that they share.
# cred_expire is also how long a requeued job waits; less than 5 seconds are refused.
# TmpFS: PMIx servers with one folder for temporary files would meet each other's.
# config_overrides: a host may have more slots than this machine has cores.
CONFIGURATION = """
ClusterName=emulated
SlurmctldHost=head
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
TmpFS={temporary}/%n
MailProg=/bin/true
PlugStackConfig={folder}/plugstack.conf
TaskProlog={folder}/prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
JobRequeue=1
KillWait=10
OverTimeLimit=0
SlurmdTimeout=5
MessageTimeout=3
TCPTimeout=1
ReturnToService=2
NodeName={names} CoresPerSocket={slots} RealMemory={memory}
PartitionName=batch Nodes=ALL Default=YES
"""
# The barrier of 22.05 is a tree that waits for no other node: ranks that are through MPI_Init too
# early crash those that are not.
MPI = "PMIxCollFence=ring\n"
MUNGED = """
cd {folder}
umask 077
head -c 128 /dev/urandom > munge.key
exec munged --force --num-threads=2 --key-file=$PWD/munge.key --socket=$PWD/munge.socket \\
    --pid-file=$PWD/munged.pid --log-file=$PWD/munged.log --seed-file=$PWD/munge.seed
"""
# What this prints comes into a task's environment; TMPDIR would be the login host's.
PROLOG = """#!/bin/sh
echo export TMPDIR={temporary}/$SLURMD_NODENAME
"""
# What PBS gives to a job and Slurm's spank_pbs does not.
PBS_PROLOG = """
[ "$PBS_NODEFILE" ] || echo export PBS_NODEFILE=$(generate_pbs_nodefile)
"""


@dataclass(frozen=True)
class Slurm:
    """A SLURM that is up.

    Args:
        cluster: the hosts it runs on, and the login host `head`.
        folder: its configuration and its daemons' logs.
    """

    cluster: Cluster
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What its commands have to find in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self,
        words: Sequence[str],
        host: str = HEAD,
        cwd: Path = ROOT,
        timeout: float = 60,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, on the login host if no other is named; output is text."""
        given = {**self.environ, **(environ or {})}
        return self.cluster.on(host, ["env", f"--chdir={cwd}", *words], timeout, given)

    def submit(self, script: Path, *options: str, environ: Mapping[str, str] | None = None) -> int:
        """Submit a script from its own folder, where sbatch puts the output; returns the job."""
        words = ["sbatch", "--parsable", *options, str(script)]
        return int(_output(self.run(words, cwd=script.parent, environ=environ)))

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, NodeList, Restarts, ExitCode, ..."""
        words = ["scontrol", "show", "job", "--oneliner", str(job)]
        return dict(re.findall(r"(\S+?)=(\S*)", _output(self.run(words))))

    def state(self, job: int) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, ..."""
        return self.job(job)["JobState"]

    def wait(self, job: int, timeout: float = PATIENCE) -> str:
        """Wait until a job has left the queue; returns its state.

        Raises:
            TimeoutError: it has not after so many seconds.
        """
        queued = ["squeue", "--noheader", "--jobs", str(job)]
        try:
            wait_until(lambda: not _output(self.run(queued)), timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.job(job)}") from None
        return self.state(job)

    def end_in(self, job: int, seconds: int) -> None:
        """Move the time limit of a running job, which SLURM looks at twice in a minute."""
        end = f"EndTime=now+{seconds}"
        _output(self.run(["scontrol", "update", f"JobId={job}", end]))

    def nodes(self) -> dict[str, str]:
        """Each host's state: idle, mixed, allocated, completing, down*, ..."""
        lines = _output(self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"]))
        return dict(line.split() for line in lines.splitlines())

    def kill_slurmd(self, host: str) -> None:
        """Kill a host's slurmd; ranks there live on, also those of a job that has been requeued.

        SLURM ends them some seconds after the slurmd was started again.
        """
        _output(self.run(["sh", "-c", f"kill -KILL $(cat {self.folder}/{host}.pid)"], host))

    def start_slurmd(self, host: str) -> None:
        """Start a host's slurmd."""
        _output(self.run(["slurmd"], host))

    def power_off(self, host: str) -> None:
        """End a host and all that runs on it; no other host hears of it."""
        self.cluster.power_off(host)

    def boot(self, host: str) -> None:
        """Bring a host back that was powered off, with a slurmd; nothing is left of what it had."""
        self.cluster.boot(host)
        for left in (self.folder / host).iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.start_slurmd(host)


@contextmanager
def slurm(cluster: Cluster, pbs: bool = False) -> Iterator[Slurm]:
    """Bring a SLURM up over all hosts; at the end, kill all that was started on them since.

    Args:
        cluster: the hosts.
        pbs: jobs find PBS's variables as well.

    Raises:
        RuntimeError: a daemon does not start; the message is its own.
        TimeoutError: the hosts do not become ready.
    """
    before = cluster.processes()
    up = Slurm(cluster, cluster.folder / "slurm")
    _write_files(up, pbs)
    try:
        cluster.boot(HEAD)
        for daemon in (["sh", "-ec", MUNGED.format(folder=up.folder)], ["slurmctld"]):
            _output(up.run(daemon))
        for host in cluster.names:
            up.start_slurmd(host)
        wait_until(lambda: set(up.nodes().values()) == {"idle"})
        yield up
    finally:
        cluster.kill_all_but(before)


def _write_files(up: Slurm, pbs: bool) -> None:
    for name in (".", "state", *up.cluster.names):
        (up.folder / name).mkdir()
    values = {"folder": up.folder, "temporary": up.cluster.folder}
    values |= {"names": ",".join(up.cluster.names), "slots": up.cluster.slots}
    memory = psutil.virtual_memory().total >> 20
    (up.folder / "slurm.conf").write_text(CONFIGURATION.format(**values, memory=memory))
    (up.folder / "mpi.conf").write_text(MPI)
    (up.folder / "plugstack.conf").write_text("optional spank_pbs.so\n" if pbs else "")
    exports = "".join(f"echo export {name}={value}\n" for name, value in ON_HOSTS.items())
    text = PROLOG.format(**values) + exports + (PBS_PROLOG if pbs else "")
    write_script(up.folder / "prolog", text)


def _output(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{done.args} failed")
    return done.stdout


def why_not() -> str:
    """Why no SLURM can be brought up here; "" where it can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=ENVIRON["PATH"])]
    if missing:
        return f"SLURM on emulated hosts needs {', '.join(missing)}"
    return hosts.why_not()
