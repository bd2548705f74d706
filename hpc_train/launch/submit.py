"""`hpc-train submit`: write a job's script into its run directory, and queue it."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_train.config import file as config_file
from hpc_train.config.durations import TIME_FORMS, parse_duration
from hpc_train.config.keys import check_key
from hpc_train.errors import HpcTrainError, SetupError, UserError
from hpc_train.launch import Scheduler, sites
from hpc_train.launch.batch import BatchJob, find_commands, text
from hpc_train.launch.launchers import srun_plugin
from hpc_train.launch.protocol import STOP
from hpc_train.launch.sites import Site

COMMANDS = {
    "slurm": ("sbatch", "--parsable"),
    "pbs": ("qsub",),
    "torque": ("qsub",),
    "mpijob": ("kubectl", "create", "-o", "name", "-f"),
}
HOUR = 3600
RESTARTS, REQUEUES = 3, 50
# Options that a scheduler cannot use. They are refused, because ignoring them would mislead.
NOT_FOR: dict[str, tuple[str, ...]] = {
    "slurm": ("image",),
    "pbs": ("image", "chain"),
    "torque": ("image", "chain"),
    "mpijob": ("time", "account", "queue", "directive", "setup", "requeue_by", "chain", "sweep"),
}


@dataclass(frozen=True)
class SubmitRequest:
    """What the user asks for. None and empty values stand for the site's, or else the default.

    Args:
        config: path of CONFIG.yaml.
        options: --section.key VALUE ..., for the training.
        scheduler: slurm, pbs, torque or mpijob.
        site: name or file of a site profile.
        nodes, ranks_per_node, threads: number of nodes, ranks on each node, cores of each rank.
        time: time limit, such as 02:00:00 or 2h; None: one hour.
        name: job name; by default that of the run directory.
        account, queue: account that pays, and queue or partition.
        directive: further directives.
        setup: shell lines to run first.
        launcher: srun, mpirun or horovodrun; by default `hpc-train launch`.
        max_restarts: maximum number of restarts by `hpc-train launch`; None: RESTARTS.
        requeue_by: how the job is queued again when it has stopped early.
        max_requeues: maximum number of requeues; None: REQUEUES.
        chain: number of jobs to queue at once; each waits for the one before it.
        sweep: section.key=V1,V2,...: an array with a task for each combination.
        image: container image, for mpijob.
        dry_run: print the script, and queue nothing.
    """

    config: str
    options: Sequence[str] = ()
    scheduler: Scheduler | None = None
    site: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    threads: int | None = None
    time: str | None = None
    name: str | None = None
    account: str | None = None
    queue: str | None = None
    directive: Sequence[str] = ()
    setup: Sequence[str] = ()
    launcher: str | None = None
    max_restarts: int | None = None
    requeue_by: Literal["requeue", "submit", "never"] | None = None
    max_requeues: int | None = None
    chain: int = 1
    sweep: Sequence[str] = ()
    image: str = ""
    dry_run: bool = False


def submit(request: SubmitRequest) -> list[str]:
    """Write a job's script and queue it; returns the ids of the queued jobs.

    The script stays in the run directory, as job.sh or job.yaml.

    Raises:
        UserError: the request cannot be met.
        HpcTrainError: the scheduler refuses the job.
    """
    batch = make(request)
    script = text(batch)
    if request.dry_run:
        print(script, end="")
        return []
    program = COMMANDS[batch.scheduler]
    if not shutil.which(program[0]):
        raise SetupError(
            f"{program[0]} is not here",
            "submit from a login node, or look at the script with --dry_run",
        )
    run_dir = Path(batch.run_dir)
    if (run_dir / STOP).exists():
        raise UserError(f"{run_dir / STOP} is there", "remove it to resume the run")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = Path(batch.script)
    path.write_text(script)
    path.chmod(0o755)
    ids: list[str] = []
    for _ in range(request.chain):
        waits = [f"--dependency=afternotok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        ids.append(_queue([*program, *waits, str(path)]))
    return ids


def _queue(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join((done.stderr or done.stdout).split())
        raise HpcTrainError(f"{shlex.join(words)}: {told}", "change the option that it refuses")
    return done.stdout.strip().partition(";")[0]


def make(request: SubmitRequest) -> BatchJob:
    """Make the batch job of a request.

    Raises:
        UserError: its configuration is wrong, or the options do not fit together.
    """
    config = config_file.load(request.config, request.options)
    site = sites.load_site(request.site) if request.site else None
    scheduler = request.scheduler or (site.scheduler if site else None) or _scheduler_here()
    _check(request, site, scheduler)
    ranks_per_node = request.ranks_per_node or (site.ranks_per_node if site else 1)
    threads = request.threads or (site.threads if site else 1)
    sweep = _sweep(request.sweep)
    if len(sweep) == 1 and scheduler != "slurm":
        raise UserError(
            "--sweep has a single task, and PBS makes no array of one", "give more values"
        )
    for words in sweep:
        config_file.load(request.config, [*request.options, *words])
    run_dir = config.run.dir
    numbers = {
        "nodes": request.nodes,
        "ranks": request.nodes * ranks_per_node,
        "ranks_per_node": ranks_per_node,
        "threads": threads,
        "cores": request.nodes * ranks_per_node * threads,
        "gpus": request.nodes * (site.gpus_per_node if site else 0),
        "memory_gb": request.nodes * (site.memory_gb_per_node if site else 0),
    }
    environ = dict(site.environ) if site else {}
    if request.threads:
        environ["OMP_NUM_THREADS"] = str(request.threads)
    program = ["hpc-train"] if scheduler == "mpijob" else [sys.executable, "-m", "hpc_train"]
    script = Path(run_dir, "job.yaml" if scheduler == "mpijob" else "job.sh")
    return BatchJob(
        scheduler=scheduler,
        name=request.name or Path(run_dir).name,
        nodes=request.nodes,
        ranks_per_node=ranks_per_node,
        threads=threads,
        seconds=_time_limit(request.time),
        command=[*program, "train", request.config, *request.options],
        run_dir=run_dir,
        launcher=_launcher(request, site, scheduler, program, numbers),
        script=str(script.absolute()),
        requeue_by=_requeue_by(request, scheduler),
        max_requeues=REQUEUES if request.max_requeues is None else request.max_requeues,
        account=request.account or "",
        account_option=site.account_option if site else "-A",
        queue=request.queue or (site.queue if site else ""),
        resources=sites.filled([site.resources], numbers)[0] if site else "",
        directives=[*(site.directives if site else []), *request.directive],
        environ=environ,
        setup=[*(site.setup if site else []), *(request.setup or _activation())],
        sweep=sweep,
        image=request.image,
        commands=find_commands(scheduler),
    )


def _check(request: SubmitRequest, site: Site | None, scheduler: Scheduler) -> None:
    """Refuse options that would be accepted and ignored.

    Raises:
        UserError: options that do not go together, or not with this site or scheduler.
    """
    if site:
        _check_site(request, site, scheduler)
    for option in NOT_FOR[scheduler]:
        if getattr(request, option) != getattr(SubmitRequest, option):
            raise UserError(f"--{option} means nothing to {scheduler}", "leave it out")
    torque_cores = scheduler == "torque" and (request.threads or 1) > 1
    starts_itself = request.launcher in ("srun", "mpirun") or bool(
        not request.launcher and site and site.launcher
    )
    for wrong, why, remedy in (
        (
            scheduler == "mpijob" and not request.image,
            "an MPIJob runs in containers",
            "give --image NAME with hpc_train in it",
        ),
        (
            request.requeue_by == "requeue" and scheduler != "slurm",
            f"--requeue_by requeue is for SLURM, and the scheduler is {scheduler}",
            "give --requeue_by submit",
        ),
        (
            request.chain > 1 and (request.sweep or request.requeue_by not in (None, "never")),
            "--chain cannot be combined with --sweep or --requeue_by",
            "leave one out: all jobs of a chain are in the queue already",
        ),
        (
            request.max_requeues is not None and _requeue_by(request, scheduler) == "never",
            "--max_requeues is given, but this job is never queued again",
            "leave it out",
        ),
        (
            request.launcher == "srun" and scheduler != "slurm",
            f"srun is for SLURM, and the scheduler is {scheduler}",
            "leave out --launcher",
        ),
        (
            starts_itself and torque_cores,
            "Torque's slots are cores: --launcher and --threads cannot be combined",
            "leave one out",
        ),
        (
            request.max_restarts is not None and starts_itself,
            "--max_restarts is for `hpc-train launch`, which does not start it",
            "leave out --max_restarts, or --launcher and the `launcher` line of the site profile",
        ),
    ):
        if wrong:
            raise UserError(why, remedy)


def _check_site(request: SubmitRequest, site: Site, scheduler: Scheduler) -> None:
    if site.scheduler != scheduler:
        raise UserError(
            f"site {request.site} has {site.scheduler}, not {scheduler}",
            "leave out --site or --scheduler",
        )
    for need in site.needs:
        if not getattr(request, need):
            raise UserError(f"site {request.site} requires --{need}", f"give --{need}")
    for option in ("threads", "ranks_per_node"):
        if site.bound and getattr(request, option):
            raise UserError(
                f"site {request.site} lists ranks' cores: --{option} is {getattr(site, option)}",
                "leave it out, or copy the profile to a file and change it",
            )


def _time_limit(text: str | None) -> int:
    """Seconds of --time.

    Raises:
        UserError: it is not a time span, or has no unit: 30 is minutes to SLURM, seconds to PBS.
    """
    if text is None:
        return HOUR
    seconds = None if text.isdecimal() else parse_duration(text)
    if not seconds:
        raise UserError(f"--time is {text!r}", f"give {TIME_FORMS}, such as 02:00:00")
    return seconds


def _requeue_by(
    request: SubmitRequest, scheduler: Scheduler
) -> Literal["requeue", "submit", "never"]:
    if request.chain > 1:
        return "never"  # the next job of the chain is in the queue
    return request.requeue_by or ("requeue" if scheduler == "slurm" else "submit")


def _scheduler_here() -> Scheduler:
    if shutil.which("sbatch"):
        return "slurm"
    if shutil.which("qsub"):
        return "pbs"
    raise UserError("neither sbatch nor qsub is here", "give --scheduler or --site")


def _launcher(
    request: SubmitRequest,
    site: Site | None,
    scheduler: Scheduler,
    program: Sequence[str],
    numbers: Mapping[str, int],
) -> list[str]:
    """The launcher's line in front of the command."""
    if request.launcher == "srun":
        plugin = srun_plugin()
        return ["srun", *([f"--mpi={plugin}"] if plugin else []), "--kill-on-bad-exit=1"]
    if request.launcher == "mpirun":
        return ["mpirun", "-np", str(numbers["ranks"])]
    if site and site.launcher and not request.launcher:
        return sites.filled(site.launcher, numbers)
    words = [*program, "launch"]
    if request.launcher == "horovodrun":
        words += ["--launcher", "horovodrun"]
    if scheduler == "torque" and numbers["threads"] > 1:  # Torque's slots are cores
        words += ["--ranks_per_node", str(numbers["ranks_per_node"])]
    restarts = RESTARTS if request.max_restarts is None else request.max_restarts
    return [*words, "--max_restarts", str(restarts), "--"]


def _activation() -> list[str]:
    """Shell lines that activate this Python's virtual environment, if it has one."""
    if sys.prefix == sys.base_prefix:
        return []
    activate = shlex.quote(str(Path(sys.prefix, "bin", "activate")))
    return ["# shellcheck source=/dev/null", f". {activate}"]


def _sweep(axes: Sequence[str]) -> list[list[str]]:
    """The options of each task, one task for each combination of section.key=V1,V2.

    Raises:
        UserError: an axis has another form, or its key is unknown.
    """
    if not axes:
        return []
    choices = []
    for axis in axes:
        key, _, values = axis.partition("=")
        if not all(values.split(",")):
            raise UserError(f"--sweep has {axis!r}", "write section.key=VALUE,VALUE")
        if key == "run.dir":
            raise UserError("--sweep has run.dir", "each task has a directory of its own")
        if [other.partition("=")[0] for other in axes].count(key) > 1:
            raise UserError(f"--sweep has {key} twice", f"write {key}=VALUE,VALUE once")
        check_key(key, config_file.KEYS)
        choices.append([(f"--{key}", value) for value in values.split(",")])
    return [list(itertools.chain(*combination)) for combination in itertools.product(*choices)]
