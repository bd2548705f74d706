"""`hpc-train stage` beside one rsync per node, over emulated hosts with slow links.

    python -m benchmarks.staging [--rounds 3] [--mbit 800]

2, 3 and 4 hosts get the environment of this program on disks of their own (/dev/shm). The
first host has it. In turn `stage` brings it to all, and rsync does: every host copies it from the
first one's rsync daemon, all at the same time. Times are those of the whole commands. The bound is
the time in which a link carries all bytes of the files once. The bytes that leave the first host
are counted at its link.

Then the parts of a model for large machines (`predicted`) are measured on this machine: the work of
one node, and the time of a chunk between two ranks without reading and writing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import stat
import statistics
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.staging import copy
from hpc_train.staging.relay import Relay
from hpc_train.staging.stage import StageRequest, list_request
from hpc_train.staging.stream import LEAST, MOST, Source, Stream, chunk_bytes

NAME = "staging"
HOSTS = (2, 3, 4)
OURS, RSYNC, BOUND = "stage", "rsync per node", "bound"
DISK = Path("/dev/shm")  # of each host
ENVIRONMENT = Path(sys.prefix)
DAEMON = "[environment]\npath = {path}\nuse chroot = no\nuid = 0\ngid = 0\n"
CHUNKS = 2000  # of a measurement

# Assumptions about a large machine.
NODES = (4, 64, 256, 1024)
GBIT = (100, 200)
LARGE = 8e9  # bytes of an environment with CUDA


class Candidates:
    """Brings the environment to all hosts of a cluster, in one way or the other.

    Args:
        cluster: the hosts.
        files: number of files that each host has to get.
    """

    def __init__(self, cluster: Any, files: int) -> None:
        self.cluster, self.files = cluster, files
        self.left: dict[str, list[int]] = {OURS: [], RSYNC: []}  # bytes that left the first host

    def measured(self, name: str, bring: Callable[[], Path]) -> float:
        """Seconds in which all hosts get their copies, which are checked and removed."""
        first = self.cluster.names[0]
        before = self.cluster.bytes_sent()[first]
        begin = time.perf_counter()
        folder = bring()
        taken = time.perf_counter() - begin
        self.left[name].append(self.cluster.bytes_sent()[first] - before)
        count = f"find {folder} -type f | wc -l"
        for host in self.cluster.names:
            found = int(self.cluster.on(host, ["sh", "-c", count]).stdout)
            if found != self.files:
                raise RuntimeError(f"{name}: {host} has {found} files, not {self.files}")
            self.cluster.on(host, ["sh", "-c", f"rm -rf {DISK}/*"]).check_returncode()
        return taken

    def ours(self) -> Path:
        """Bring it with `hpc-train stage`, one rank on each host."""
        words = [sys.executable, "-m", "hpc_train", "stage", "--to", str(DISK)]
        done = self.cluster.run(words, len(self.cluster.names), timeout=600)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return DISK / f"hpc_train-user-{os.getuid()}" / "environment"

    def rsync(self) -> Path:
        """Bring it with an rsync on each host."""
        first, target = self.cluster.names[0], DISK / "environment"
        words = ["rsync", "--archive", f"rsync://{first}/environment/", f"{target}/"]
        with ThreadPoolExecutor() as pool:
            for done in pool.map(
                lambda name: self.cluster.on(name, words, 600), self.cluster.names
            ):
                if done.returncode:
                    raise RuntimeError(done.stderr)
        return target


def on_hosts(count: int, rounds: int, mbit: int, files: int) -> tuple[harness.Samples, Candidates]:
    """Measure both ways in turn, on a number of hosts."""
    with tempfile.TemporaryDirectory() as folder, harness.emulated_hosts(count, 1, mbit) as cluster:
        settings = Path(folder, "rsyncd.conf")
        settings.write_text(DAEMON.format(path=ENVIRONMENT), encoding="utf-8")
        start = shlex.join(["rsync", "--daemon", f"--config={settings}"])
        cluster.on(cluster.names[0], ["sh", "-c", start]).check_returncode()
        ways = Candidates(cluster, files)
        candidates = {
            OURS: partial(ways.measured, OURS, ways.ours),
            RSYNC: partial(ways.measured, RSYNC, ways.rsync),
        }
        return harness.in_turn(candidates, rounds, warmup=0), ways


def measure_node(folder: Path) -> tuple[float, float]:
    """Seconds of one node alone: for the stream, and for all else."""
    begin = time.perf_counter()
    found = list_request(StageRequest(environment=ENVIRONMENT), folder)
    stream = Stream(found.items, chunk_bytes(found.nbytes, 1))
    mine = copy.Copy(folder, found.items, stream)
    copy.make_folder(folder)
    mine.begin()
    sizes = [stream.nbytes(number) for number in range(stream.chunks)]
    relay = Relay(Group(), sizes, Source(found, stream).read, mine.write)
    streamed = harness.elapsed(Group(), relay.run)
    mine.finish()
    whole = time.perf_counter() - begin
    copy.remove_copy(folder)
    return streamed, whole - streamed


def measure_chunks(options: argparse.Namespace) -> None:
    """Measure the time of a chunk between ranks that neither read nor write, on each rank."""
    started = runtime.start_runtime()
    levels = Levels.flat(started.world)
    found = {}
    for chunk in (LEAST, MOST):
        relay = Relay(levels.cross, [chunk] * CHUNKS, nothing, nothing)
        found[chunk] = harness.elapsed(started.world, relay.run) / CHUNKS
    if started.world.rank == 0:
        harness.hand_back(options.result, found)
    started.close()


def nothing(number: int, memory: memoryview) -> None:
    """Neither read nor write a chunk."""


def predicted(
    nodes: int, total: float, gbit: int, node: Sequence[float], chunks: dict[int, float]
) -> float:
    """Seconds until all nodes have their copies, by a pipeline of chunks through all nodes.

    Args:
        nodes: number of nodes.
        total: bytes of all files.
        gbit: bandwidth of a link, in Gbit/s.
        node: seconds per byte of one node's reading and writing, and of all its other work.
        chunks: seconds of a chunk without reading and writing, by its bytes.
    """
    chunk = chunk_bytes(int(total), nodes)
    share = (chunk - LEAST) / (MOST - LEAST)
    cost = chunks[LEAST] + share * (chunks[MOST] - chunks[LEAST])
    link = max(8e-9 * chunk / gbit, cost)
    stream, rest = node
    return rest * total + (nodes - 2) * link + max(stream * total, total / chunk * link)


def report(count: int, samples: harness.Samples, ways: Candidates, total: int, mbit: int) -> Any:
    """Print a table. Returns the ratios and the medians."""
    bound = 8 * total / (1e6 * mbit)
    samples = {**samples, BOUND: [bound] * len(samples[OURS])}
    harness.show(f"{count} hosts, {mbit} Mbit/s", "s", samples, BOUND)
    ratios = {f"{count} hosts: {OURS} / {BOUND}": harness.paired_ratio(samples, OURS, BOUND)}
    ratios[f"{count} hosts: {RSYNC} / {OURS}"] = harness.paired_ratio(samples, RSYNC, OURS)
    for name, left in ways.left.items():
        ratio = statistics.median(left) / total
        print(f"{name}: bytes that left the first host / bytes of the files: {ratio:.3f}")
        ratios[f"{count} hosts: bytes sent, {name}"] = ratio
    middles = {f"{count} hosts: {name}": value for name, value in harness.medians(samples).items()}
    return ratios, middles


def report_model(
    total: int, node: tuple[float, float], chunks: dict[int, float]
) -> dict[str, float]:
    """Print the measured parts of the model, and what it predicts for large machines."""
    stream, rest = node
    print(f"one node alone: {stream:.2f} s for the stream, {rest:.2f} s for all else")
    for chunk, seconds in chunks.items():
        print(f"a chunk of {chunk >> 10} KiB between two ranks: {1e6 * seconds:.0f} microseconds")
    table = Table("GB", "Gbit/s", *(f"{count} nodes, s" for count in NODES), title="predicted")
    per_byte = (stream / total, rest / total)
    middles = {"node: stream": stream, "node: all else": rest}
    for size in (total, LARGE):
        for gbit in GBIT:
            times = [predicted(count, size, gbit, per_byte, chunks) for count in NODES]
            table.add_row(f"{size / 1e9:.1f}", str(gbit), *(f"{taken:.1f}" for taken in times))
    Console(width=100).print(table)
    return middles | {f"chunk of {chunk}": seconds for chunk, seconds in chunks.items()}


def main() -> None:
    """Bring the environment to hosts, measure the model's parts, and print the results."""
    options = harness.arguments("copies to the nodes' own disks", rounds=3, mbit=800)
    if options.result:
        measure_chunks(options)
        return
    if not shutil.which("rsync"):
        print("there is no rsync here", file=sys.stderr)
        sys.exit(2)
    folder = DISK / f"benchmark-{os.getpid()}"
    found = list_request(StageRequest(environment=ENVIRONMENT), folder)
    files = sum(stat.S_ISREG(item.mode) for item in found.items) - 1  # without the script
    total = found.nbytes
    print(f"{ENVIRONMENT}: {files} files, {total / 1e6:.0f} MB")
    reports = []
    for count in HOSTS:
        samples, ways = on_hosts(count, options.rounds, options.mbit, files)
        reports.append(report(count, samples, ways, total, options.mbit))
    parts = zip(*(measure_node(folder) for _ in range(options.rounds)), strict=True)
    stream, rest = (statistics.median(part) for part in parts)
    chunks = harness.on_ranks(2, "benchmarks.staging", bind=False)
    reports.append(
        ({}, report_model(total, (stream, rest), {int(k): v for k, v in chunks.items()}))
    )
    ratios, middles = (dict(ChainMap(*reversed(parts))) for parts in zip(*reports, strict=True))
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
