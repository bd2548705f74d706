"""The line of each launcher that starts a job's ranks, with the variables that it needs.

Sources: the manuals mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH's Hydra, of Intel MPI and of
HPE's PALS, srun(1) of Slurm, flux-run(1) of Flux, OLCF's pages on jsrun, and `horovodrun --help`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train.errors import UserError
from hpc_train.launch.containers import Container
from hpc_train.launch.hosts import Host, compress
from hpc_train.launch.left_behind import step_name
from hpc_train.mpi.environment import YIELD, for_launcher, without_launcher

# Open MPI passes variables to ranks on other hosts only if its line names them. Ours does not
# name these, which belong to this host, shell, session or job. Open MPI passes its own settings
# by itself.
OF_THIS_HOST = re.compile(
    r"_|(SLURM|SLURMD|SRUN|SBATCH|PBS|LSB|LSF|LS|FLUX|SGE|COBALT)_"
    r"|(K_MPI|OMPI|PMI|PMIX|PRTE|SSH|XDG|DBUS|POD|KUBERNETES)_"
    r"|(HOME|USER|LOGNAME|SHELL|MAIL|PE_HOSTFILE|NSLOTS|JOB_ID)$"
    r"|(HOSTNAME|HOST|PWD|OLDPWD|SHLVL|TERM|DISPLAY|XAUTHORITY|KRB5CCNAME|TMUX|TMUX_PANE|STY)$"
    r"|(TMPDIR|TMP|TEMP)$"
    r"|((CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK)$"
)
# A host whose link is dead cannot even close its connections. Without these settings mpirun, in
# version 4 and 5, believes for minutes that it is alive; with them for 3 + 3 x 2 = 9 seconds.
KEEPALIVE = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("OMPI", "PRTE")
    for name, value in (("time", "3"), ("intvl", "2"), ("probes", "3"))
}


@dataclass(frozen=True)
class LaunchedJob:
    """The job that a launcher starts.

    Args:
        command: the command of each rank.
        ranks: number of ranks.
        hosts: hosts, with the number of ranks of each; empty: this machine.
        cores: cores of a host.
        threads: threads of each rank.
        environ: variables for the ranks.
        again: whether it replaces a job that failed. The scheduler may still count ranks of that
            job on hosts that died.
        container: how the command is run in an image; None: it runs on the host.
    """

    command: Sequence[str]
    ranks: int
    hosts: Sequence[Host] = ()
    cores: int = 1
    threads: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)
    again: bool = False
    container: Container | None = None

    @property
    def words(self) -> list[str]:
        """The words that a launcher starts for each rank."""
        if self.container is None:
            return [*self.command]
        return self.container.command(self.command, self.ranks)

    @property
    def per_host(self) -> int:
        """Ranks of the fullest host."""
        return max((host.slots for host in self.hosts), default=self.ranks)

    @property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({host.slots for host in self.hosts}) <= 1

    @property
    def binds(self) -> bool:
        """Whether each rank can have cores of its own, as many as its threads."""
        return not self.why_not_bound

    @property
    def why_not_bound(self) -> str:
        """Why ranks have no cores of their own; "" if they have."""
        if not self.even:
            return "not all hosts have the same number of ranks"
        if (needed := self.per_host * self.threads) > self.cores:
            ranks = f"{self.per_host} ranks of {self.threads} threads need {needed} cores"
            return f"{ranks}, and a host has {self.cores} for the job"
        return ""

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores. Ranks that wait must then yield theirs."""
        return self.per_host > self.cores

    @property
    def forwarded(self) -> list[str]:
        """Names of the variables that ranks on other hosts get from here."""
        present = without_launcher(os.environ)
        return sorted(
            {name for name in present if name.isidentifier() and not OF_THIS_HOST.match(name)}
            | set(self.environ)
        )

    def blocks(self, launcher: str) -> str:
        """The hosts' names, for a launcher that puts `per_host` ranks on one host after the other.

        Raises:
            UserError: a host other than the last one has fewer slots.
        """
        if any(host.slots != self.per_host for host in self.hosts[:-1]):
            raise UserError(
                f"{launcher} cannot start unequal numbers of ranks per host: {self.listed()}",
                "give all hosts the same number of slots",
            )
        return ",".join(host.name for host in self.hosts)

    def listed(self, separator: str = ":") -> str:
        """The hosts as node1:4,node2:4."""
        return ",".join(f"{host.name}{separator}{host.slots}" for host in self.hosts)


@dataclass(frozen=True)
class Line:
    """A line that starts a job.

    Args:
        words: the launcher's words, followed by the command.
        environ: variables to set for the launcher.
        note: a note to the user about the choice of launcher; "" if there is none.
    """

    words: list[str]
    environ: dict[str, str]
    note: str = ""

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environ.items())]
        return " ".join([*settings, shlex.join(self.words)])


def open_mpi(program: str, job: LaunchedJob) -> Line:
    """Open MPI's mpirun, version 4 and 5."""
    words = [program, "-np", str(job.ranks)]
    environ: dict[str, str] = {}
    if job.hosts:
        words += ["--host", job.listed()]
    if job.binds:
        words += ["--map-by", f"ppr:{job.per_host}:node:PE={job.threads}", "--bind-to", "core"]
    elif job.crowded:
        words += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        # In version 4 waiting ranks spin. Version 5 yields, and its variable has another name.
        environ[YIELD] = "1"
    else:
        words += ["--map-by", "slot", "--bind-to", "none"]
    if job.hosts:
        words += [word for name in job.forwarded for word in ("-x", name)]
        environ |= KEEPALIVE
    return Line([*words, *job.words], {**for_launcher({}), **environ})


def hydra(program: str, job: LaunchedJob) -> Line:
    """MPICH's mpiexec. It passes its environment to the ranks by itself."""
    words = [program, "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", job.listed()]
    words += ["-bind-to", f"core:{job.threads}" if job.binds else "none"]
    return Line([*words, *job.words], {})


def intel_mpi(program: str, job: LaunchedJob) -> Line:
    """Intel MPI's mpiexec. It gives each rank as many cores as OpenMP has threads."""
    words = [program, "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", job.blocks("mpiexec"), "-ppn", str(job.per_host)]
    pin = {"I_MPI_PIN_DOMAIN": "omp"} if job.binds else {"I_MPI_PIN": "0"}
    return Line([*words, *job.words], pin)


def pals(program: str, job: LaunchedJob) -> Line:
    """HPE's mpiexec (PALS). It passes its environment to the ranks by itself."""
    words = [program, "-n", str(job.ranks), "--ppn", str(job.per_host)]
    if job.hosts:
        words += ["--hosts", job.blocks("PALS")]
    if job.binds:
        words += ["--depth", str(job.threads), "--cpu-bind", "depth"]
    else:
        words += ["--cpu-bind", "none"]
    return Line([*words, *job.words], {})


def srun(program: str, plugin: str, job: LaunchedJob) -> Line:
    """Slurm's srun, inside an allocation. Since Slurm 22.05 its own line must give the cores."""
    words = [program, f"--mpi={plugin}", f"--ntasks={job.ranks}", f"--job-name={step_name()}"]
    words.append("--kill-on-bad-exit=0")  # `LeftBehind` kills the other ranks, without KillWait
    if job.hosts:
        names = compress(host.name for host in job.hosts)
        words += [f"--nodes={len(job.hosts)}", f"--nodelist={names}"]
        if job.even:
            words.append(f"--ntasks-per-node={job.per_host}")
    if job.binds:
        words += [f"--cpus-per-task={job.threads}", "--cpu-bind=cores"]
    else:
        words += ["--overcommit", "--cpu-bind=none"]
    # The other fence of Slurm 22.05 lets ranks leave MPI_Init before all ranks have entered it.
    environ = {"SLURM_PMIX_FENCE": "ring"} if plugin == "pmix" else {}
    if job.again:  # else srun waits for the cores of the failed step, which may not end
        environ["SLURM_OVERLAP"] = "1"
    return Line([*words, *job.words], environ)


def horovodrun(program: str, job: LaunchedJob) -> Line:
    """Horovod's launcher. It starts the mpirun of Open MPI up to version 4, and binds no ranks."""
    words = [program, "-np", str(job.ranks), "-H", job.listed() or f"localhost:{job.ranks}"]
    return Line([*words, *job.words], for_launcher({}))


def flux_run(options: Sequence[str], job: LaunchedJob) -> Line:
    """Flux's launcher, inside a Flux job. Each step has whole nodes of that job.

    Args:
        options: how ranks of this MPI find each other, such as -o pmi=pmix.
        job: the job.
    """
    # Flux deals out a number of tasks evenly. It wants a core for each, but not for tasks per node.
    tasks = f"--tasks-per-node={job.per_host}" if job.even else f"--ntasks={job.ranks}"
    words = ["flux", "run", tasks, f"--nodes={max(1, len(job.hosts))}", *options]
    if job.hosts:
        words.append(f"--requires=host:{','.join(host.name for host in job.hosts)}")
    words += ["--exclusive", "-o", f"cpu-affinity={'per-task' if job.binds else 'off'}"]
    return Line([*words, *job.words], {})


def jsrun(job: LaunchedJob) -> Line:
    """IBM's launcher, inside an LSF job. It chooses the hosts; each has one resource set.

    Raises:
        UserError: hosts have unequal numbers of ranks.
    """
    if not job.even:
        raise UserError(
            f"jsrun cannot start unequal numbers of ranks per host: {job.listed()}",
            "give all hosts the same number of slots",
        )
    words = ["jsrun", "-n", str(max(1, len(job.hosts))), "-r", "1", "-a", str(job.per_host)]
    words += ["-c", "ALL_CPUS", "-g", "ALL_GPUS"]
    words += ["-b", f"packed:{job.threads}" if job.binds else "none", "-d", "packed"]
    return Line([*words, *job.words], {})
