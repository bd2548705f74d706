"""`hpc-train plan CONFIG.yaml [--nodes N --ranks_per_node R] [--section.key VALUE ...]`."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hpc_train.cli.verb import COUNT, Parser, WithExamples, make_console, show_help, wants_help
from hpc_train.errors import UserError, plural, size_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from hpc_train.config import RunConfig
    from hpc_train.mpi.runtime import Runtime
    from hpc_train.planning.assumed import Figure, Guess
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
host         with memory.offload optimizer, the rank's state in the memory of the node;
             state has what is on the GPU
activations  """

NOTES_ON_LAYOUTS = """\
options   sequence: parallel.sequence_parallel; zero, recompute: those of memory
samples   samples of a micro-batch
{speed:9} {noun} per second of the whole job
memory    memory of the rank that needs most
bubble    share of the step in which processors would wait if messages took no time
messages  share of the step that messages add
All numbers are predicted from the machine description: docs/how-to/plan.md"""

MACHINE = "machine.yaml"  # the description that is read and written unless another one is named
BUSY = 0.5  # load of a core from which on measurements are not to be trusted
REASONS = 4  # number of reasons for which sizes are left out that are shown
EXAMPLES = """\
measure a machine on ranks of a job, in a batch job or an allocation:
  srun --nodes=2 --ntasks-per-node=8 hpc-train plan my.yaml --measure
  mpirun -np 16 hpc-train plan my.yaml --measure
then plan on a login node:
  hpc-train plan my.yaml --nodes 4 --ranks_per_node 8"""


def options() -> Parser:
    """The options of the verb."""
    made = Parser(
        prog="hpc-train plan",
        usage="hpc-train plan [CONFIG.yaml] [--section.key VALUE ...] [options]",
        description="Tell bubble and memory of each pipeline schedule, without training. With "
        "--nodes or --ranks_per_node, list the layouts of such a job that fit in memory instead, "
        "the fastest first, as predicted from a machine description. Without a description, this "
        "machine is measured for some seconds, and the rest is assumed.",
        epilog=EXAMPLES,
        formatter_class=WithExamples,
    )
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration's file")
    made.add_argument("--nodes", help="number of nodes", **COUNT)
    made.add_argument("--ranks_per_node", help="ranks on each node (default: 1)", **COUNT)
    made.add_argument(
        "--machine",
        metavar="FILE",
        help=f"the machine description (default: {MACHINE}, if it is there)",
    )
    made.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine and write its description: run it under a launcher, on the "
        "ranks of a job, as below",
    )
    made.add_argument(
        "--top", default=10, help="number of layouts to show (default: %(default)s)", **COUNT
    )
    made.add_argument(
        "--all",
        action="store_true",
        help="show all schedules, micro-batches and options of each dp x tp x pp, not only the "
        "fastest, and all sizes that are left out",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if wants_help(arguments):
        return show_help(options())
    from hpc_train.config import file

    own, keys = file.separate(arguments)
    given = options().parse_args(own)
    if given.measure:
        if given.nodes or given.ranks_per_node:
            raise UserError(
                "--measure measures its own ranks, and --nodes or --ranks_per_node is given",
                "start as many ranks by a launcher, and leave these options out",
            )
        from hpc_train.job.program import run as run_program

        return run_program(lambda runtime: _measure(given, keys, runtime))
    settings = file.load(given.config, keys)
    if given.nodes or given.ranks_per_node:
        found = _chosen(settings, given)
        show_layouts(found, as_json=given.json, every=given.all)
        return 0
    from hpc_train.planning import schedules

    show_schedules(schedules.plan(settings), as_json=given.json)
    return 0


def _chosen(settings: RunConfig, given: Namespace) -> Choice:
    """The layouts of a job, on the machine that is described, or else on one like this."""
    from hpc_train.planning import choose, machine

    job = (given.nodes or 1, given.ranks_per_node or 1)
    if given.machine or Path(MACHINE).exists():
        described = machine.load_machine(Path(given.machine or MACHINE))
        return choose.choose(settings, described, *job, top=given.top, every=given.all)
    choose.check_size(settings, *job)  # a mistake is told before anything is measured
    guess, warning = _guessed(settings, *job)
    found = choose.choose(settings, guess.machine, *job, top=given.top, every=given.all)
    return replace(found, figures=guess.figures, warning=warning)


def _guessed(settings: RunConfig, nodes: int, ranks_per_node: int) -> tuple[Guess, str]:
    """A machine like this one, and a warning if it could not be measured, or not well."""
    from hpc_train.host.cores import physical_cores
    from hpc_train.host.memory import free_bytes
    from hpc_train.planning import assumed

    print(f"there is no {MACHINE}: measuring this machine", file=sys.stderr, flush=True)
    cores = len(physical_cores(os.sched_getaffinity(0)))
    speeds, warning, load = None, "", os.getloadavg()[0]
    if load > BUSY * cores:
        warning = f"others use this machine (load {load:.1f}, {cores} cores): it measures too slow"
    try:
        from hpc_train.training.measure import measure_alone

        speeds = measure_alone(settings, ranks_per_node)
    except Exception as error:  # noqa: BLE001  # torch may be missing, or unfit for a login node
        why = " ".join(f"{type(error).__name__}: {error}".split())
        warning = f"the speed of this machine is assumed, because measuring it failed: {why}"
    here = assumed.Here(cores, free_bytes(), speeds)
    return assumed.guess(here, settings.precision.dtype, nodes, ranks_per_node), warning


def _measure(given: Namespace, keys: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.config import file
    from hpc_train.mpi.agreement import agreed

    with agreed(runtime.world):
        settings = file.load(given.config, keys)
        from hpc_train.training import measure
    made, path = measure.measure(settings, runtime), Path(given.machine or MACHINE)
    with agreed(runtime.world):
        if runtime.world.rank == 0:
            measure.write(made, path, runtime.world.size)
    runtime.print(path.read_text(encoding="utf-8").rstrip() if runtime.world.rank == 0 else "")


def show_schedules(made: Plan, *, as_json: bool) -> None:
    """Print the schedules of a layout: a table, or one JSON object with sizes in bytes."""
    if as_json:
        tree = asdict(made)
        del tree["note"]
        print(json.dumps(tree))
        return
    from hpc_train.parallel.schedule import Name

    print(
        f"dp {made.dp} x tp {made.tp} x pp {made.pp}; "
        f"{plural(made.micro_batches, 'micro-batch')} per step, samples in each: "
        f"{made.micro_batch}; {made.sizes}"
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

    staged = any(entry.host_bytes for entry in made.schedules)
    numbers = ["bubble", "even", "live", "activations", "state", "memory"]
    table = _table(["schedule"], [*numbers, *["host"] * staged], narrow=staged)
    for entry in made.schedules:
        table.add_row(
            f"{'*' if entry.chosen else ' '} {entry.schedule}",
            f"{entry.bubble:.1%}",
            f"{entry.bubble_even:.1%}",
            str(entry.peak_live),
            size_text(entry.activation_bytes),
            size_text(entry.state_bytes),
            size_text(entry.activation_bytes + entry.state_bytes),
            *[size_text(entry.host_bytes)] * staged,
        )
    return table


def show_layouts(made: Choice, *, as_json: bool, every: bool = False) -> None:
    """Print the layouts of a job: a table, or one JSON object.

    Args:
        made: the layouts.
        as_json: whether to print JSON.
        every: whether the table is followed by all sizes that were left out, not by some of them.
    """
    if as_json:
        print(json.dumps(asdict(made)))
        return
    print(
        f"nodes: {made.nodes}, ranks per node: {made.ranks_per_node}, layouts that fit: {made.fit}"
    )
    _print(_layouts(made.layouts), width=120)
    print(f"options of the first: {made.layouts[0].options}")
    for line in _all_left_out(made.left_out) if every else _some_left_out(made.left_out):
        print(f"left out: {line}")
    if made.figures:
        _print(_figures(made.figures), width=100)
        print(_how_to_measure(made))
    if made.warning:
        print(f"warning: {made.warning}")
    noun = _noun(made.layouts)
    print(NOTES_ON_LAYOUTS.format(speed=f"{noun}/s", noun=noun))


def _noun(rows: Sequence[Row]) -> str:
    """What the speed is told in: tokens of text, or else samples."""
    return "samples" if rows[0].tokens_per_second is None else "tokens"


def _layouts(rows: Sequence[Row]) -> Table:

    table = _table(
        ["dp x tp x pp", "schedule", "options"],
        ["samples", "step s", f"{_noun(rows)}/s", "memory", "bubble", "messages"],
        narrow=True,
    )
    for row in rows:
        table.add_row(
            f"{row.dp} x {row.tp} x {row.pp}",
            row.schedule if row.pp > 1 else "",
            " ".join(_options(row)),
            str(row.micro_batch),
            f"{row.step_seconds:.4g}",
            f"{row.tokens_per_second or row.samples_per_second:.0f}",
            size_text(row.memory_bytes),
            f"{row.bubble:.0%}",
            f"{row.communication:.0%}",
        )
    return table


def _options(row: Row) -> list[str]:
    zero = f"zero {row.zero}" if row.zero > 1 else "zero" * row.zero
    again = f"recompute {row.recompute}" if row.recompute != "none" else ""
    return list(filter(None, ["sequence" * row.sequence_parallel, zero, again]))


def _all_left_out(left_out: Iterable[LeftOut]) -> list[str]:
    """A line for each reason, with all sizes that were left out for it."""
    found: dict[str, list[str]] = {}
    for one in left_out:
        found.setdefault(one.why, []).append(f"{one.dp} x {one.tp} x {one.pp}")
    return [f"{', '.join(several)}: {why}" for why, several in found.items()]


def _some_left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """A line for each kind of reason, with the number of sizes and an example.

    Reasons are of one kind if they differ only in their numbers.
    """
    kinds: dict[str, list[LeftOut]] = {}
    for one in sorted(left_out, key=lambda one: one.memory_bytes):  # the nearest is the example
        kinds.setdefault(re.sub(r"[\d.]+ ?([KMGT]iB)?", "N", one.why), []).append(one)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    lines = [
        f"{plural(len(alike), 'size')}, such as {one.dp} x {one.tp} x {one.pp}: {one.why}"
        for alike in ordered[:REASONS]
        for one in alike[:1]
    ]
    if rest := sum(map(len, ordered[REASONS:])):
        lines.append(f"{rest} sizes for other reasons")
    return [*lines[:-1], f"{lines[-1]} (--all shows each)"] if lines else []


def _figures(figures: Sequence[Figure]) -> Table:
    table = _table(["figure", "", "origin", "what it is"], [])
    table.columns[1].justify = "right"
    for figure in figures:
        table.add_row(figure.key, f"{figure.value:g}", figure.origin, figure.text)
    return table


def _how_to_measure(made: Choice) -> str:
    nodes = min(2, made.nodes)
    return (
        f"There is no {MACHINE}: these figures were measured on {socket.gethostname()}, by one "
        f"process, or assumed.\nTo measure all of them, run this in a job of "
        f"{plural(nodes, 'node')}:\n"
        f"  mpirun -np {nodes * made.ranks_per_node} hpc-train plan CONFIG.yaml --measure"
    )


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
    make_console(width).print(table)
