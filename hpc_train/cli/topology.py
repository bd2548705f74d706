"""`hpc-train topology [--dp N] [--tp N] [--pp N] [--json]`, on every rank of the job.

It draws nodes and sockets, and shows where each rank and each group runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc_train.cli.verb import Parser, make_console, plain_table, show_help

if TYPE_CHECKING:
    from hpc_train.mpi.placement import Placement
    from hpc_train.mpi.runtime import Runtime

NODE_HEADS = ("node", "rank", "dp", "tp", "pp", "socket", "bound to cores")
GROUP_HEADS = ("groups", "ranks each", "in a socket", "in a node", "across nodes")
AXES = {"dp": "data", "tp": "tensor", "pp": "pipe"}


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train topology",
        description="Draw nodes and sockets, and show where each rank and each group runs.",
    )
    made.add_argument("--dp", type=int, help="data-parallel size (default: the ranks / (tp x pp))")
    made.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size (default: %(default)s)"
    )
    made.add_argument(
        "--pp", type=int, default=1, help="pipeline-parallel size (default: %(default)s)"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        return show_help(options())
    from hpc_train.job.program import run as run_program

    return run_program(lambda runtime: _run(arguments, runtime))


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    given = options().parse_args(arguments)
    show(runtime, dp=given.dp, tp=given.tp, pp=given.pp, as_json=given.json)


def show(
    runtime: Runtime, *, dp: int | None = None, tp: int = 1, pp: int = 1, as_json: bool = False
) -> None:
    """Print the layout on rank 0, as text or as JSON. Collective.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks; raised on all ranks.
    """
    from hpc_train.mpi import topology as topologies
    from hpc_train.mpi.placement import place

    found = topologies.discover(runtime.world, runtime.node)
    placement = place(found, dp, tp, pp)
    machine = asdict(topologies.machine()) if runtime.node.rank == 0 else None
    mine = (machine, sorted(os.sched_getaffinity(0)))
    with runtime.world.waiting("the cores of all ranks"):
        told = runtime.world.comm.gather(mine) if runtime.world.comm else [mine]
    if told is None:  # not rank 0
        return
    shown = tree(placement, [machine for machine, _ in told], [cores for _, cores in told])
    if as_json:
        print(json.dumps(shown, indent=1), flush=True)
    else:
        draw(shown)


def tree(
    placement: Placement, machines: Sequence[dict[str, int] | None], cores: Sequence[list[int]]
) -> dict[str, Any]:
    """The layout as a tree, which is printed as JSON or drawn.

    Args:
        placement: where the job's ranks run.
        machines: sockets, NUMA domains and cores of each node, at the place of its lowest rank.
        cores: the cores that each rank may run on.
    """
    topology = placement.topology

    def rank(number: int) -> dict[str, Any]:
        where = {"socket": topology.socket[number], "bound_to": cores[number]}
        return {"rank": number, **asdict(placement.coordinate(number)), **where}

    nodes = [(host, topology.ranks_of(node)) for node, host in enumerate(topology.hosts)]
    return {
        **{axis: getattr(placement, axis) for axis in AXES},
        "nodes": [
            {"host": host, **(machines[ranks[0]] or {}), "ranks": [rank(r) for r in ranks]}
            for host, ranks in nodes
        ],
        "groups": extents(placement),
        "warning": placement.warning(),
    }


def extents(placement: Placement) -> dict[str, dict[str, int]]:
    """For each axis, the number of groups in one socket, in one node, and on several nodes."""
    from hpc_train.mpi.placement import NODE, NODES, SOCKET

    counts = {}
    groups = placement.groups()
    for axis, name in AXES.items():
        where = [placement.extent(group) for group in groups[name]]
        counts[axis] = {extent: where.count(extent) for extent in (SOCKET, NODE, NODES)}
    return counts


def draw(shown: dict[str, Any]) -> None:
    """Print the tree as text."""
    console = make_console()
    sizes = " x ".join(f"{axis} {shown[axis]}" for axis in AXES)
    console.print(f"{sizes}, nodes: {len(shown['nodes'])}")
    console.print(plain_table(NODE_HEADS, _rank_rows(shown["nodes"])))
    console.print(plain_table(GROUP_HEADS, _group_rows(shown)))
    if shown["warning"]:
        console.print(f"warning: {shown['warning']}", soft_wrap=True)


def _rank_rows(nodes: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for node in nodes:
        about = f"{node['host']}: sockets {node['sockets']}, cores {node['cores']}"
        for rank in node["ranks"]:
            where = [str(rank[name]) for name in ("rank", *AXES)]
            socket = str(rank["socket"]) if rank["socket"] >= 0 else "-"
            yield [about, *where, socket, spans(rank["bound_to"])]
            about = ""


def _group_rows(shown: dict[str, Any]) -> Iterator[list[str]]:
    for axis, counts in shown["groups"].items():
        yield [axis, str(shown[axis]), *(str(count) for count in counts.values())]


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
