"""`hpc-train submit`: write a job's script into its run directory, and queue it."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.config import file as config_file
from hpc_train.config.durations import TIME_FORMS, parse_duration
from hpc_train.config.keys import check_key
from hpc_train.errors import HpcTrainError, SetupError, UserError
from hpc_train.launch import Scheduler, resources, sites
from hpc_train.launch.batch import BatchJob, text
from hpc_train.launch.launchers import mpirun_of_batch, srun_plugin
from hpc_train.launch.protocol import STOP
from hpc_train.launch.queued import one_submission, record_queued
from hpc_train.launch.request import SubmitRequest, check_request, requeue_by
from hpc_train.launch.resources import JobSize, slurm_node
from hpc_train.launch.sites import Site

COMMANDS = {
    "slurm": ("sbatch", "--parsable"),
    "pbs": ("qsub",),
    "torque": ("qsub",),
    "mpijob": ("kubectl", "create", "-o", "name", "-f"),
}
COPY = "job.yaml"  # in the run directory: the configuration as it was submitted
HOUR = 3600
LATER = {*config_file.PATH_KEYS} - {"run.dir"}  # the job may set variables for them
RESTARTS, REQUEUES = 3, 50


def submit(request: SubmitRequest) -> list[str]:
    """Write a job's script and queue it; returns the ids of the queued jobs.

    The script stays in the run directory, as job.sh or mpijob.yaml. So does a copy of the
    configuration, job.yaml, which the job reads: later changes of the original do not matter.

    Raises:
        UserError: the request cannot be met, or a job of the run is queued or runs already.
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
    ids: list[str] = []
    with one_submission(run_dir):
        if request.config and batch.scheduler != "mpijob":
            (run_dir / COPY).write_bytes(Path(request.config).read_bytes())
        path = Path(batch.script)
        path.write_text(script)
        path.chmod(0o755)
        for _ in range(request.chain):
            waits = []
            if ids:
                waits = [f"--dependency=afternotok:{ids[-1]}", "--kill-on-invalid-dep=yes"]
            ids.append(_queue([*program, *waits, str(path)]))
            record_queued(run_dir, batch.scheduler, ids[-1])
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
    run_dir = _run_dir(request)
    profile = sites.load_site(request.site) if request.site else None
    scheduler = request.scheduler or (profile.scheduler if profile else None) or _scheduler_here()
    site = profile or Site(scheduler)
    if request.site in sites.names():
        _say(f"the profile {request.site} was never run at that site: check what --dry_run prints")
    check_request(request, site, scheduler)
    sweep = _sweep(request.sweep)
    if len(sweep) == 1 and scheduler != "slurm":
        raise UserError(
            "--sweep has a single task, and PBS makes no array of one", "give more values"
        )
    for words in sweep:
        config_file.load(request.config, [*request.options, *words], LATER)
    queue = request.queue or (request.qos if site.queue_option == "--qos" else "") or site.queue
    ranks_per_node = request.ranks_per_node or site.ranks_per_node
    threads, whole = _threads(request, site, scheduler, ranks_per_node, queue)
    size = JobSize(
        request.nodes,
        ranks_per_node,
        threads,
        request.gpus or site.gpus_per_node,
        request.memory or site.memory_gb_per_node,
    )
    environ = dict(site.environ)
    if request.threads:
        environ["OMP_NUM_THREADS"] = str(request.threads)
    program = ["hpc-train"] if scheduler == "mpijob" else [sys.executable, "-m", "hpc_train"]
    script = Path(run_dir, "mpijob.yaml" if scheduler == "mpijob" else "job.sh")
    config = request.config or ""
    # An MPIJob's pods may not see this run directory, and a dry run writes none.
    if scheduler != "mpijob" and not request.dry_run:
        config = str(Path(run_dir, COPY))
    placed = [
        line
        for line in site.directives
        if not (request.exclusive and line.startswith("-l place="))  # PBS takes one place only
    ]
    return BatchJob(
        scheduler=scheduler,
        name=request.name or Path(run_dir).name,
        nodes=request.nodes,
        ranks_per_node=ranks_per_node,
        threads=threads,
        seconds=_time_limit(request.time),
        command=request.command or [*program, "train", config, *request.options],
        run_dir=run_dir,
        launcher=_launcher(request, site, scheduler, program, size.numbers),
        script=str(script.absolute()),
        requeue_by=requeue_by(request, scheduler),
        max_requeues=REQUEUES if request.max_requeues is None else request.max_requeues,
        account=request.account or "",
        account_option=site.account_option,
        queue=queue,
        queue_option=site.queue_option,
        resources=resources.pbs_resources(request, site, size),
        of_each_node=resources.of_each_node(scheduler, size),
        directives=[
            *resources.directives(request, site, size, scheduler),
            *whole,
            *placed,
            *request.directive,
        ],
        environ=environ,
        setup=[*site.setup, *(request.setup or _activation())],
        sweep=sweep,
        image=request.image,
    )


def _run_dir(request: SubmitRequest) -> str:
    """The run directory that the configuration or --run.dir names.

    Raises:
        UserError: the configuration is wrong, or does not go with a command.
    """
    if bool(request.config) == bool(request.command):
        raise UserError(
            "give CONFIG.yaml, or a command after --, and not both",
            "hpc-train submit my.yaml, or hpc-train submit --run.dir runs/my -- python my_loop.py",
        )
    if request.command:
        if request.command[0] == "train":
            raise UserError("train is submitted by its configuration", "hpc-train submit my.yaml")
        keys = [word.partition("=")[0] for word in request.options if word.startswith("--")]
        if set(keys) != {"--run.dir"} or request.sweep:
            raise UserError(
                "a command takes --run.dir, and no other key of a configuration",
                "give --run.dir DIR, the folder of the job's script and output: the one that your "
                "program passes to Loop or Trainer",
            )
    return config_file.load(request.config, request.options, LATER).run.dir


def _threads(
    request: SubmitRequest, site: Site, scheduler: Scheduler, ranks_per_node: int, queue: str
) -> tuple[int, list[str]]:
    """Cores of each rank, and the directives by which SLURM counts cores and no hardware threads.

    By default the ranks of a node share all its cores. Only SLURM says how many these are.
    """
    # Sites count in their own way. SLURM takes --hint or this directive, not both.
    said = any(word.startswith(("--hint", "--threads-per-core")) for word in request.directive)
    by_core = [] if scheduler != "slurm" or said else ["--threads-per-core=1"]
    if given := request.threads or site.threads:
        return given, [] if request.site else by_core
    partition = queue if site.queue_option == "--partition" else ""
    node = slurm_node(partition) if scheduler == "slurm" else None
    threads = node.cores // ranks_per_node if node else 0
    if node and threads:
        _say(f"each rank has {threads} of a node's {node.cores} cores: --threads changes it")
        return threads, by_core if node.hardware_threads > 1 else []
    if scheduler != "mpijob":
        _say("each rank has 1 core: --threads N gives it more")
    return 1, [] if request.site else by_core


def _say(text: str) -> None:
    print(f"hpc-train submit: {text}", file=sys.stderr, flush=True)


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


def _scheduler_here() -> Scheduler:
    if shutil.which("sbatch"):
        return "slurm"
    if shutil.which("qsub"):
        return "pbs"
    raise UserError("neither sbatch nor qsub is here", "give --scheduler or --site")


def _launcher(
    request: SubmitRequest,
    site: Site,
    scheduler: Scheduler,
    program: Sequence[str],
    numbers: Mapping[str, int],
) -> list[str]:
    """The launcher's line in front of the command."""
    if request.launcher == "srun":
        plugin = srun_plugin()
        return ["srun", *([f"--mpi={plugin}"] if plugin else []), "--kill-on-bad-exit=1"]
    if request.launcher == "mpirun":
        if scheduler == "mpijob":  # the image's mpirun is another one
            return ["mpirun", "-np", str(numbers["ranks"])]
        per_node, threads = numbers["ranks_per_node"], numbers["threads"]
        return mpirun_of_batch(numbers["ranks"], per_node=per_node, threads=threads)
    if site.launcher and not request.launcher:
        return sites.filled(site.launcher, numbers)
    words = [*program, "launch"]
    if request.launcher == "launch" and site.launcher:
        kept = dict[str, int | str](numbers) | {"nodes": "{nodes}", "ranks": "{ranks}"}
        words += [
            "--line",
            shlex.join(sites.filled(site.launcher, kept)),
        ]  # restarts may have fewer
        words += ["--ranks_per_node", str(numbers["ranks_per_node"])]
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
