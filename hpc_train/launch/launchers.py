"""Launchers: the line that starts a job's ranks, with the variables that it needs.

Sources: the manuals mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH's Hydra, of Intel MPI and of
HPE's PALS, srun(1) of Slurm, and `horovodrun --help`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hpc_train.errors import SetupError, UserError
from hpc_train.host.cores import physical_cores
from hpc_train.host.programs import output
from hpc_train.launch.hosts import Host, compress
from hpc_train.launch.left_behind import step_name
from hpc_train.mpi.environment import YIELD, for_launcher

# Variables that Open MPI passes to ranks on other hosts only if its line names them.
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")
PREFIXES = ("HPC_TRAIN_", "HOROVOD_", "NCCL_", "TORCH_")
# A host whose link is dead cannot even close its connections. Without these settings mpirun, in
# version 4 and 5, believes for minutes that it is alive; with them for 3 + 3 x 2 = 9 seconds.
KEEPALIVE = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("OMPI", "PRTE")
    for name, value in (("time", "3"), ("intvl", "2"), ("probes", "3"))
}
# For srun's --mpi: Slurm's plugins that start each kind of MPI, best first. The Slurms of Cray and
# ParTec have plugins of their own.
PMI_LIBRARY = "I_MPI_PMI_LIBRARY"  # Intel MPI's variable for SLURM's library
PLUGINS = {
    "open_mpi": ("pmix", "pspmix"),
    "hydra": ("cray_shasta", "pmi2", "pspmix", "pmix"),
    "unknown": ("cray_shasta", "pspmix", "pmix", "pmi2"),
}


@dataclass(frozen=True)
class Job:
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
    """

    command: Sequence[str]
    ranks: int
    hosts: Sequence[Host] = ()
    cores: int = 1
    threads: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)
    again: bool = False

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
            return f"{ranks}, and this host has {self.cores} for the job"
        return ""

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores. Ranks that wait must then yield theirs."""
        return self.per_host > self.cores

    @property
    def forwarded(self) -> list[str]:
        """Names of the variables that ranks on other hosts need."""
        present = {name for name in os.environ if name in FORWARDED or name.startswith(PREFIXES)}
        return sorted(present | set(self.environ))

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


def open_mpi(program: str, job: Job) -> Line:
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
    return Line([*words, *job.command], {**for_launcher({}, os.geteuid()), **environ})


def hydra(program: str, job: Job) -> Line:
    """MPICH's mpiexec. It passes its environment to the ranks by itself."""
    words = [program, "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", job.listed()]
    words += ["-bind-to", f"core:{job.threads}" if job.binds else "none"]
    return Line([*words, *job.command], {})


def intel_mpi(program: str, job: Job) -> Line:
    """Intel MPI's mpiexec. It gives each rank as many cores as OpenMP has threads."""
    words = [program, "-n", str(job.ranks)]
    if job.hosts:
        words += ["-hosts", job.blocks("mpiexec"), "-ppn", str(job.per_host)]
    pin = {"I_MPI_PIN_DOMAIN": "omp"} if job.binds else {"I_MPI_PIN": "0"}
    return Line([*words, *job.command], pin)


def pals(program: str, job: Job) -> Line:
    """HPE's mpiexec (PALS). It passes its environment to the ranks by itself."""
    words = [program, "-n", str(job.ranks), "--ppn", str(job.per_host)]
    if job.hosts:
        words += ["--hosts", job.blocks("PALS")]
    if job.binds:
        words += ["--depth", str(job.threads), "--cpu-bind", "depth"]
    else:
        words += ["--cpu-bind", "none"]
    return Line([*words, *job.command], {})


def srun(program: str, plugin: str, job: Job) -> Line:
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
    return Line([*words, *job.command], environ)


def horovodrun(program: str, job: Job) -> Line:
    """Horovod's launcher. It starts the mpirun of Open MPI up to version 4, and binds no ranks."""
    words = [program, "-np", str(job.ranks), "-H", job.listed() or f"localhost:{job.ranks}"]
    return Line([*words, *job.command], for_launcher({}, os.geteuid()))


def mpirun_of_batch(ranks: int, *, per_node: int, threads: int) -> list[str]:
    """The words of mpirun in a batch script. The scheduler tells it the hosts.

    Args:
        ranks: number of ranks.
        per_node: ranks on each node.
        threads: cores of each rank.
    """
    found = identify("mpirun")
    kind = found.kind if found else ""
    if kind == "open_mpi":  # by itself it binds a rank to one core, with all its threads
        bound = ["--map-by", f"ppr:{per_node}:node:PE={threads}", "--bind-to", "core"]
        return ["mpirun", "-np", str(ranks), *bound]
    if kind == "hydra":
        return ["mpirun", "-n", str(ranks), "-ppn", str(per_node), "-bind-to", f"core:{threads}"]
    return ["mpirun", "-np", str(ranks)]


@dataclass(frozen=True)
class FoundLauncher:
    """A launcher that was found on this machine.

    Args:
        kind: open_mpi, hydra, intel_mpi, pals, srun or horovodrun.
        make: makes the line of a job.
        version: first line of what the program says of its version.
        note: see `Line`.
    """

    kind: str
    make: Callable[[Job], Line]
    version: str = ""
    note: str = ""


def find_launcher(wanted: str | None, scheduler: str | None) -> FoundLauncher:
    """The launcher to use.

    Args:
        wanted: its program, such as mpirun; None chooses by what is here.
        scheduler: scheduler of the batch job that this process runs in; None outside of one.

    Raises:
        SetupError: the launcher is not here, or is not a known one.
    """
    if wanted == "horovodrun":
        return _find_horovodrun()
    if wanted == "srun" or (wanted is None and scheduler == "slurm"):
        found = _find_srun(needed=wanted is not None)
        if found:
            return found
    tried = [wanted] if wanted else ["mpiexec", "mpirun"]
    known = [found for program in tried if (found := _known(program))]
    if not known:
        known = _known_beside_python(tried, needed=wanted is not None)
    if not known:
        raise SetupError(
            f"no launcher is here: tried {', '.join(tried)}",
            "load the module of your site's MPI, or name the launcher by --launcher",
        )
    # PALS comes with the machine and is preferred. Else take mpirun, the name in Open MPI's manual.
    return next((found for found in known if found.kind == "pals"), known[-1])


def _known_beside_python(programs: Sequence[str], *, needed: bool) -> list[FoundLauncher]:
    """The known ones of these programs that are beside this Python, though PATH has none.

    If PATH has programs of these names which are unknown, each one found has a note that says so.

    Args:
        programs: names of programs.
        needed: the user has named the program.

    Raises:
        SetupError: the named program is an unknown one on the PATH.
    """
    known = [found for program in programs if (found := _known(_beside_python(program)))]
    unknown = [path for program in programs if (path := shutil.which(program))]
    if not known or not unknown:
        return known
    says = _output(unknown[-1], "--version").strip().partition("\n")[0]
    cause = f"{unknown[-1]} is no launcher that is known (it says {says!r})"
    instead = _beside_python(programs[-1])
    if needed:
        raise SetupError(
            cause, f"load the module of your MPI, or leave out --launcher to use {instead}"
        )
    return [replace(found, note=f"{cause}: {instead} is used instead") for found in known]


def identify(program: str) -> FoundLauncher | None:
    """Find out which launcher a program is; None if it is not here or not a known one.

    It is looked for on the PATH, then beside this Python, whose environment need not be activated.
    """
    return _known(program) or _known(_beside_python(program))


def _beside_python(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def _known(program: str) -> FoundLauncher | None:
    path = shutil.which(program)
    if path is None:
        return None
    text = _output(program, "--version")
    version = text.strip().partition("\n")[0]
    if "(Open MPI)" in text or "(OpenRTE)" in text or "PRRTE" in text:
        return FoundLauncher("open_mpi", partial(open_mpi, program), version)
    if "Intel(R) MPI" in text:
        # Its mpirun is a shell script: a signal ends it, and the ranks without a checkpoint.
        itself = shutil.which(str(Path(path).with_name("mpiexec.hydra"))) or program
        return FoundLauncher("intel_mpi", partial(intel_mpi, itself), version)
    if "hydra" in text.lower():
        version = re.sub(r"\s+", " ", "".join(re.findall(r"Version:\s*\S+", text)))
        return FoundLauncher("hydra", partial(hydra, program), f"Hydra {version}".strip())
    if re.match(r"mpiexec version \d", text) or "pals" in Path(path).resolve().parts:
        return FoundLauncher("pals", partial(pals, program), version)
    return None


def _find_srun(*, needed: bool) -> FoundLauncher | None:
    if not shutil.which("srun"):
        if needed:
            raise SetupError(
                "srun is not here", "use it inside a SLURM job, or leave out --launcher"
            )
        return None
    if plugin := srun_plugin():
        version = _output("srun", "--version").strip()
        return FoundLauncher("srun", partial(srun, "srun", plugin), version)
    if not needed:
        return None
    if not (offered := _output("srun", "--mpi=list", needs_success=True)):
        raise SetupError(
            "srun finds no SLURM here", "use it inside a SLURM job, or --launcher mpirun"
        )
    if PMI_LIBRARY not in os.environ and (mpi := identify("mpirun")) and mpi.kind == "intel_mpi":
        raise SetupError(
            f"{PMI_LIBRARY} is not set: srun would start each rank of Intel MPI alone",
            "set it to the path of SLURM's libpmi2.so, or use --launcher mpiexec",
        )
    raise SetupError(
        f"srun offers {', '.join(offered.split())}, and this MPI supports none of them",
        "use --launcher mpirun; `srun --mpi=list` shows what it offers",
    )


def srun_plugin() -> str | None:
    """The plugin by which srun starts ranks of this MPI; None if there is none."""
    mpi = identify("mpirun") or identify("mpiexec")
    kind = "unknown" if mpi is None else mpi.kind
    if kind == "intel_mpi" and PMI_LIBRARY not in os.environ:
        return None  # each rank would be alone
    offered = re.findall(r"\w+", _output("srun", "--mpi=list", needs_success=True))
    fitting = [plugin for plugin in PLUGINS.get(kind, PLUGINS["hydra"]) if plugin in offered]
    return fitting[0] if fitting else None


def _find_horovodrun() -> FoundLauncher:
    mpi = identify("mpirun")
    if mpi is None:
        raise SetupError(
            "horovodrun needs mpirun, which is not here", "load the module of your MPI"
        )
    if mpi.kind != "open_mpi" or not re.search(r"\(Open MPI\) [1-4]\.", mpi.version):
        note = (
            f"horovodrun supports Open MPI up to version 4 only, and this is {mpi.version}: "
            "mpirun is used instead"
        )
        return FoundLauncher(mpi.kind, mpi.make, mpi.version, note)
    if not shutil.which("horovodrun"):
        raise SetupError(
            "horovodrun is not here", "python -m hpc_train.build.horovod, or use --launcher mpirun"
        )
    return FoundLauncher("horovodrun", partial(horovodrun, "horovodrun"), "horovodrun")


def _output(*words: str, needs_success: bool = False) -> str:
    return output(*words, timeout=60, errors=True, needs_success=needs_success)


def cores_here() -> int:
    """Physical cores that this process may use."""
    return len(physical_cores(os.sched_getaffinity(0)))


def threads_of(environ: Mapping[str, str], cores: int, per_host: int) -> int:
    """Threads of a rank: what the user has set, or an equal part of the host's cores."""
    given = environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, cores // per_host)
