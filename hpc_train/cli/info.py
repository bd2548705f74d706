"""`hpc-train info collectives`, on every rank of a job: how fast its ranks communicate."""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.cli.verb import COUNT, Parser, make_console, plain_table
from hpc_train.errors import plural, size_text
from hpc_train.times import time_text

if TYPE_CHECKING:
    from hpc_train.job.communication.figures import CollectiveFigure
    from hpc_train.job.communication.timing import WantedFigures
    from hpc_train.mpi.runtime import Runtime

DEFAULT_SIZES = "8,64,512,4K,32K,256K,1M,4M,16M,64M"
DEFAULT_SECONDS = 40.0
WORDS = ("bare", "mpi", "shared", "ring", "halving", "pipeline", "horovod")
DRAWINGS = (".html", ".svg")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 4 << 30  # bytes: counts of MPI 3 are 32-bit integers, and some libraries use their double
TABLE_WIDTH = 200  # of tables; a terminal that is narrower folds the lines


def options() -> Parser:
    """The options of the verb."""
    made = Parser("hpc-train info", description="Measure the machine that a job runs on.")
    made.lists = "actions"
    actions = made.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    collectives = actions.add_parser(
        "collectives",
        help="measure bandwidth and latency of each collective",
        description="Measure how long the ranks of a job take for each collective, inside a node, "
        "across nodes and over all ranks, by bare MPI and by each implementation of hpc_train. "
        "Start it with mpirun, srun or horovodrun. It takes less than a minute.",
    )
    add = collectives.add_argument
    add(
        "--sizes",
        type=sizes_of,
        default=DEFAULT_SIZES,
        metavar="N,N",
        help="bytes of the messages, with K, M or G for powers of 1024 (default: %(default)s)",
    )
    add(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="S",
        help="time for all measurements; if it is short, large messages are left out (default: "
        "%(default)s)",
    )
    add(
        "--repeats",
        default=400,
        help="the most repeats of each case (default: %(default)s)",
        **COUNT,
    )
    add(
        "--implementations",
        type=_words,
        default="",
        metavar="NAME,NAME",
        help=f"what to measure: {', '.join(WORDS)} (default: all that are here)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where the tensors are; auto takes the GPU if each rank has one (default: auto)",
    )
    add("--json", metavar="FILE", help="write all figures to this file as JSON")
    add("--csv", metavar="FILE", help="write all figures to this file as CSV")
    add(
        "--plot", type=_drawing, metavar="FILE", help="draw the figures in this file, .html or .svg"
    )
    return made


def sizes_of(text: str) -> tuple[int, ...]:
    """The sizes in bytes that a text such as 8,4K,1M names, ascending.

    Raises:
        ArgumentTypeError: a word is no size, no multiple of the 4 bytes of a float32, or too large.
    """
    found = set()
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([KMG]?)(i?B)?", word.strip(), re.ASCII | re.IGNORECASE)
        if not match:
            raise ArgumentTypeError(f"{word!r} is no size, such as 512, 4K or 1M")
        nbytes = int(match[1]) * UNITS[match[2].upper()]
        if nbytes % 4:
            raise ArgumentTypeError(f"{word!r} is no multiple of 4 bytes, a float32")
        if nbytes > LARGEST:
            raise ArgumentTypeError(f"{word!r} is more than 4G")
        found.add(nbytes)
    return tuple(sorted(found))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _words(text: str) -> tuple[str, ...]:
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    for word in words:
        if word not in WORDS:
            raise ArgumentTypeError(f"{word!r} is none of {', '.join(WORDS)}")
    return words


def _drawing(text: str) -> str:
    if Path(text).suffix not in DRAWINGS:
        raise ArgumentTypeError(f"{text!r} ends with none of {', '.join(DRAWINGS)}")
    return text


def run(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        options().parse_args(arguments)
    from hpc_train.job.program import run as run_program

    return run_program(lambda runtime: _run(arguments, runtime), ask_scheduler=False)


def _run(arguments: Sequence[str], runtime: Runtime) -> None:
    from hpc_train.errors import UserError
    from hpc_train.mpi.agreement import agreed

    given = options().parse_args(arguments)
    if runtime.world.comm is None:
        raise UserError(
            "one process alone has nothing to measure",
            "start several ranks, such as `mpirun -np 4 hpc-train info collectives`, or under srun "
            "with --nodes=2 --ntasks-per-node=8",
        )
    files = {kind: getattr(given, kind) for kind in ("json", "csv", "plot")}
    with agreed(runtime.world):
        if runtime.world.rank == 0:
            _check_files(files)
    from hpc_train.job.communication.timing import WantedFigures

    wanted = WantedFigures(given.sizes, given.seconds, given.implementations, given.repeats)
    measure_collectives(runtime, wanted, given.device, files)


def _check_files(files: Mapping[str, str | None]) -> None:
    """Refuse files that cannot be written, before the minute of the measurement."""
    from hpc_train.errors import UserError

    for path in map(Path, filter(None, files.values())):
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise UserError(f"{path} cannot be written", "name a file in a folder that is there")


def measure_collectives(
    runtime: Runtime, wanted: WantedFigures, device: str, files: Mapping[str, str | None]
) -> None:
    """Measure, print the tables on rank 0, and write the files. Collective.

    Args:
        runtime: the job, of two ranks or more.
        wanted: what to measure.
        device: auto, cpu or gpu.
        files: the files to write, by "json", "csv" and "plot"; None for none.

    Raises:
        HpcTrainError: a result is wrong; raised on all ranks.
        UserError: an option does not fit these ranks, or a file cannot be written; on all ranks.
    """
    from hpc_train.job.communication.cores import binding_advice, cores_of_ranks
    from hpc_train.job.communication.timing import time_collectives
    from hpc_train.mpi.agreement import from_first
    from hpc_train.mpi.levels import Levels
    from hpc_train.mpi.runtime import import_mpi, library_version
    from hpc_train.mpi.shared_cores import find_shared_cores
    from hpc_train.training.device import use_cores

    world = runtime.world
    use_cores(runtime)
    chosen = _device(runtime, device)
    levels = Levels.of(world)
    cores, one_machine = cores_of_ranks(runtime), find_shared_cores(runtime.world)
    library = library_version(import_mpi())
    title = (
        f"{plural(world.size, 'rank')} on {plural(levels.nodes, 'node')}, {library}, "
        f"float32 tensors on {'processors' if chosen.type == 'cpu' else 'GPUs'}"
    )
    runtime.print(f"{title}; this takes about {wanted.seconds:.0f} s")
    measured = time_collectives(levels, chosen, wanted)
    about = {
        "ranks": world.size,
        "nodes": levels.nodes,
        "hosts": list(dict.fromkeys(rank.host for rank in cores)),
        "launcher": runtime.launcher,
        "mpi": library,
        "device": chosen.type,
        "warnings": [
            *binding_advice(cores),
            *([one_machine] if one_machine.startswith("hosts") else []),
        ],
        "notes": measured.notes,
    }
    levels.close()

    def tell() -> None:
        show_figures(measured.figures)
        for text in (*(f"warning: {warning}" for warning in about["warnings"]), *measured.notes):
            print(text, flush=True)
        _write(measured.figures, about, title, files)

    from_first(world, tell)


def _device(runtime: Runtime, wanted: str) -> Any:
    """The device of this rank's tensors, of one kind on all ranks. Collective."""
    import torch

    from hpc_train.errors import ConfigError
    from hpc_train.mpi.agreement import agreed
    from hpc_train.training.device import choose_device

    here = torch.device("cpu") if wanted == "cpu" else choose_device(runtime.node.rank)
    with agreed(runtime.world):
        if wanted == "gpu" and here.type == "cpu":
            raise ConfigError(
                "--device is gpu, but torch finds no GPU", "`hpc-train doctor` says why"
            )
    everywhere = runtime.world.smallest(int(here.type != "cpu"))
    return here if everywhere else torch.device("cpu")


def _write(
    figures: Sequence[CollectiveFigure],
    about: dict[str, Any],
    title: str,
    files: Mapping[str, str | None],
) -> None:
    """Write the files that were asked for.

    Raises:
        UserError: one cannot be written.
    """
    from hpc_train import files as writing
    from hpc_train.errors import UserError
    from hpc_train.job.communication.chart import chart_page, svg
    from hpc_train.job.communication.figures import to_csv

    texts = {}
    if as_json := files["json"]:
        tree = {**about, "figures": [figure.as_row() for figure in figures]}
        texts[as_json] = json.dumps(tree, indent=1) + "\n"
    if as_csv := files["csv"]:
        texts[as_csv] = to_csv(figures)
    if plot := files["plot"]:
        lines = [", ".join(about["hosts"]), *(f"warning: {text}" for text in about["warnings"])]
        drawing = svg(figures, f"Collectives: {title}", [*lines, *about["notes"]])
        html = Path(plot).suffix == ".html"
        texts[plot] = chart_page(drawing) if html else drawing
    for name, text in texts.items():
        try:
            writing.write_text(Path(name), text)
        except OSError as error:
            raise UserError(f"{name} cannot be written: {error.strerror}") from None


def show_figures(figures: Sequence[CollectiveFigure]) -> None:
    """Print a table for each operation of each scope, and one that sums them up."""
    from hpc_train.job.communication.figures import SCOPES

    console = make_console(TABLE_WIDTH)
    for scope, operation in dict.fromkeys((f.scope, f.operation) for f in figures):
        mine = [f for f in figures if (f.scope, f.operation) == (scope, operation)]
        console.print(f"\n{operation}, {SCOPES[scope]} ({plural(mine[0].ranks, 'rank')})")
        console.print(plain_table(*_columns(mine), figures=True))
    console.print("\nat a glance")
    heads = ("", "", "latency, bare MPI", "size", "fastest", "GB/s", "bare MPI's time / its time")
    console.print(plain_table(heads, _glance(figures), figures=True))
    print(
        "\nThe time is the median of the repeats, each on its slowest rank. In brackets is half of "
        "the distance\nbetween the quartiles. GB/s is the bus bandwidth of nccl-tests, 10^9 bytes "
        "per second.",
        flush=True,
    )


def _columns(figures: Sequence[CollectiveFigure]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of one operation: for each implementation its time and its bandwidth."""
    names = [name for name in WORDS if any(f.implementation == name for f in figures)]
    sizes = sorted({figure.nbytes for figure in figures})
    found = {(figure.implementation, figure.nbytes): figure for figure in figures}
    heads = ["size"]
    for name in names:
        heads += [name, "", "GB/s"] if sizes[-1] else [name, ""]
    rows = []
    for size in sizes:
        row = [size_text(size) if size else "-"]
        for name in names:
            figure = found.get((name, size))
            if figure is None:
                row += ["-", "", "-"]
            else:
                row += [time_text(figure.seconds), f"({figure.scatter:.0%})"]
                row += [f"{figure.bus_bandwidth / 1e9:.3g}"] if size else []
        rows.append(row)
    return heads, rows


def _glance(figures: Sequence[CollectiveFigure]) -> Iterator[list[str]]:
    """For each operation bare MPI's latency, and who is fastest at the largest size of most."""
    from hpc_train.job.communication.figures import BARE

    for scope, operation in dict.fromkeys((f.scope, f.operation) for f in figures):
        mine = [f for f in figures if (f.scope, f.operation) == (scope, operation)]
        bare = {f.nbytes: f for f in mine if f.implementation == BARE}
        latency = time_text(bare[min(bare)].seconds) if bare else "-"
        measured = Counter(figure.nbytes for figure in mine)
        size = max(measured, key=lambda nbytes: (measured[nbytes], nbytes))
        best = min((f for f in mine if f.nbytes == size), key=lambda f: f.seconds)
        ratio = f"{bare[size].seconds / best.seconds:.2f}" if size in bare else "-"
        if size:
            speed = f"{best.bus_bandwidth / 1e9:.3g}"
            yield [operation, scope, latency, size_text(size), best.implementation, speed, ratio]
        else:
            yield [operation, scope, latency, "-", best.implementation, "-", ratio]
