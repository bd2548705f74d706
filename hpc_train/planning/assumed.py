"""A machine without a description: what one process has measured of it, and what is assumed.

A process alone can measure how fast it computes, and read and write memory. It cannot measure links
between ranks and nodes. Every figure says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hpc_train.errors import plural
from hpc_train.planning.layouts import GIB
from hpc_train.planning.machine import Compute, Link, Machine

CORE_FLOPS = {"float64": 1.5e10}  # flop/s of a core in training: about a third of AVX2's at 3 GHz
OTHER_FLOPS = 3e10  # the same in all other formats: most processors have no faster 16-bit units
LAYER_SECONDS = 4e-4
CORE_BANDWIDTH = 8e9  # bytes/s: a socket's 200 GB/s for some two dozen cores
INSIDE_SECONDS, ACROSS_SECONDS = 2e-6, 5e-6  # seconds for each message
NETWORK = 1e10  # bytes/s: 80 % of 100 Gbit/s, as of one HDR100 adapter
BUS = 2e10  # bytes/s between GPUs of a node: 80 % of PCIe 4.0 x16, in one direction


@dataclass(frozen=True)
class Speeds:
    """What one process has measured.

    Args:
        device: cpu, cuda or xpu.
        rank, layer, memory_bandwidth: as in `machine.Compute` and `machine.Machine`.
        node: flop/s of all ranks of a node together; None: each is as fast as alone.
        free: bytes of free memory: of the GPU, or of the node.
    """

    device: str
    rank: float
    node: float | None
    layer: float
    memory_bandwidth: float
    free: int


@dataclass(frozen=True)
class Here:
    """The machine on which the plan is made.

    Args:
        cores: number of cores that this process may use.
        free: bytes of free memory.
        speeds: what was measured; None: nothing was.
    """

    cores: int
    free: int
    speeds: Speeds | None = None


@dataclass(frozen=True)
class Figure:
    """A number of a machine's description, and where it comes from.

    Args:
        key: its key in a machine description, such as "across.beta".
        value: its value.
        origin: whether it was measured or assumed.
        text: what it is, in words.
    """

    key: str
    value: float
    origin: Literal["measured", "assumed"]
    text: str


@dataclass(frozen=True)
class Guess:
    """A machine that was not described, with all its figures."""

    machine: Machine
    figures: list[Figure]


def cores_of_a_rank(cores: int, ranks_per_node: int) -> int:
    """The cores that each rank of a node has, if they share all of them; at least 1."""
    return max(1, cores // ranks_per_node)


def guess(here: Here, dtype: str, nodes: int, ranks_per_node: int) -> Guess:
    """The machine of a job whose nodes are like this one.

    Args:
        here: this machine.
        dtype: the number format, as in `precision.dtype`.
        nodes: number of nodes. Links that the job has not are left out.
        ranks_per_node: ranks on each node.
    """
    figures = [*_own(here, dtype, ranks_per_node)]
    found = {figure.key: figure.value for figure in figures}
    rank, node, layer = (found.get(f"compute.{dtype}.{key}") for key in ("rank", "node", "layer"))
    bandwidth = found["memory_bandwidth"]
    assert rank is not None
    assert layer is not None
    gpus = here.speeds is not None and here.speeds.device != "cpu"
    inside, across = _inside(bandwidth, gpus=gpus), Link(ACROSS_SECONDS, 1 / NETWORK)
    machine = Machine(
        {dtype: Compute(rank, node, None, layer)},
        bandwidth,
        node_gib=found.get("node_gib"),
        rank_gib=found.get("rank_gib"),
        device=here.speeds.device if here.speeds else "cpu",
    )
    if ranks_per_node > 1:
        machine = replace(machine, inside=inside)
        why = "PCIe 4.0 x16" if gpus else "it is read and written once"
        figures += _link("inside", inside, "between ranks of a node", why)
    if nodes > 1:
        machine = replace(machine, across=across)
        figures += _link("across", across, "between nodes", "a network of 100 Gbit/s")
    return Guess(machine, figures)


def _own(here: Here, dtype: str, ranks_per_node: int) -> Iterator[Figure]:
    """The figures of a rank and of a node, measured or assumed."""
    speeds, cores = here.speeds, cores_of_a_rank(here.cores, ranks_per_node)
    used = min(ranks_per_node * cores, here.cores)
    known: Literal["measured", "assumed"] = "measured" if speeds else "assumed"
    core = CORE_FLOPS.get(dtype, OTHER_FLOPS)
    if speeds is None:
        speeds = Speeds("cpu", core * cores, core * used, LAYER_SECONDS, CORE_BANDWIDTH, here.free)
    on_gpu = speeds.device != "cpu"
    on = "its GPU" if on_gpu else plural(cores, "core")
    compute = f"compute.{dtype}"
    yield Figure(f"{compute}.rank", speeds.rank, known, f"flop/s of a rank on {on}")
    if speeds.node is not None:
        text = f"flop/s of {ranks_per_node} ranks of a node together"
        yield Figure(f"{compute}.node", speeds.node, known, text)
    text = "seconds of a layer for the smallest micro-batch"
    yield Figure(f"{compute}.layer", speeds.layer, known, text)
    text = "bytes/s that a rank reads and writes"
    yield Figure("memory_bandwidth", speeds.memory_bandwidth, known, text)
    key, whose = ("rank_gib", "GPU") if on_gpu else ("node_gib", "machine")
    free = float(f"{speeds.free / GIB:.4g}")
    yield Figure(key, free, "measured", f"GiB of free memory of this {whose}")


def _inside(bandwidth: float, *, gpus: bool) -> Link:
    """Messages between ranks of a node. Without GPUs each byte is read once and written once."""
    if gpus:
        return Link(INSIDE_SECONDS, 1 / BUS)
    copied = float(f"{2 / bandwidth:.4g}")
    return Link(INSIDE_SECONDS, copied, copied)


def _link(name: str, link: Link, where: str, why: str) -> list[Figure]:
    return [
        Figure(f"{name}.alpha", link.alpha, "assumed", f"seconds for each message {where}"),
        Figure(f"{name}.beta", link.beta, "assumed", f"seconds for each byte: {why}"),
        Figure(f"{name}.processor", link.processor, "assumed", "seconds of computing for a byte"),
    ]
