"""A description of a machine, as YAML: how fast its ranks compute, and how fast they communicate.

`hpc-train plan` predicts step times from it. `hpc-train plan --measure` writes one; it can also be
written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.keys import check_fields, read_mapping
from hpc_train.errors import ConfigError

GUIDE = "docs/how-to/plan.md has an example"
DEVICES, LINKS = ("cpu", "cuda", "xpu"), ("inside", "across")
MAY_BE_ZERO = ("alpha", "beta", "processor", "layer")  # these may be 0
UNLIMITED = ("node", "job", "node_gib", "rank_gib", "ranks_per_node")  # these may be null


@dataclass(frozen=True)
class Compute:
    """How fast ranks train in one number format.

    Args:
        rank: flop/s of one rank in forward and backward passes while all others sleep.
        node: flop/s of all ranks of a node together while all of them compute; None: each rank is
            as fast as alone.
        job: flop/s of all ranks of a node together while the ranks of all nodes compute. It is less
            than `node` where nodes share processors, as emulated nodes do; None: the same.
        layer: seconds that a layer's forward and backward pass take for a micro-batch, however
            small it is.
    """

    rank: float
    node: float | None = None
    job: float | None = None
    layer: float = 0.0


@dataclass(frozen=True)
class Link:
    """What messages cost.

    Args:
        alpha: seconds for each message.
        beta: seconds for each byte, in one direction. Inside a node it is for each rank, while all
            ranks of the node send. Across nodes it is for each node; its ranks share the link.
        processor: seconds of computing that each byte costs the sender and the receiver together.
    """

    alpha: float
    beta: float
    processor: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A machine whose nodes are all alike.

    Args:
        compute: speed in each number format, by the names of `precision.dtype`.
        memory_bandwidth: bytes/s that a rank reads and writes when it shares its cores with nobody.
        inside: messages between ranks of a node; None: not known.
        across: messages between nodes; None: not known.
        node_gib: memory of a node, for all its ranks; None: not limited.
        rank_gib: memory of a rank, such as its GPU's; None: not limited.
        device: cpu, cuda or xpu; on cpu the ranks of a node average gradients in shared memory.
        ranks_per_node: ranks on each node when it was measured; None: it was written by hand.
    """

    compute: Mapping[str, Compute]
    memory_bandwidth: float
    inside: Link | None = None
    across: Link | None = None
    node_gib: float | None = None
    rank_gib: float | None = None
    device: str = "cpu"
    ranks_per_node: float | None = None

    def to_yaml(self) -> str:
        """The description as YAML, which `load_machine` reads."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


def load_machine(path: Path) -> Machine:
    """Read a machine description.

    Raises:
        ConfigError: there is no such file, or something in it is wrong; the message names the key.
    """
    given = check_fields(
        read_mapping(
            path,
            "machine description",
            "measure one on a job's ranks: `mpirun -np 8 hpc-train plan CONFIG.yaml --measure`, "
            f"or write it: {GUIDE}",
        ),
        Machine,
        path,
    )
    compute, device = given.pop("compute"), given.pop("device", "cpu")
    if not isinstance(compute, dict) or not compute:
        raise ConfigError(f"{path}: compute has no number format", GUIDE)
    if device not in DEVICES:
        raise ConfigError(f"{path}: device is {device!r}", f"it is one of {', '.join(DEVICES)}")

    def checked(tree: object, kind: type, section: str) -> Any:
        return kind(**_numbers(check_fields(tree, kind, path, section), f"{path}: {section}."))

    speeds = {
        str(name): checked(tree, Compute, f"compute.{name}") for name, tree in compute.items()
    }
    links: dict[str, Any] = {
        name: checked(tree, Link, name)
        for name in LINKS
        if (tree := given.pop(name, None)) is not None
    }
    return Machine(speeds, device=device, **links, **_numbers(given, f"{path}: "))


def _numbers(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """Check numbers, and make them floats: YAML reads 1e-6, which has no point, as text."""
    found: dict[str, float | None] = {}
    for key, value in given.items():
        if value is None and key in UNLIMITED:
            found[key] = None
            continue
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or (number == 0 and key not in MAY_BE_ZERO):
            least = "0 or more" if key in MAY_BE_ZERO else "above 0"
            raise ConfigError(f"{where}{key} is {value!r}", f"give a number {least}")
        found[key] = number
    return found
