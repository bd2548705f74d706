"""`hpc-train launch`: make a launcher's line from the options, and run it as a supervised job."""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config import RunConfig
from hpc_train.config import file as config_file
from hpc_train.errors import UserError, print_line
from hpc_train.launch import containers, warm_start
from hpc_train.launch.attempt import stop_with_script
from hpc_train.launch.containers import Container
from hpc_train.launch.hosts import Allocation, Host, allocated, parse_hosts, read_file, take_hosts
from hpc_train.launch.launchers import FoundLauncher, cores_of_hosts, find_launcher, threads_of
from hpc_train.launch.lines import LaunchedJob, Line
from hpc_train.launch.protocol import STOP
from hpc_train.launch.site_line import launcher_of
from hpc_train.launch.supervise import START, Supervisor

COLD = "--cold"  # an option of `train` that is no configuration key
OWN_VERBS = ("train", "topology", "doctor", "stage")


@dataclass(frozen=True)
class LaunchRequest:
    """What the user asks for.

    Args:
        command: the words after --.
        ranks: number of ranks; None takes all slots.
        hosts: hosts with their slots, as -H takes them.
        hostfile: a file of hosts, instead of `hosts`.
        ranks_per_node: ranks to start on each host, overriding its slots.
        program: the launcher's program; None chooses one.
        line: a site's own launcher line, instead of `program`; see `site_line.launcher_of`.
        image: a container image, in which each rank runs; None: ranks run on the host.
        image_tool: the program that runs the image; None: the first one of IMAGE_TOOLS found here.
        image_options: further words for that program.
        restarts: maximum number of restarts after failures.
        cores: physical cores of a host; None: those that SLURM has given, or as many as this host
            has.
        dry_run: print the line, and start nothing.
        cold: each rank imports its libraries itself; by default one process per node does.
    """

    command: Sequence[str]
    ranks: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    ranks_per_node: int | None = None
    program: str | None = None
    restarts: int = 0
    cores: int | None = None
    dry_run: bool = False
    cold: bool = False
    line: str | None = None
    image: str | None = None
    image_tool: str | None = None
    image_options: Sequence[str] = ()


def launch(request: LaunchRequest) -> int:
    """Start a job, and restart it when it fails; returns its exit code.

    Raises:
        UserError: the request cannot be met.
        HpcTrainError: the job failed.
    """
    allocation = allocated(os.environ)
    hosts = _hosts(request, allocation)
    if request.ranks_per_node:
        if not hosts:
            remedy = "leave it out, or name hosts" if request.ranks else "give -np N in its place"
            raise UserError("--ranks_per_node needs hosts, and none is named", remedy)
        hosts = [Host(host.name, request.ranks_per_node) for host in hosts]
    ranks = request.ranks or sum(host.slots for host in hosts)
    if not ranks:
        raise UserError(
            "the number of ranks is not given",
            "give -np N, or hosts with slots by -H or --hostfile",
        )
    used = take_hosts(hosts, ranks) if hosts else []
    command, config, file = _command(request)
    cores = request.cores or cores_of_hosts(os.environ, [host.name for host in used])
    full = max((host.slots for host in used), default=ranks)
    threads = threads_of(os.environ, cores, full)
    # Each container has namespaces of its own, so that no process can fork all ranks of a node.
    cold = bool(request.cold or (config is not None and COLD in command) or request.image)
    warm = warm_start.variables(full, request.restarts, cold=cold)
    command = warm_start.warm_command(command, warm)
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", **warm}
    variables |= _passing_all(allocation)
    container = _container(request, config, file)
    job = LaunchedJob(command, ranks, used, cores, threads, variables, container=container)
    # Kubernetes restarts a launcher that exits with any other code than 0.
    again = allocation is not None and allocation.scheduler == "mpijob"
    if config and again and (stop := Path(config.run.dir, STOP)).exists():
        _say(f"{stop} is there: nothing is started")
        return 0
    launcher = _launcher(request, allocation)
    if request.line is None:  # a site's line binds ranks in its own way
        _say_unbound(job, launcher.kind, allocation)
    line = launcher.make(job)
    if request.dry_run:
        print(Line(line.words, {**variables, **line.environ}))
        return 0
    if container and config:
        containers.check_package(container)  # a clear error before ranks start
    stop_with_script(os.environ)
    with tempfile.TemporaryDirectory(prefix="hpc-train-") as folder:
        run_dir = Path(config.run.dir) if config else None
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(
            launcher,
            job,
            hosts,
            request.restarts,
            (run_dir or Path(folder)) / "progress.json",
            run_dir,
            max(START, config.run.hang_timeout) if config and config.run.hang_timeout else 0.0,
            shrinking(config),
            _say,
        )
        try:
            return supervisor.run()
        finally:
            warm_start.dismiss_servers(warm)


def _passing_all(allocation: Allocation | None) -> dict[str, str]:
    """What has srun pass all variables to the ranks, also in a job of `sbatch --export=NONE`."""
    return {"SLURM_EXPORT_ENV": "ALL"} if allocation and allocation.scheduler == "slurm" else {}


def _launcher(request: LaunchRequest, allocation: Allocation | None) -> FoundLauncher:
    if "SLURM_HET_SIZE" in os.environ and not (request.hosts or request.hostfile):
        _say("this job is heterogeneous, and SLURM tells the hosts of its first component only")
    if request.line is None:
        found = find_launcher(request.program, allocation.scheduler if allocation else None)
        if found.note:
            _say(found.note)
        return found
    if request.program:
        raise UserError("--launcher and --line are both given", "give one of them")
    return launcher_of(request.line)


def _container(
    request: LaunchRequest, config: RunConfig | None, file: str | None
) -> Container | None:
    if request.image is None:
        if request.image_tool or request.image_options:
            raise UserError("an option of images is given, and no image", "give --image")
        return None
    folders, others = [Path.cwd()], list[str]()
    if config:
        folders += [Path(config.run.dir), *([Path(file).parent] if file else [])]
        others = config_file.paths_of(config)
    return containers.container_for(
        request.image,
        request.image_tool,
        request.image_options,
        containers.seen_paths(folders, others),
    )


def _say_unbound(job: LaunchedJob, kind: str, allocation: Allocation | None) -> None:
    """Say so if ranks will not be bound to cores, because they may then move and share cores."""
    why = "horovodrun binds none" if kind == "horovodrun" else job.why_not_bound
    if why and allocation and allocation.scheduler == "slurm":
        why += "; on hyperthreaded nodes submit the job with --threads-per-core=1"
    if why:
        _say(f"ranks are not bound to cores: {why}")


def _hosts(request: LaunchRequest, allocation: Allocation | None) -> list[Host]:
    for option, given in (("-H", request.hosts), ("--hostfile", request.hostfile)):
        if given is not None and not given.strip():
            raise UserError(
                f"{option} names no hosts",
                "name hosts, or leave it out; a variable in its value may be empty",
            )
    if request.hosts and request.hostfile:
        raise UserError("-H and --hostfile are both given", "give one of them")
    if request.hosts:
        return parse_hosts(request.hosts)
    if request.hostfile:
        return read_file(Path(request.hostfile))
    if allocation is None:
        return []
    needed = request.ranks_per_node or not request.ranks
    return allocation.known_hosts() if needed else allocation.hosts


def _command(request: LaunchRequest) -> tuple[list[str], RunConfig | None, str | None]:
    """The command of each rank; if it is `train` of this package, the configuration and its file.

    Raises:
        UserError: there is no command, or its configuration is wrong.
    """
    words = request.command
    if not words:
        raise UserError("no command", "write it after --: hpc-train launch -np 4 -- train my.yaml")
    own = _own(words, containers.PYTHON if request.image else sys.executable)
    if own is None and not request.image and not shutil.which(words[0]):
        raise _no_program(words[0])
    if own is None:
        return list(words), None, None
    program, rest = own
    if not rest or rest[0] not in OWN_VERBS:
        raise UserError(f"{' '.join(rest)!r} does not run on ranks", f"use {', '.join(OWN_VERBS)}")
    if rest[0] != "train":
        return [*program, *rest], None, None
    if len(rest) == 1:
        raise UserError("train has no configuration", "write train CONFIG.yaml --section.key VALUE")
    path, options = config_file.split([word for word in rest[1:] if word != COLD])
    return [*program, *rest], config_file.load(path, options), path


def _no_program(word: str) -> UserError:
    """The error for a word that is not found as a program."""
    if "/" in word and Path(word).is_file():
        return UserError(f"{word} may not be executed", f"chmod +x {shlex.quote(word)}")
    near = difflib.get_close_matches(word, OWN_VERBS, n=1)
    meant = f"did you mean {near[0]}?" if near else "give its path, or load its module"
    return UserError(f"there is no program {word!r}", meant)


def _own(words: Sequence[str], python: str) -> tuple[list[str], list[str]] | None:
    """This package's program and its arguments, if the words run it; else None."""
    program = [python, "-m", "hpc_train"]
    if Path(words[0]).name == "hpc-train":
        return program, list(words[1:])
    if list(words[1:3]) == program[1:]:
        return list(words[:3]), list(words[3:])
    return (program, list(words)) if words[0] in OWN_VERBS else None


def shrinking(config: RunConfig | None) -> Callable[[int], tuple[int, list[str]]]:
    """Returns a function that fits a job into fewer slots: see `Supervisor.shrink`.

    It makes dp smaller, so that the batch and the order of samples stay the same.
    """

    def shrink(slots: int) -> tuple[int, list[str]]:
        if config is None:
            return slots, []
        layout, data = config.parallel, config.data
        replica = layout.tp * layout.pp
        for dp in range(slots // replica, 0, -1):
            if data.batch % (dp * (data.samples_at_a_time or 1)) == 0:
                return dp * replica, ["--parallel.dp", str(dp)] if layout.dp else []
        return 0, []

    return shrink


def _say(text: str) -> None:
    print_line(f"hpc-train launch: {text}", sys.stderr)
