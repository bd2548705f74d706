"""Shared by all benchmarks: run candidates in turn, print a table, end with one line of JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.table import Table

from hpc_train.host import processor
from hpc_train.mpi import environment

if TYPE_CHECKING:
    from hpc_train.mpi.group import Group

Samples = dict[str, list[float]]


def in_turn(
    candidates: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    *,
    shuffled: bool = False,
) -> Samples:
    """Measure candidates A B C A B C ..., so that drift of the machine affects all of them equally.

    Args:
        candidates: each measures itself once and returns the figure.
        rounds: number of measurements of each candidate that count.
        warmup: number of rounds before them that do not count.
        shuffled: whether each round has another order, the same on all ranks. Use it if a candidate
            can affect the one after it.
    """
    samples: Samples = {name: [] for name in candidates}
    for number in range(warmup + rounds):
        names = list(candidates)
        if shuffled:
            Random(number).shuffle(names)
        for name in names:
            value = candidates[name]()
            if number >= warmup:
                samples[name].append(value)
    return samples


def mpirun(ranks: int, *, bind: bool = True) -> list[str]:
    """The launcher's words. With `bind` each rank has a core of its own if there are enough."""
    bound = "core" if bind and ranks <= len(os.sched_getaffinity(0)) else "none"
    return ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", bound]


def environ() -> dict[str, str]:
    """The variables with which ranks of one thread are started."""
    return environment.for_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}


def on_ranks(ranks: int, module: str, *arguments: str, bind: bool = True) -> Any:
    """Run `python -m MODULE` on ranks of this machine. Returns what rank 0 gave to `hand_back`."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        words = [sys.executable, "-m", module, "--result", str(result), *arguments]
        command = [*mpirun(ranks, bind=bind), *words]
        subprocess.run(command, env=environ(), check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def memory_for(ranks: int, mib: int) -> bool:
    """Whether there are `mib` MiB of free memory for each rank. Too little would end programs."""
    if psutil.virtual_memory().available >= ranks * mib << 20:
        return True
    print(f"{ranks} ranks are left out: they need {ranks * mib >> 10} GiB of free memory")
    return False


def meet(group: Group) -> None:
    """Wait for all ranks of a group. It sleeps, as ranks that still compute may need this core."""
    if group.comm is None:
        return
    begin = time.perf_counter()
    everyone = group.comm.Ibarrier()
    while not everyone.Test():
        time.sleep(min(max((time.perf_counter() - begin) / 16, 50e-6), 5e-3))


def elapsed(group: Group, call: Callable[[], object]) -> float:
    """Seconds until the last rank has returned from a call. Collective."""
    meet(group)
    begin = time.perf_counter()
    call()
    taken = time.perf_counter() - begin
    meet(group)
    return group.largest(int(1e9 * taken)) / 1e9


@contextmanager
def emulated_hosts(count: int, slots: int, mbit: int) -> Iterator[Any]:
    """Emulated hosts on this machine with shaped links. If that cannot be, it exits with 2."""
    from tests.cluster import hosts

    if hosts.why_not():
        print(hosts.why_not(), file=sys.stderr)
        sys.exit(2)
    with hosts.hosts(count, slots, mbit) as cluster:
        for host in cluster.names:  # tests/cluster/test_traffic.py has the reason
            cluster.on(
                host, ["sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_sack"]
            ).check_returncode()
        yield cluster


def on_hosts(cluster: Any, by: str, module: str, *arguments: str, timeout: float = 900) -> Any:
    """Like `on_ranks`, but fills all slots of the hosts, by "slot" or by "node"."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        command = [sys.executable, "-m", module, "--result", str(result), *arguments]
        done = cluster.run(command, len(cluster.names) * cluster.slots, by, timeout)
        if done.returncode:
            raise RuntimeError(f"{module} failed on the hosts:\n{done.stdout}\n{done.stderr}")
        return json.loads(result.read_text(encoding="utf-8"))


def sweep(
    module: str, several: Sequence[int], **options: int
) -> Iterator[tuple[int, str, Samples]]:
    """Run a benchmark on each number of ranks. Yields the number, the case and its samples."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    for ranks in several:
        for case, samples in on_ranks(ranks, module, *words).items():
            yield ranks, case, samples


def hand_back(path: str, value: Any) -> None:
    """Return a result from rank 0 to the process that called `on_ranks` or `on_hosts`."""
    Path(path).write_text(json.dumps(value), encoding="utf-8")


def parser(description: str, **defaults: int) -> argparse.ArgumentParser:
    """A parser of --json, --result and the integer options in `defaults`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", metavar="FILE", help="write the last line there as well")
    made.add_argument("--result", help=argparse.SUPPRESS)
    for name, default in defaults.items():
        made.add_argument(f"--{name}", type=int, default=default)
    return made


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """Parse the options of `parser`."""
    return parser(description, **defaults).parse_args()


def digest(folder: Path) -> str:
    """A hash of all files of a folder and of their names. Files may be larger than memory."""
    found = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode() + b"\0")
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def medians(samples: Samples) -> dict[str, float]:
    """The median of each candidate."""
    return {name: statistics.median(values) for name, values in samples.items()}


def paired_ratio(samples: Samples, name: str, other: str) -> float:
    """The median over all rounds of a candidate's figure divided by the other's of that round."""
    pairs = zip(samples[name], samples[other], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def show(title: str, unit: str, samples: Samples, baseline: str) -> None:
    """Print a table with median, spread, and the ratio to a baseline, paired by round."""
    table = Table("candidate", f"median {unit}", "min", "max", f"x {baseline}", title=title)
    for name, values in samples.items():
        middle = statistics.median(values)
        ratio = paired_ratio(samples, name, baseline)
        cells = (f"{value:.4g}" for value in (middle, min(values), max(values)))
        table.add_row(name, *cells, f"{ratio:.3f}")
    Console(width=100).print(table)


def finish(
    name: str, ratios: Mapping[str, float], middles: Mapping[str, float], json_file: str | None
) -> None:
    """Print the last line, which is JSON."""
    line = json.dumps(
        {
            "benchmark": name,
            "ratios": {key: round(value, 4) for key, value in ratios.items()},
            "medians": dict(middles),
            "machine": machine(),
        }
    )
    print(line)
    if json_file:
        Path(json_file).write_text(line + "\n", encoding="utf-8")


def finish_parts(
    name: str,
    parts: Iterable[tuple[int, Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]]],
    json_file: str | None,
) -> None:
    """Run the parts of a benchmark whose number is not 0, each of which returns ratios and medians.

    Print the last line of all.
    """
    ratios: dict[str, float] = {}
    middles: dict[str, float] = {}
    for wanted, report in parts:
        if wanted:
            more, others = report()
            ratios |= more
            middles |= others
    finish(name, ratios, middles, json_file)


def machine() -> dict[str, Any]:
    """A description of this machine, with today's date."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    kind = processor.here()
    return {
        "date": date.today().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "vendor": kind.vendor,
        "family": kind.family,
        "model": kind.model,
        "instruction_sets": kind.sets,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "python": platform.python_version(),
        "mpirun": shutil.which("mpirun") is not None,
    }
