"""Find a launcher on this machine: which program it is, and the line that it takes."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpc_train.errors import SetupError
from hpc_train.host.cores import cpu_quota, physical_cores
from hpc_train.host.programs import output
from hpc_train.launch.hosts import slurm_cpus
from hpc_train.launch.lines import (
    LaunchedJob,
    Line,
    flux_run,
    horovodrun,
    hydra,
    intel_mpi,
    jsrun,
    open_mpi,
    pals,
    srun,
)
from hpc_train.launch.schedulers import scheduler_of

# For srun's --mpi: Slurm's plugins that start each kind of MPI, best first. The Slurms of Cray and
# ParTec have plugins of their own.
PMI_LIBRARY = "I_MPI_PMI_LIBRARY"  # Intel MPI's variable for SLURM's library
PLUGINS = {
    "open_mpi": ("pmix", "pspmix"),
    "hydra": ("cray_shasta", "pmi2", "pspmix", "pmix"),
    "unknown": ("cray_shasta", "pspmix", "pmix", "pmi2"),
}


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
        kind: open_mpi, hydra, intel_mpi, pals, srun, flux, jsrun or horovodrun.
        make: makes the line of a job.
        version: first line of what the program says of its version.
        note: see `Line`.
    """

    kind: str
    make: Callable[[LaunchedJob], Line]
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
    if wanted == "flux" or (wanted is None and scheduler == "flux"):
        return _find_flux()
    if wanted == "jsrun" or (wanted is None and scheduler == "lsf" and shutil.which("jsrun")):
        return _find_jsrun()
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
        # By its path, mpirun finds its own installation on the other hosts too. A login shell there
        # does not know that of a Python environment.
        ours = path == _beside_python(Path(path).name)
        return FoundLauncher("open_mpi", partial(open_mpi, path if ours else program), version)
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


def _find_flux() -> FoundLauncher:
    if not shutil.which("flux"):
        raise SetupError("flux is not here", "use it inside a Flux job, or leave out --launcher")
    mpi = identify("mpirun")
    options: list[str] = []
    if mpi and mpi.kind == "open_mpi" and "mca:pmix:flux" not in _output("ompi_info", "--parsable"):
        options = ["-o", "pmi=pmix"]  # by Flux's own protocol each rank would be alone
    version = _output("flux", "version").strip().partition("\n")[0]
    return FoundLauncher("flux", partial(flux_run, options), version)


def _find_jsrun() -> FoundLauncher:
    if not shutil.which("jsrun"):
        raise SetupError("jsrun is not here", "use it inside an LSF job, or leave out --launcher")
    note = "jsrun chooses the hosts itself: a restart cannot leave one out"
    return FoundLauncher("jsrun", jsrun, "jsrun", note)


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


def cores_here(*, has_ranks: bool = True) -> int:
    """Physical cores that this process may use. A container may have the time of fewer.

    Args:
        has_ranks: whether ranks start on this host. If not, its quota is not that of the hosts.
    """
    quota = cpu_quota() if has_ranks else math.inf
    return math.ceil(min(len(physical_cores(os.sched_getaffinity(0))), quota))


def _is_one_of(hosts: Collection[str]) -> bool:
    """Whether this host is one of these, which may be written with their domains or without."""
    here = {socket.gethostname().partition(".")[0], "localhost", "127.0.0.1"}
    return any(host in here or host.partition(".")[0] in here for host in hosts)


def cores_of_hosts(environ: Mapping[str, str], hosts: Collection[str] = ()) -> int:
    """Physical cores of each host of this job: those that SLURM has given, or as many as here.

    Args:
        environ: the variables of this process.
        hosts: the names of the hosts; none stand for this one.
    """
    cpus = slurm_cpus(environ)
    if not cpus:
        return cores_here(has_ranks=not hosts or _is_one_of(hosts))
    if "SLURMD_NODENAME" in environ:  # this is one of the hosts
        return min(cpus, cores_here())
    # `salloc` runs its command on the login host, which may have more cores, or fewer.
    queue, nodes = (environ.get(f"SLURM_JOB_{name}", "") for name in ("PARTITION", "NODELIST"))
    node = scheduler_of("slurm").node_cores(queue, nodes)
    if node is None:
        return cpus
    by_core = environ.get("SLURM_THREADS_PER_CORE") == "1"
    return min(node.cores, cpus if by_core else max(1, cpus // node.cpus_of_core))


def threads_of(environ: Mapping[str, str], cores: int, per_host: int) -> int:
    """Threads of a rank: what the user has set, or an equal part of the host's cores.

    It is at most SLURM's --cpus-per-task.
    """
    given = environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    asked = int(environ.get("SLURM_CPUS_PER_TASK") or cores)
    return max(1, min(asked, cores // per_host))
