"""Averaging over slow links: 4 emulated hosts with 2 ranks each, links shaped to 800 Mbit/s.

    python -m benchmarks.two_level [--rounds 3] [--steps 5] [--bucket 1024]

It needs root, iproute2 and Open MPI 4. Without them it says so and exits with 2. SACK is disabled
on the hosts, for the reason in tests/cluster/test_traffic.py. The hosts share this machine's cores,
so ranks that wait yield their core: ours by sleeping, MPI by mpi_yield_when_idle.

The first part times sums of 1, 8, 32 and 128 MB of float32 per rank, from a barrier until the last
rank has finished. Ranks are packed (0 and 1 on the first host) or dealt (0 and 4). The candidates
are ours in two levels, with our ring or with MPI's Iallreduce between hosts, and MPI_Allreduce on
all 8 ranks. The bound holds for any algorithm: each of n hosts has to send 2 (n - 1) / n of the
data. To measure it, each host sends this number of bytes to the next host over plain TCP and
receives as many from the one before. All hosts do so at the same time, with one thread for each
direction, while the other ranks sleep. After a pause a link lets 256 KiB pass at full speed. All
candidates gain from that equally, and notice it at 1 MB.

The second part (benchmarks/overlap.py) trains over the same links with packed ranks. `Exposed` is
the time by which the median step is longer than one without communication. At best it is
max(0, wire - backward): `wire` is the time of the same buckets' sums alone, `backward` that of the
backward pass alone. Moving bytes through emulated links takes time of the processors that compute.
`Processors` is the time for which it occupies all of them. No overlap can hide that if there are
more ranks than cores.

--rounds 0 leaves out the sums, --steps 0 the training.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import harness, overlap
from benchmarks.overlap import CEILING
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels

HOSTS, SLOTS, MBIT = 4, 2, 800
SIZES = {1: 8, 8: 3, 32: 1, 128: 1}  # MB to number of sums in a measurement
PLACES = {"packed": "slot", "dealt": "node"}
AT_BEST = "exposed at best, wire - backward"
OURS, LIBRARY, FLAT, BOUND = "ours, ring", "ours, MPI across", "MPI_Allreduce", "bound"
PIECE = 1 << 20  # bytes

Figures = dict[str, float]


class Streams:
    """A TCP connection from each host to the next one in a ring.

    Args:
        cross: the group of one rank of each host. Collective over it.
    """

    def __init__(self, cross: Group) -> None:
        comm: Any = cross.comm
        with socket.create_server(("", 0), backlog=1) as server:
            places = comm.allgather((cross.host, server.getsockname()[1]))
            self.next = socket.create_connection(places[(cross.rank + 1) % cross.size])
            self.previous, _ = server.accept()
        self.outgoing, self.incoming = memoryview(bytes(PIECE)), memoryview(bytearray(PIECE))

    def exchange(self, nbytes: int) -> None:
        """Send `nbytes` bytes to the next host and receive as many from the one before."""
        sender = threading.Thread(target=self._send, args=(nbytes,))
        sender.start()
        while nbytes:
            received = self.previous.recv_into(self.incoming[:nbytes])
            if not received:
                raise RuntimeError("the host before has closed its stream")
            nbytes -= received
        sender.join()

    def _send(self, nbytes: int) -> None:
        for begin in range(0, nbytes, PIECE):
            self.next.sendall(self.outgoing[: nbytes - begin])

    def close(self) -> None:
        """Close the connections."""
        self.next.close()
        self.previous.close()


def streamed(group: Group, streams: Streams | None, nbytes: int, repeat: int) -> float:
    """Seconds until the last host has received its bytes; ranks without a stream sleep."""
    total = 0
    for _ in range(repeat):
        harness.meet(group)
        begin = time.perf_counter()
        if streams is not None:
            streams.exchange(nbytes)
        taken = time.perf_counter() - begin
        harness.meet(group)
        total += group.largest(int(1e9 * taken))
    return total / repeat / 1e9


def measure(options: argparse.Namespace) -> None:
    """Measure sums and training, on each rank."""
    started = runtime.start_runtime()
    torch.set_num_threads(1)
    levels, found = Levels.of(started.world), {}
    found["sums"] = measure_sums(levels, options.rounds) if options.rounds else {}
    if options.steps:
        found["training"] = overlap.measure(levels, options.steps, options.bucket << 10)
    if started.world.rank == 0:
        harness.hand_back(options.result, found)
    started.close()


def measure_sums(levels: Levels, rounds: int) -> dict[int, harness.Samples]:
    """Measure the sums of all sizes. Collective."""
    streams = Streams(levels.cross) if levels.node.rank == 0 else None
    found = {size: measure_size(levels, streams, size, rounds) for size in SIZES}
    if streams is not None:
        streams.close()
    return found


def measure_size(
    levels: Levels, streams: Streams | None, size: int, rounds: int
) -> harness.Samples:
    """Measure all candidates in turn for one size."""
    from benchmarks import summing
    from hpc_train.collectives.ring import Library, Ring
    from hpc_train.gradients.sums import LevelSums

    group, repeat, nbytes = levels.whole, SIZES[size], size * summing.MB
    buckets = [summing.bucket(nbytes)]
    ring = LevelSums(levels, buckets, Ring(levels.cross))
    library = LevelSums(levels, buckets, Library(levels.cross))
    flat = torch.empty(buckets[0].numel)
    needed = 2 * (HOSTS - 1) * nbytes // HOSTS
    candidates: dict[str, Callable[[], float]] = {
        OURS: summing.ours(OURS, ring, 0, True, repeat),
        LIBRARY: summing.ours(LIBRARY, library, 0, True, repeat),
        FLAT: summing.allreduce(group, flat, repeat),
        BOUND: partial(streamed, group, streams, needed, repeat),
    }
    samples = harness.in_turn(candidates, rounds)
    del candidates
    ring.close()
    library.close()
    return samples


def report_sums(place: str, found: Mapping[str, harness.Samples]) -> tuple[Figures, Figures]:
    """Print a table for each size. Returns bound / ours and flat / ours, and the medians."""
    ratios, middles = {}, {}
    for size, samples in found.items():
        key = f"{place}, {size} MB"
        harness.show(key, "ms", milliseconds(samples), BOUND)
        for mine, other in itertools.product((OURS, LIBRARY), (BOUND, FLAT)):
            ratios[f"{key}: {other} / {mine}"] = harness.paired_ratio(samples, other, mine)
        middles |= {f"{key}: {name}": value for name, value in harness.medians(samples).items()}
    return ratios, middles


def report_training(samples: harness.Samples, bucket_bytes: int) -> tuple[Figures, Figures]:
    """Print a table. Returns the ratios to a step without communication, and the medians."""
    title = f"training, packed, buckets of {bucket_bytes >> 10} KiB"
    harness.show(title, "ms", milliseconds(samples), CEILING)
    ratios, middles = {}, harness.medians(samples)
    middles[AT_BEST] = max(0.0, middles[overlap.WIRE] - middles[overlap.BACKWARD])
    for name in (overlap.HOOKS, overlap.THREAD, overlap.BEHIND):
        pairs = zip(samples[name], samples[CEILING], strict=True)
        middles[f"exposed, {name}"] = statistics.median(mine - other for mine, other in pairs)
        ratios[f"training: {name}"] = harness.paired_ratio(samples, name, CEILING)
    for name in (name for name in middles if name.startswith("exposed")):
        print(f"{name}: {1e3 * middles[name]:.0f} ms")
    return ratios, {f"training: {name}": value for name, value in middles.items()}


def milliseconds(samples: harness.Samples) -> harness.Samples:
    """Convert samples from seconds to milliseconds."""
    return {name: [1e3 * value for value in values] for name, values in samples.items()}


def main() -> None:
    """Start the hosts and the ranks on them, and print their results."""
    options = harness.arguments("averaging over slow links", rounds=3, steps=5, bucket=1024)
    if options.result:
        measure(options)
        return
    reports = []
    with harness.emulated_hosts(HOSTS, SLOTS, MBIT) as cluster:
        for place, by in PLACES.items():
            steps = options.steps if place == "packed" else 0
            counts = {"--rounds": options.rounds, "--steps": steps, "--bucket": options.bucket}
            words = [str(word) for word in itertools.chain(*counts.items())]
            found = harness.on_hosts(cluster, by, "benchmarks.two_level", *words)
            reports.append(report_sums(place, found["sums"]))
            if steps:
                reports.append(report_training(*found["training"]))
    ratios, middles = (dict(ChainMap(*reversed(parts))) for parts in zip(*reports, strict=True))
    harness.finish("two_level", ratios, middles, options.json)


if __name__ == "__main__":
    main()
