"""A site's own launcher line, for `hpc-train launch --line`: with it restarts work there, too.

The line keeps its binding. Each attempt puts its own numbers into the line, and adds its hosts.
"""

from __future__ import annotations

import shlex
import shutil
from functools import partial
from pathlib import Path

from hpc_train.errors import SetupError, UserError
from hpc_train.launch.hosts import compress
from hpc_train.launch.launchers import FoundLauncher, identify
from hpc_train.launch.left_behind import step_name
from hpc_train.launch.lines import KEEPALIVE, LaunchedJob, Line
from hpc_train.launch.resources import filled
from hpc_train.mpi.environment import for_launcher


def launcher_of(text: str) -> FoundLauncher:
    """The launcher that starts jobs by a site's line.

    Args:
        text: the line, such as "mpiexec -n {ranks} --ppn {ranks_per_node} --cpu-bind depth". It
            may contain {nodes}, {ranks}, {ranks_per_node}, {threads} and {cores}.

    Raises:
        UserError: the line cannot be read, or contains another {name}.
        SetupError: its program is not here, or is not a known launcher.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--line {text!r} cannot be read: {error}", "close its quotes") from None
    _filled(words, LaunchedJob([], 1))
    if not words:
        raise UserError("--line names no launcher", "give a line, such as 'srun --cpu-bind=cores'")
    if Path(words[0]).name == "srun":
        return FoundLauncher("srun", partial(_srun, words))
    if not shutil.which(words[0]):
        raise SetupError(f"there is no program {words[0]}", "load the module of your site's MPI")
    found = identify(words[0])
    if found is None:
        raise SetupError(
            f"{words[0]} is no launcher that is known", "give a line of srun, mpiexec or mpirun"
        )
    if found.kind == "intel_mpi":  # not its script, which does not pass signals on
        words[0] = found.make(LaunchedJob([], 1)).words[0]
    return FoundLauncher(found.kind, partial(_mpiexec, words, found.kind), found.version)


def _filled(words: list[str], job: LaunchedJob) -> list[str]:
    numbers = {
        "nodes": max(1, len(job.hosts)),
        "ranks": job.ranks,
        "ranks_per_node": job.per_host,
        "threads": job.threads,
        "cores": job.ranks * job.threads,
    }
    return filled(words, numbers, "--line")


def _srun(words: list[str], job: LaunchedJob) -> Line:
    added = [f"--ntasks={job.ranks}", f"--job-name={step_name()}"]
    if job.hosts:
        nodes = compress(host.name for host in job.hosts)
        added += [f"--nodes={len(job.hosts)}", f"--nodelist={nodes}"]
        added += [f"--ntasks-per-node={job.per_host}"] if job.even else []
    # Else srun waits for the cores of a failed step, which may not end.
    environ = {"SLURM_OVERLAP": "1"} if job.again else {}
    return Line([*_filled(words, job), *added, *job.words], environ)


def _mpiexec(words: list[str], kind: str, job: LaunchedJob) -> Line:
    filled, environ, hosts = _filled(words, job), dict[str, str](), list[str]()
    if kind == "open_mpi":
        environ = for_launcher({})
    if job.hosts and kind == "open_mpi":
        environ |= KEEPALIVE
        hosts = ["--host", job.listed(), *(w for name in job.forwarded for w in ("-x", name))]
    elif job.hosts and kind == "pals":
        hosts = ["--hosts", job.blocks("PALS")]
    elif job.hosts and kind == "intel_mpi":
        hosts = ["-hosts", job.blocks("mpiexec")]
    elif job.hosts:
        hosts = ["-hosts", job.listed()]
    return Line([*filled, *hosts, *job.words], environ)
