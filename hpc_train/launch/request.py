"""What a user of `hpc-train submit` asks for, and what a scheduler or a site cannot do of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_train.errors import UserError
from hpc_train.launch import SchedulerName
from hpc_train.launch.schedulers import scheduler_of
from hpc_train.launch.sites import Site


@dataclass(frozen=True)
class SubmitRequest:
    """What the user asks for. None and empty values stand for the site's, or else the default.

    Args:
        config: path of CONFIG.yaml; None if `command` is given.
        options: --section.key VALUE ..., for the training.
        command: another program to run on all ranks, with its arguments.
        scheduler: slurm, pbs, torque, lsf, flux, mpijob or local.
        site: name or file of a site profile.
        nodes, ranks_per_node, threads: number of nodes, ranks on each node, cores of each rank.
        gpus, memory: GPUs and GB of memory of each node.
        time: time limit, such as 02:00:00 or 2h; None: one hour.
        name: job name; by default that of the run directory.
        account, queue: account that pays, and queue or partition.
        qos, constraint, reservation: as SLURM knows them.
        exclusive: ask for nodes that no other job uses.
        mail: address that is told of the job's end.
        resources: what PBS is asked for, instead of the usual nodes and ranks.
        directive: further directives.
        setup: shell lines to run first.
        launcher: srun, mpirun, horovodrun, or launch for `hpc-train launch`, which then starts the
            line of the site's profile; by default that line, or launch if there is none.
        max_restarts: maximum number of restarts by `hpc-train launch`; None: RESTARTS.
        requeue_by: how the job is queued again when it has stopped early.
        max_requeues: maximum number of requeues; None: REQUEUES.
        chain: number of jobs to queue at once; each waits for the one before it.
        sweep: section.key=V1,V2,...: an array with a task for each combination.
        tasks: the options of each task of an array, in place of `sweep`.
        tasks_at_once: most tasks of an array that run at the same time.
        image: container image in which each rank runs.
        image_tool: the program that runs it; None: the site's, or the first one found here.
        image_options: further words for that program.
        stage: copy the environment to a disk of each node before the ranks start.
        stage_data: folders of data sets that are copied, too.
        stage_to: a folder on the nodes' own disks; None for TMPDIR, or else /tmp.
        dry_run: print the script, and queue nothing.
    """

    config: str | None = None
    options: Sequence[str] = ()
    command: Sequence[str] = ()
    scheduler: SchedulerName | None = None
    site: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    threads: int | None = None
    gpus: int | None = None
    memory: int | None = None
    time: str | None = None
    name: str | None = None
    account: str | None = None
    queue: str | None = None
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclusive: bool = False
    mail: str = ""
    resources: str = ""
    directive: Sequence[str] = ()
    setup: Sequence[str] = ()
    launcher: str | None = None
    max_restarts: int | None = None
    requeue_by: Literal["requeue", "submit", "never"] | None = None
    max_requeues: int | None = None
    chain: int = 1
    sweep: Sequence[str] = ()
    tasks: Sequence[Sequence[str]] = ()
    tasks_at_once: int | None = None
    image: str = ""
    image_tool: str | None = None
    image_options: Sequence[str] = ()
    stage: bool = False
    stage_data: Sequence[str] = ()
    stage_to: str | None = None
    dry_run: bool = False


def check_request(request: SubmitRequest, site: Site, scheduler: SchedulerName) -> None:
    """Refuse options that would be accepted and ignored.

    Raises:
        UserError: options that do not go together, or not with this site or scheduler.
    """
    _check_site(request, site, scheduler)
    for option, remedy in scheduler_of(scheduler).refused.items():
        given = getattr(request, option)
        if given and given != getattr(SubmitRequest, option):
            raise UserError(f"--{option} means nothing to {scheduler}", remedy)
    kind = scheduler_of(scheduler)
    slots_are_cores = kind.slots_are_cores and (request.threads or 1) > 1
    starts_itself = not by_launch(request, site)
    for wrong, why, remedy in (
        (
            scheduler == "mpijob" and not request.image,
            "an MPIJob runs in containers",
            "give --image NAME with hpc_train in it",
        ),
        (
            bool(request.image_tool or request.image_options) and not request.image,
            "an option of images is given, and no image",
            "give --image",
        ),
        (
            bool(request.stage_data or request.stage_to) and not request.stage,
            "an option of staging is given, and no --stage",
            "give --stage",
        ),
        (
            request.stage and bool(request.image),
            "--stage and --image cannot be combined",
            "leave out --stage: an image is read as one file",
        ),
        (
            request.requeue_by == "requeue" and not kind.requeues,
            f"{scheduler} cannot queue the same job again",
            "give --requeue_by submit",
        ),
        (
            request.chain > 1 and (request.sweep or request.requeue_by not in (None, "never")),
            "--chain cannot be combined with --sweep or --requeue_by",
            "leave one out: all jobs of a chain are in the queue already",
        ),
        (
            request.tasks_at_once is not None and not (request.sweep or request.tasks),
            "--tasks_at_once is for a sweep",
            "leave it out, or give --sweep",
        ),
        (
            request.max_requeues is not None and requeue_by(request, scheduler) == "never",
            "--max_requeues is given, but this job is never queued again",
            "leave it out",
        ),
        (
            request.launcher == "srun" and scheduler != "slurm",
            f"srun is for SLURM, and the scheduler is {scheduler}",
            "leave out --launcher",
        ),
        (
            starts_itself and slots_are_cores,
            f"the slots of {scheduler} are cores: --launcher and --threads cannot be combined",
            "leave one out",
        ),
        (
            request.max_restarts is not None and starts_itself,
            "--max_restarts is for `hpc-train launch`, which does not start it",
            "give --launcher launch, or leave out --max_restarts",
        ),
    ):
        if wrong:
            raise UserError(why, remedy)


def _check_site(request: SubmitRequest, site: Site, scheduler: SchedulerName) -> None:
    if site.scheduler != scheduler:
        raise UserError(
            f"site {request.site} has {site.scheduler}, not {scheduler}",
            "leave out --site or --scheduler",
        )
    if request.qos and request.queue and site.queue_option == "--qos":
        raise UserError(f"at site {request.site} --queue is the QOS", "leave out --qos")
    given = {
        "account": request.account,
        "queue": request.queue or site.queue or (site.queue_option == "--qos" and request.qos),
    }
    for need in site.needs:
        if not given[need]:
            raise UserError(f"site {request.site} requires --{need}", f"give --{need}")
    for option in ("threads", "ranks_per_node"):
        asked, own = getattr(request, option), getattr(site, option)
        if site.bound and asked not in (None, own):
            raise UserError(
                f"site {request.site} lists the cores of its ranks: --{option} cannot be {asked}",
                f"leave it out{f' for {own}' if own else ''}, or copy the profile to a file and "
                "change it",
            )


def by_launch(request: SubmitRequest, site: Site) -> bool:
    """Whether `hpc-train launch` starts the ranks."""
    return request.launcher in ("launch", "horovodrun") or not (request.launcher or site.launcher)


def requeue_by(
    request: SubmitRequest, scheduler: SchedulerName
) -> Literal["requeue", "submit", "never"]:
    """How the job is queued again when it has stopped early."""
    if request.chain > 1:
        return "never"  # the next job of the chain is in the queue
    return request.requeue_by or ("requeue" if scheduler_of(scheduler).requeues else "submit")
