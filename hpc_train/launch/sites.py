"""Site profiles: what all batch scripts of a machine share, as YAML in jobscripts/sites/."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from hpc_train.config.durations import format_duration
from hpc_train.config.file import expanded
from hpc_train.config.keys import GIVE_PATH, check_fields, read_with_texts
from hpc_train.errors import UserError
from hpc_train.launch import TEMPLATES, ImageTool, SchedulerName
from hpc_train.launch.resources import NUMBERS, filled
from hpc_train.launch.schedulers import scheduler_of

SITES = TEMPLATES / "sites"
_KEYS_OF = {  # keys that only some schedulers can use
    "account_option": ("pbs", "torque"),
    "queue_option": ("slurm",),
    "gpu_option": ("slurm", "mpijob"),
}
_OPTION_OF = {  # keys with the option of `submit` that asks for the same
    "queue": "queue",
    "queues": "queue",
    "constraint": "constraint",
    "exclusive": "exclusive",
    "gpus_per_node": "gpus",
    "memory_gb_per_node": "memory",
    "resources": "resources",
    "needs_directives": "directive",
    "directives": "directive",
    "setup": "setup",
    "container": "image_tool",
}
_DESCRIBED = "hpc_train/launch/sites.py describes the keys"
_TAKES = {  # what the parser's message has: what a key takes
    "PositiveInt": "a whole number of 1 or more",
    "NonNegativeInt": "a whole number of 0 or more",
    "NonNegativeFloat": "a number of 0 or more",
    "<class 'bool'>": "true or false",
    "<class 'list'>": "a list, such as [a, b]",
    "<class 'dict'>": "names with values, such as {A: 1}",
    "<class 'str'>": "text: put it in quotes",
}


@dataclass(frozen=True)
class Queue:
    """A queue of a site, or a part of it with limits of its own. 0 stands for no limit.

    Args:
        name: queue, partition or QOS, as `queue` of the site.
        min_nodes, max_nodes: the nodes that a job can have.
        hours: the longest time of a job.
    """

    name: str
    min_nodes: PositiveInt = 1
    max_nodes: NonNegativeInt = 0
    hours: NonNegativeFloat = 0.0

    def takes(self, nodes: int, seconds: int) -> bool:
        """Whether a job can be queued here."""
        fits = self.min_nodes <= nodes <= (self.max_nodes or nodes)
        return fits and (not self.hours or seconds <= 3600 * self.hours)

    def __str__(self) -> str:
        most = f" to {self.max_nodes}" if self.max_nodes else " or more"
        nodes = f"{self.min_nodes}{most if self.max_nodes != self.min_nodes else ''}"
        nodes += " node" if nodes == "1" else " nodes"
        return f"{self.name} ({nodes}{f', {self.hours:g} h' if self.hours else ''})"


@dataclass(frozen=True)
class SiteContainers:
    """How a site runs images. It counts for jobs with --image only.

    Args:
        tool: the program that runs images; None: the first one that is on the PATH.
        options: words for it, such as --nv.
        setup: lines of shell that load modules, after those of the site.
        environ: variables for the job.
    """

    tool: ImageTool | None = None
    options: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """The profile of a machine. Options of the command line override it.

    `resources` and `launcher` may contain {nodes}, {ranks}, {ranks_per_node}, {threads}, {cores},
    {gpus} and {memory_gb}. The last three are the numbers of all nodes together.

    Args:
        scheduler: the machine's scheduler.
        needs: options of `submit` that every job of the site must give. A QOS that is the queue
            counts as --queue, and so does `queue`.
        needs_directives: beginnings of directives that every job must have, by any option.
        account_option: the option by which PBS is given the account.
        ranks_per_node: ranks on each node, such as one per GPU.
        threads: cores that each rank asks for; None: an equal part of the node's.
        bound: whether `launcher` lists cores. Then the user cannot change the ranks or threads.
        queue: queue or partition.
        queues: queues with their limits, in place of `queue`. The first one that takes the job is
            used.
        queue_option: whether SLURM is given the queue as a partition or as a QOS.
        constraint, exclusive: as SLURM's --constraint and --exclusive.
        gpus_per_node, memory_gb_per_node: GPUs and memory that a job asks for on each node.
        cores_per_gpu: cores that have to be asked for with each GPU; {cores} has at least these.
        unseen: folders that compute nodes do not see. The run directory, the environment and the
            working directory must be elsewhere. ~ and variables are expanded.
        gpu_option: the option by which SLURM, or the resource by which Kubernetes, is given the
            number of GPUs.
        resources: resources for PBS, instead of the usual select.
        directives: further directives, without #SBATCH or #PBS.
        launcher: the launcher's line; [] leaves it to `hpc-train launch`.
        setup: lines of shell that load modules.
        environ: variables for the job; --threads overrides OMP_NUM_THREADS.
        container: how the site runs images, for --image.
    """

    scheduler: SchedulerName
    needs: list[Literal["account", "queue"]] = field(default_factory=list)
    needs_directives: list[str] = field(default_factory=list)
    account_option: Literal["-A", "-P"] = "-A"
    ranks_per_node: PositiveInt = 1
    threads: PositiveInt | None = None
    bound: bool = False
    queue: str = ""
    queues: list[Queue] = field(default_factory=list)
    queue_option: Literal["--partition", "--qos"] = "--partition"
    constraint: str = ""
    exclusive: bool = False
    gpus_per_node: NonNegativeInt = 0
    memory_gb_per_node: NonNegativeInt = 0
    cores_per_gpu: NonNegativeInt = 0
    unseen: list[str] = field(default_factory=list)
    gpu_option: Literal["", "--gpus-per-node=", "--gres=gpu:", "nvidia.com/gpu", "amd.com/gpu"] = ""
    resources: str = ""
    directives: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    container: SiteContainers = field(default_factory=SiteContainers)


def names() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load_site(name: str) -> Site:
    """Read a profile, by its name or by the path of your own file.

    Raises:
        UserError: there is no such profile, or something in it is wrong.
    """
    own = name.endswith((".yaml", ".yml"))
    if not own and name not in names():
        raise UserError(
            f"there is no site profile {name}",
            f"take {', '.join(names())}, or give a .yaml file of your own",
        )
    path = Path(name) if own else SITES / f"{name}.yaml"
    given, raw = read_with_texts(path, "site profile", GIVE_PATH)
    tree = given = check_fields(_without_nulls(given), Site, path)
    if "container" in given:
        inside = _without_nulls(given["container"])
        tree = given | {"container": check_fields(inside, SiteContainers, path, "container")}
    for section, texts in ((tree, raw), (tree.get("container", {}), raw.get("container", {}))):
        if "environ" in section:
            section["environ"] = _as_written(section["environ"], texts["environ"], path)
    queues = _queues(given.get("queues", []), path)
    values = _parsed(Site, {key: tree[key] for key in tree if key != "queues"}, path)
    container = SiteContainers(**values.pop("container"))
    values["unseen"] = [_absolute(folder, path) for folder in values["unseen"]]
    site = Site(**{**values, "queues": queues, "container": container})
    for key, words in (("launcher", site.launcher), ("resources", [site.resources])):
        filled(words, dict.fromkeys(NUMBERS, 1), f"{path}: {key}")
    _check_use(given, site.scheduler, path)
    return site


def _check_use(given: Collection[str], scheduler: SchedulerName, path: Path) -> None:
    """Refuse keys that would be accepted and ignored.

    Raises:
        UserError: the scheduler cannot use a key, or another key stands in its place.
    """
    refused = scheduler_of(scheduler).refused
    for key in given:
        if _OPTION_OF.get(key) in refused or scheduler not in _KEYS_OF.get(key, (scheduler,)):
            instead = "" if "directive" in refused else ", or write directives in its place"
            raise UserError(f"{path}: {key} means nothing to {scheduler}", f"leave it out{instead}")
    if {"queue", "queues"} <= {*given}:
        raise UserError(
            f"{path} has queue and queues", "keep one: queues may have one queue without limits"
        )


def _as_written(environ: object, texts: Any, path: Path) -> object:
    """Variables as the texts that the file has: YAML reads 16 as a number, and 1.10 as 1.1."""
    if not isinstance(environ, dict):
        return environ or {}
    if wrong := [name for name in environ if not isinstance(name, str)]:
        raise UserError(
            f"{path}: environ has the name {wrong[0]!r}, which is no text",
            "give a name of letters, digits and _, in quotes if YAML reads it as something else",
        )
    return {
        name: value if isinstance(value, list | dict | None) else texts.get(name, value)
        for name, value in environ.items()
    }


def _without_nulls(tree: object) -> object:
    """A mapping without its empty values, which stand for the defaults."""
    if not isinstance(tree, dict):
        return tree
    return {key: value for key, value in tree.items() if value is not None}


def _absolute(folder: str, path: Path) -> str:
    """A folder of `unseen`, with the values of ~ and of variables."""
    found: str = expanded(f"{path}: unseen", folder)
    if not found.startswith("/"):
        raise UserError(f"{path}: unseen has {folder!r}", "write the path of a folder from / on")
    return found


def _queues(given: object, path: Path) -> list[Queue]:
    if not isinstance(given, list):
        raise UserError(f"{path}: queues is {given!r}", "write a list, such as [{name: gpu}]")
    found = []
    for number, tree in enumerate(given):
        section = f"queues[{number}]"
        fields = check_fields(_without_nulls(tree), Queue, path, section)
        queue = Queue(**_parsed(Queue, fields, path, f"{section}."))
        if 0 < queue.max_nodes < queue.min_nodes:
            raise UserError(
                f"{path}: {section} has min_nodes {queue.min_nodes} and max_nodes "
                f"{queue.max_nodes}",
                "no job would fit: make max_nodes larger, or leave it out for no limit",
            )
        found.append(queue)
    return found


def _parsed(kind: type, tree: dict[str, Any], path: Path, section: str = "") -> dict[str, Any]:
    """The values of a dataclass's fields.

    Raises:
        UserError: one has another type.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        parsed: dict[str, Any] = parser.parse_object(tree).as_dict()
    except ArgumentError as error:
        told = " ".join(str(error).split())
        found = re.match(r'Parser key "([\w.]+)"', told)
        if found is None:
            raise UserError(f"{path}: {told}", _DESCRIBED) from None
        value: Any = tree
        for name in found[1].split("."):
            value = value[name]
        takes = next((text for sign, text in _TAKES.items() if sign in told), "")
        if words := re.search(r"Literal\[(.*?)\]", told):
            takes = f"one of {words[1]}"
        what = f"it takes {takes}" if takes else _DESCRIBED
        raise UserError(f"{path}: {section}{found[1]} is {value!r}", what) from None
    # Plain numbers, as others write them: the parser's are of types of its own.
    return {
        name: int(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in parsed.items()
    }


def queue_for(site: Site, name: str, asked: str, nodes: int, seconds: int) -> str:
    """The queue of a job, within the limits that the site's profile knows.

    Args:
        site: the site.
        name: its name, for the message.
        asked: the queue that the user has named, or "".
        nodes: nodes of the job.
        seconds: its time limit.

    Raises:
        UserError: the queue, or every queue, has other limits.
    """
    known = [queue for queue in site.queues if asked in ("", queue.name)]
    if not known:
        return asked or site.queue
    for queue in known:
        if queue.takes(nodes, seconds):
            return queue.name
    raise UserError(
        f"{nodes} nodes for {format_duration(seconds)} do not fit "
        f"{f'the queue {asked}' if asked else 'any queue'} of {name}",
        f"the profile knows {', '.join(map(str, site.queues))}; change --nodes, --time or --queue",
    )
