"""`hpc-train plan CONFIG.yaml [--nodes N --ranks_per_node R] [--section.key VALUE ...]`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hpc_train.cli.verb import COUNT, Parser, show_help, wants_help

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from hpc_train.mpi.runtime import Runtime
    from hpc_train.planning.choose import Choice, Row
    from hpc_train.planning.layouts import LeftOut
    from hpc_train.planning.schedules import Plan

NOTES_ON_SCHEDULES = """\
*            the schedule of the configuration
bubble       share of the step in which ranks wait, if a layer's forward pass, input
             gradient and weight gradient take equal times, and communication none
even         the same share if all stages cost the same
live         micro-batches, counted in each of its stages, that a rank holds at most
memory       activations and state of the rank that needs most
state        parameters, gradients and optimizer state
activations  """

NOTES_ON_LAYOUTS = """\
options   sequence: parallel.sequence_parallel; zero: memory.zero
samples   samples of a micro-batch
tokens/s  tokens per second of the whole job
memory    memory of the rank that needs most
bubble    share of the step in which processors would wait if messages took no time
messages  share of the step that messages add
All numbers are predicted from the machine description: docs/how-to/plan.md"""


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train plan",
        usage="hpc-train plan [CONFIG.yaml] [--section.key VALUE ...] [options]",
        description="Tell bubble and memory of each pipeline schedule, without training. With "
        "--nodes or --ranks_per_node, list the layouts of such a job that fit in memory instead, "
        "the fastest first, as predicted from a machine description.",
    )
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration's file")
    made.add_argument("--nodes", help="number of nodes", **COUNT)
    made.add_argument("--ranks_per_node", help="ranks on each node (default: 1)", **COUNT)
    made.add_argument(
        "--machine",
        default="machine.yaml",
        metavar="FILE",
        help="the machine description (default: %(default)s)",
    )
    made.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine and write its description: run it under a launcher, on the "
        "ranks of a job",
    )
    made.add_argument(
        "--top", default=10, help="number of layouts to show (default: %(default)s)", **COUNT
    )
    made.add_argument(
        "--all",
        action="store_true",
        help="show all schedules, micro-batches and options of each dp x tp x pp, not only the "
        "fastest",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if wants_help(arguments):
        return show_help(options(), arguments)
    from hpc_train.config import file

    own, keys = file.separate(arguments)
    given = options().parse_args(own)
    if given.measure:
        from hpc_train.job.program import run as run_program

        return run_program(lambda runtime: _measure(given, keys, runtime))
    settings = file.load(given.config, keys)
    if given.nodes or given.ranks_per_node:
        from hpc_train.planning import choose, machine

        found = choose.choose(
            settings,
            machine.load_machine(Path(given.machine)),
            given.nodes or 1,
            given.ranks_per_node or 1,
            top=given.top,
            every=given.all,
        )
        show_layouts(found, as_json=given.json)
        return 0
    from hpc_train.planning import schedules

    show_schedules(schedules.plan(settings), as_json=given.json)
    return 0


def _measure(given: Namespace, keys: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.config import file
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        settings = file.load(given.config, keys)
        from hpc_train.training import measure
    made, path = measure.measure(settings, runtime), Path(given.machine)
    with agreed(runtime.world):
        if runtime.world.rank == 0:
            measure.write(made, path, runtime.world.size)
    runtime.print(path.read_text().rstrip() if runtime.world.rank == 0 else "")


def show_schedules(made: Plan, *, as_json: bool) -> None:
    """Print the schedules of a layout: a table, or one JSON object with sizes in bytes."""
    if as_json:
        tree = asdict(made)
        del tree["note"]
        print(json.dumps(tree))
        return
    from hpc_train.parallel.schedule import Name

    print(
        f"dp {made.dp} x tp {made.tp} x pp {made.pp}; {made.micro_batches} micro-batches per step, "
        f"samples in each: {made.micro_batch}; vocabulary: {made.vocab}"
    )
    _print(_schedules(made))
    layers = {entry.virtual_stages: entry.layers for entry in made.schedules}
    for virtual_stages, blocks in layers.items():
        of = f", {virtual_stages} virtual stages per rank" if virtual_stages > 1 else ""
        print(f"layers of each stage{of}: {' '.join(map(str, blocks))}")
    left_out = set(get_args(Name)) - {entry.schedule for entry in made.schedules}
    if left_out:
        print(f"not shown, because the layers are too few: {', '.join(sorted(left_out))}")
    print(NOTES_ON_SCHEDULES + made.note.replace("\n", "\n" + " " * 13))


def _schedules(made: Plan) -> Table:
    from hpc_train.planning.schedules import size

    table = _table(["schedule"], ["bubble", "even", "live", "activations", "state", "memory"])
    for entry in made.schedules:
        table.add_row(
            f"{'*' if entry.chosen else ' '} {entry.schedule}",
            f"{entry.bubble:.1%}",
            f"{entry.bubble_even:.1%}",
            str(entry.peak_live),
            size(entry.activation_bytes),
            size(entry.state_bytes),
            size(entry.activation_bytes + entry.state_bytes),
        )
    return table


def show_layouts(made: Choice, *, as_json: bool) -> None:
    """Print the layouts of a job: a table, or one JSON object."""
    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(
        f"nodes: {made.nodes}, ranks per node: {made.ranks_per_node}, layouts that fit: {made.fit}"
    )
    _print(_layouts(made.layouts), width=100)
    print(f"options of the first: {made.layouts[0].options()}")
    for why, several in _by_reason(made.left_out).items():
        print(f"left out: {', '.join(several)}: {why}")
    if made.warning:
        print(f"warning: {made.warning}")
    print(NOTES_ON_LAYOUTS)


def _layouts(rows: Sequence[Row]) -> Table:
    from hpc_train.planning.schedules import size

    table = _table(
        ["dp x tp x pp", "schedule", "options"],
        ["samples", "step s", "tokens/s", "memory", "bubble", "messages"],
        narrow=True,
    )
    for row in rows:
        table.add_row(
            f"{row.dp} x {row.tp} x {row.pp}",
            row.schedule if row.pp > 1 else "",
            " ".join(["sequence"] * row.sequence_parallel + ["zero"] * row.zero),
            str(row.micro_batch),
            f"{row.step_seconds:.4g}",
            f"{row.tokens_per_second:.0f}",
            size(row.memory_bytes),
            f"{row.bubble:.0%}",
            f"{row.communication:.0%}",
        )
    return table


def _by_reason(left_out: Iterable[LeftOut]) -> dict[str, list[str]]:
    """The sizes that were left out, by their reason."""
    found: dict[str, list[str]] = {}
    for one in left_out:
        found.setdefault(one.why, []).append(f"{one.dp} x {one.tp} x {one.pp}")
    return found


def _table(texts: Sequence[str], numbers: Sequence[str], *, narrow: bool = False) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, collapse_padding=narrow)
    for title in texts:
        table.add_column(title, no_wrap=narrow)
    for title in numbers:
        table.add_column(title, justify="right")
    return table


def _print(table: Table, width: int | None = None) -> None:
    from rich.console import Console

    Console(highlight=False, width=width).print(table)
