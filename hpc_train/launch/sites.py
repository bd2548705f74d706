"""Site profiles: what batch scripts of a machine have in common, as YAML in jobscripts/sites/."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from hpc_train.errors import UserError
from hpc_train.launch.batch import TEMPLATES, Scheduler

SITES = TEMPLATES / "sites"


@dataclass(frozen=True)
class Site:
    """A machine. What a user gives on the command line wins over it.

    `resources` and `start` may have {nodes}, {ranks}, {ranks_per_node}, {threads}, and of all nodes
    together {cores}, {gpus} and {memory_gb}.

    Args:
        scheduler: the machine's.
        needs: options of `submit` that the site asks of every job.
        ranks_per_node: ranks of each node, such as one per GPU.
        threads: cores that each rank asks for.
        queue: or partition.
        gpus_per_node, memory_gb_per_node: of a node.
        resources: PBS's, in place of the usual select.
        directives: more lines of the script, without #SBATCH or #PBS.
        start: the launcher's line; [] leaves it to `hpc-train launch`.
        setup: lines of shell that load modules.
        environ: variables.
    """

    scheduler: Scheduler
    needs: list[str] = field(default_factory=list)
    ranks_per_node: int = 1
    threads: int = 1
    queue: str = ""
    gpus_per_node: int = 0
    memory_gb_per_node: int = 0
    resources: str = ""
    directives: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in SITES.glob("*.yaml"))


def load(name: str) -> Site:
    """A profile, by its name or by the path of a file of one's own.

    Raises:
        UserError: there is none, or it is not one.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SITES / f"{name}.yaml"
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no site profile {name}", f"there are {', '.join(names())}; or give a .yaml file"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"site profile {path}: {' '.join(str(error).split())}") from None
    known = {key.name: key for key in fields(Site)}
    if not isinstance(tree, dict) or "scheduler" not in tree:
        raise UserError(f"site profile {path} has no scheduler", "write scheduler: slurm, or pbs")
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1) or sorted(known)
            raise UserError(f"site profile {path}: unknown key {key}", f"take {', '.join(near)}")
    return Site(**tree)
