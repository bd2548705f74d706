"""Make the batch job of a request: it is completed by the site's profile and by defaults."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.config import RunConfig
from hpc_train.config import file as config_file
from hpc_train.config.durations import TIME_FORMS, parse_duration
from hpc_train.config.keys import check_key
from hpc_train.errors import UserError, print_line
from hpc_train.launch import SchedulerName, resources, sites
from hpc_train.launch.batch import BatchJob, find_commands
from hpc_train.launch.image import in_image
from hpc_train.launch.launchers import mpirun_of_batch, srun_plugin
from hpc_train.launch.request import SubmitRequest, check_request, requeue_by
from hpc_train.launch.resources import Resources
from hpc_train.launch.schedulers import scheduler_here, scheduler_of
from hpc_train.launch.schedulers.kubernetes import CONFIG, on_volume
from hpc_train.launch.sites import Site
from hpc_train.launch.staged import Staging, made_staging, one_per_node

COPY = "job.yaml"  # in the run directory: the configuration as it was submitted
HOUR = 3600
LATER = {*config_file.PATH_KEYS} - {"run.dir"}  # the job may set variables for them
RESTARTS, REQUEUES = 3, 50


def make(request: SubmitRequest) -> BatchJob:
    """Make the batch job of a request.

    Raises:
        UserError: its configuration is wrong, or the options do not fit together.
    """
    config = _config_of(request)
    run_dir = config.run.dir
    _check_names(request, run_dir)
    profile = sites.load_site(request.site) if request.site else None
    for folder in profile.unseen if profile else ():
        _check_seen(folder, run_dir, f"compute nodes of {request.site}")
    scheduler = request.scheduler or (profile.scheduler if profile else scheduler_here())
    site = profile or Site(scheduler)
    if request.site in sites.names():
        _say(f"the profile {request.site} was never run at that site: check what --dry_run prints")
    check_request(request, site, scheduler)
    sweep = [*request.tasks] or _sweep(request.sweep)
    if len(sweep) == 1 and scheduler in ("pbs", "torque"):
        raise UserError(
            "a sweep has a single task, and PBS makes no array of one", "give more values"
        )
    seen: set[str] = set()
    for words in sweep:
        made = repr(config_file.load(request.config, [*request.options, *words], LATER))
        if made in seen:
            raise UserError(
                f"the sweep has two tasks that do the same, again with {' '.join(words)}",
                "give each value once",
            )
        seen.add(made)
    asked = _resources(request, site, scheduler)
    environ = _environ(request, site)
    in_pods = scheduler == "mpijob"
    program = ["hpc-train"] if in_pods else [sys.executable, "-m", "hpc_train"]
    script = Path(run_dir, "mpijob.yaml" if in_pods else "job.sh")
    command = list(request.command)
    if not command:
        command = [*program, "train", _config(request, run_dir, scheduler), *request.options]
    if in_pods and request.config:
        command += ["--run.dir", on_volume(run_dir)]
    batch = BatchJob(
        scheduler=scheduler,
        name=request.name
        or re.sub(r"[^\w.,:=@+~-]", "-", Path(run_dir).absolute().name, flags=re.ASCII),
        resources=asked,
        command=command,
        run_dir=run_dir,
        launcher=_launcher(request, site, scheduler, program, asked),
        script=str(script.absolute()),
        staging=_staging(request, site, scheduler, program, asked) if request.stage else None,
        requeue_by=requeue_by(request, scheduler),
        max_requeues=REQUEUES if request.max_requeues is None else request.max_requeues,
        environ=environ,
        setup=[*site.setup, *(request.setup or _activation(os.environ, loaded=not site.setup))],
        sweep=sweep,
        tasks_at_once=request.tasks_at_once or 0,
        stops_itself=bool(request.config) and config.run.time_limit == "auto",
        image=request.image if in_pods else "",
        configuration=Path(request.config).read_text(encoding="utf-8")
        if in_pods and request.config
        else "",
        commands=find_commands(scheduler),
    )
    _check_directives(batch, site.needs_directives, request.site)
    return in_image(batch, request, site, config) if request.image and not in_pods else batch


def _environ(request: SubmitRequest, site: Site) -> dict[str, str]:
    """The variables that the job sets."""
    threads = {"OMP_NUM_THREADS": str(request.threads)} if request.threads else {}
    return {**site.environ, **threads}


def _check_names(request: SubmitRequest, run_dir: str) -> None:
    """Refuse names that cannot be those of files.

    Raises:
        UserError: the run directory's name is empty, or the job's name would be in a folder.
    """
    if not run_dir:
        raise UserError("run.dir is empty", "give --run.dir DIR: a variable in it may not be set")
    if {*"/[]\n"} & {*(request.name or "")}:
        remedy = "leave out slashes, brackets and line breaks"
        raise UserError(f"--name is {request.name!r}", remedy)


def _check_seen(folder: str, run_dir: str, who: str) -> None:
    """Refuse paths of the job in a folder that compute nodes do not see, also by links.

    Raises:
        UserError: the run directory, the environment or the working directory is there.
    """
    unseen = {Path(folder), Path(folder).resolve()}
    for path in (Path(run_dir).absolute(), Path(sys.prefix), Path.cwd()):
        if unseen & {path, *path.parents, path.resolve(), *path.resolve().parents}:
            raise UserError(
                f"{path} is in {folder}, which {who} do not see",
                "put run.dir and the Python environment on another file system, and submit from it",
            )


def _config_of(request: SubmitRequest) -> RunConfig:
    """The configuration; that of a command has only a run directory.

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
    return config_file.load(request.config, request.options, LATER)


def _check_directives(batch: BatchJob, needs: Sequence[str], site: str | None) -> None:
    """Refuse a job without a directive that its site requires, from an option or by itself.

    Raises:
        UserError: no directive begins as a required one does.
    """
    own = scheduler_of(batch.scheduler).directives(batch) if needs else ()
    for begin in needs:
        if not any(line.startswith(begin) for line in (*own, *batch.resources.directives)):
            raise UserError(
                f"site {site} requires a directive {begin}...",
                f"give --directive '{begin}...', as the site's documentation describes it",
            )


def _config(request: SubmitRequest, run_dir: str, scheduler: SchedulerName) -> str:
    """The path of the configuration that the job reads."""
    if scheduler == "mpijob":
        return CONFIG
    # A dry run writes no copy.
    return (request.config or "") if request.dry_run else str(Path(run_dir, COPY))


def _resources(request: SubmitRequest, site: Site, scheduler: SchedulerName) -> Resources:
    seconds = _time_limit(request.time)
    named = request.queue or (request.qos if site.queue_option == "--qos" else "")
    queue = sites.queue_for(site, request.site or "", named, request.nodes, seconds)
    ranks_per_node = request.ranks_per_node or site.ranks_per_node
    threads, whole = _threads(request, site, scheduler, ranks_per_node, queue)
    placed = [
        line
        for line in site.directives
        if not (request.exclusive and line.startswith("-l place="))  # PBS takes one place only
    ]
    asked = Resources(
        nodes=request.nodes,
        ranks_per_node=ranks_per_node,
        threads=threads,
        seconds=seconds,
        gpus=request.gpus or site.gpus_per_node,
        memory_gb=request.memory or site.memory_gb_per_node,
        cores_per_gpu=site.cores_per_gpu,
        account=request.account or "",
        queue=queue,
        qos="" if site.queue_option == "--qos" else request.qos,
        constraint=request.constraint or site.constraint,
        reservation=request.reservation,
        exclusive=request.exclusive or site.exclusive,
        mail=request.mail,
        text=request.resources or site.resources,
        directives=[*whole, *placed, *request.directive],
        account_option=site.account_option,
        queue_option=site.queue_option,
        gpu_option=site.gpu_option or scheduler_of(scheduler).gpu_option,
    )
    _check_cores(asked)
    if not asked.text:
        return asked
    return resources.with_numbers(asked, {"gpus": request.gpus, "memory": request.memory})


def _check_cores(asked: Resources) -> None:
    """Refuse ranks that need more cores than come with the GPUs, where a site counts so."""
    ranks, gpus = asked.ranks_per_node * asked.threads, asked.gpus * asked.cores_per_gpu
    if asked.cores_per_gpu and ranks > gpus:
        raise UserError(
            f"{asked.gpus} GPUs come with {gpus} cores, and {asked.ranks_per_node} ranks of "
            f"{asked.threads} cores need {ranks}",
            "give fewer --threads, or more --gpus",
        )


def _threads(
    request: SubmitRequest, site: Site, scheduler: SchedulerName, ranks_per_node: int, queue: str
) -> tuple[int, list[str]]:
    """Cores of each rank, and the directives by which SLURM counts cores and no hardware threads.

    By default the ranks of a node share all its cores. Only SLURM says how many these are.
    """
    # Sites count in their own way. SLURM takes --hint or this directive, not both.
    said = any(word.startswith(("--hint", "--threads-per-core")) for word in request.directive)
    by_core = [] if scheduler != "slurm" or said else ["--threads-per-core=1"]
    if given := request.threads or site.threads:
        return given, [] if request.site else by_core
    node = scheduler_of(scheduler).node_cores(queue if site.queue_option == "--partition" else "")
    threads = node.cores // ranks_per_node if node else 0
    if node and threads:
        _say(f"each rank has {threads} of a node's {node.cores} cores: --threads changes it")
        return threads, by_core if node.hardware_threads > 1 else []
    _say("each rank has 1 core: --threads N gives it more")
    return 1, [] if request.site else by_core


def _say(text: str) -> None:
    print_line(f"hpc-train submit: {text}", sys.stderr)


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


def _launcher(
    request: SubmitRequest,
    site: Site,
    scheduler: SchedulerName,
    program: Sequence[str],
    asked: Resources,
) -> list[str]:
    """The launcher's line in front of the command."""
    numbers, line = asked.numbers, f"the launcher of {request.site}"
    if request.launcher == "srun":
        plugin = srun_plugin()
        return ["srun", *([f"--mpi={plugin}"] if plugin else []), "--kill-on-bad-exit=1"]
    if request.launcher == "mpirun":
        if scheduler == "mpijob":  # the image's mpirun is another one
            return ["mpirun", "-np", str(asked.ranks)]
        return mpirun_of_batch(asked.ranks, per_node=asked.ranks_per_node, threads=asked.threads)
    if site.launcher and not request.launcher:
        return resources.filled(site.launcher, numbers, line)
    words = [*program, "launch"]
    if request.launcher == "launch" and site.launcher:
        # Restarts may have fewer nodes.
        kept = dict[str, int | str](numbers) | {"nodes": "{nodes}", "ranks": "{ranks}"}
        filled = resources.filled(site.launcher, kept, line)
        words += ["--line", shlex.join(filled), "--ranks_per_node", str(asked.ranks_per_node)]
    else:
        words += scheduler_of(scheduler).launch_words(asked, _environ(request, site))
    if request.launcher == "horovodrun":
        words += ["--launcher", "horovodrun"]
    restarts = RESTARTS if request.max_restarts is None else request.max_restarts
    return [*words, "--max_restarts", str(restarts), "--"]


def _staging(
    request: SubmitRequest,
    site: Site,
    scheduler: SchedulerName,
    program: Sequence[str],
    asked: Resources,
) -> Staging:
    """What the job copies to its nodes; the job's own launcher starts a rank on each of them."""
    few = one_per_node(asked)
    words = _launcher(replace(request, max_restarts=0), site, scheduler, program, few)
    knows_hosts = scheduler_of(scheduler).tells_hosts and "--ranks_per_node" not in words
    if words[: len(program)] == program and knows_hosts:
        words[len(program) + 1 : len(program) + 1] = ["--ranks_per_node", "1"]
    return made_staging(words, asked, request.stage_data, request.stage_to)


def _activation(environ: Mapping[str, str], *, loaded: bool) -> list[str]:
    """Shell lines that give a job the modules and the Python environment of this shell.

    Args:
        environ: the variables of this shell.
        loaded: load its modules; the setup of a site's profile loads its own.
    """
    lines = []
    if loaded and environ.get("LOADEDMODULES"):
        if root := environ.get("HPC_TRAIN_ROOT"):  # our module has set it; it loads the same again
            lines.append(f"export HPC_TRAIN_PREFIX={shlex.quote(root)}")
        lines.append(f"export MODULEPATH={shlex.quote(environ.get('MODULEPATH', ''))}")
        modules = map(shlex.quote, environ["LOADEDMODULES"].split(":"))
        lines.append(f"module load {' '.join(modules)}")
    conda = environ.get("CONDA_PREFIX", "")
    if conda and Path(conda) == Path(sys.prefix):
        program = Path(environ.get("CONDA_EXE", ""))
        hook = program.parent.parent / "etc/profile.d/conda.sh"
        if program.is_absolute() and hook.exists():
            lines += ["# shellcheck source=/dev/null", f". {shlex.quote(str(hook))}"]
            return [*lines, f"conda activate {shlex.quote(conda)}"]
        return [*lines, f"export PATH={shlex.quote(conda)}/bin:$PATH"]
    if sys.prefix == sys.base_prefix:
        return lines
    activate = shlex.quote(str(Path(sys.prefix, "bin", "activate")))
    return [*lines, "# shellcheck source=/dev/null", f". {activate}"]


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
