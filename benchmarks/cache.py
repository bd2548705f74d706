"""Time of random rows with and without a node's cache, and what the source serves.

    python -m benchmarks.cache [--mib 512] [--steps 40] [--rounds 2] [--folder DIR] [--cache DIR]

The ranks of one node read samples of 1025 tokens, which are shuffled as in training. They take the
same steps twice, as two epochs would. A rank has --batch samples in a step, and then sleeps for
--compute_ms, as if a GPU computed. The loader reads two steps ahead. The candidates read from the
shards or through a cache, into which blocks of later steps are brought (ahead) or not. All start
with an empty cache. These are the sources:

- disk: the folder's file system. The page cache is emptied before each pass, as if the data did not
  fit into it. The MiB are those that came from the disk.
- stalls: each read of the shards takes --latency_ms more, in the first --stall_ms of each second no
  read returns, and the system reads nothing ahead, as if the file system were far away, busy, and
  kept nothing on its clients. The MiB are those asked for.

The seconds are those of the slowest rank, and the MiB those of all ranks of the node. A candidate
that delivers other tokens than the others makes the benchmark fail.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.data_loading import DISK, counted, drop_cache
from benchmarks.data_readers import SAMPLE_BYTES, T, make_shards
from hpc_train.data import shards
from hpc_train.data.block_cache import BlockCache
from hpc_train.data.loader import Loader, cut
from hpc_train.data.manifest import read_manifest
from hpc_train.data.order import SampleOrder
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import start_runtime

CANDIDATES = {
    "shards": (False, False),
    "cache": (True, False),
    "cache, ahead": (True, True),
}


class Source:
    """Counts the bytes that are read from the shards, and delays such reads."""

    def __init__(self, folder: Path, seconds: float, stall: float) -> None:
        self.folder, self.seconds, self.stall = str(folder), seconds, stall
        self.descriptors: set[int] = set()
        self.nbytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls of this process in the block."""
        opened, read, closed, advise = os.open, os.preadv, os.close, os.posix_fadvise

        def note_open(path: Any, *arguments: Any, **options: Any) -> int:
            descriptor = opened(path, *arguments, **options)
            if str(path).startswith(self.folder):
                self.descriptors.add(descriptor)
            return descriptor

        def note_read(descriptor: int, buffers: Any, offset: int) -> int:
            if descriptor in self.descriptors:
                time.sleep(self.seconds + max(0.0, self.stall - time.time() % 1.0))
                self.nbytes += sum(map(len, buffers))
            return read(descriptor, buffers, offset)

        def note_close(descriptor: int) -> None:
            self.descriptors.discard(descriptor)
            closed(descriptor)

        os.open, os.preadv, os.close = note_open, note_read, note_close
        os.posix_fadvise = lambda *_: None
        try:
            yield
        finally:
            os.open, os.preadv, os.close, os.posix_fadvise = opened, read, closed, advise


def passes(
    group: Group, folder: Path, options: argparse.Namespace, name: str
) -> tuple[dict[str, float], int]:
    """Two passes of a candidate: seconds and MiB of each by their names, and a sum of tokens."""
    with_cache, ahead = CANDIDATES[name]
    source = Source(folder, options.latency_ms / 1e3, options.stall_ms / 1e3)
    manifest, found, total = read_manifest(folder), {}, 0
    of_disk = options.source == "disk"  # the system counts its reads
    with nullcontext() if of_disk else source.watched():
        cache = BlockCache(options.cache, manifest.digest) if with_cache else None
        dataset = shards.TokenDataset(folder, manifest, "train", T, cache)
        if not ahead:
            dataset.ahead = None  # type: ignore[assignment,method-assign]
        batch = options.batch * group.size
        shuffle: bool | Literal["full"] = "full" if options.full else True
        order = SampleOrder.of(dataset, batch, seed=1, shuffle=shuffle)
        parts = cut(batch, group.size, group.rank)

        def take() -> None:
            nonlocal total
            with closing(
                Loader(dataset, order, parts, first_step=1, last_step=options.steps)
            ) as loader:
                for step in loader:
                    total += int(step.micro_batches[0].data[0].sum())
                    time.sleep(options.compute_ms / 1e3)

        for number in ("first", "second"):
            harness.meet(group)
            if group.rank == 0:
                drop_cache(folder)
            before = counted()[DISK] if of_disk else source.nbytes
            found[f"{number} pass, s"] = harness.elapsed(group, take)
            after = counted()[DISK] if of_disk else source.nbytes
            found[f"{number} pass, MiB"] = group.total(after - before) / (1 << 20)
        dataset.close()
        if cache is not None:
            cache.close()
        harness.meet(group)
    return found, group.total(total)


def on_rank(options: argparse.Namespace) -> None:
    """Measure all candidates, in turn, on these ranks."""
    runtime = start_runtime()
    if options.ahead_mib:
        shards.AHEAD_BYTES = options.ahead_mib << 20  # type: ignore[misc]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CANDIDATES}
    sums = set()
    for _ in range(options.rounds):
        for name in CANDIDATES:
            figures, total = passes(runtime.world, options.folder, options, name)
            found[name].append(figures)
            sums.add(total)
    if len(sums) > 1:
        raise RuntimeError("the candidates have delivered different samples")
    if runtime.world.rank == 0:
        harness.hand_back(options.result, found)
    runtime.close()


def show(title: str, found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Print the medians of a case. Returns them by name."""
    heads = list(next(iter(found.values()))[0])
    table, middles = Table("candidate", *heads, title=title), {}
    for name, rounds in found.items():
        middle = harness.medians({head: [one[head] for one in rounds] for head in heads})
        table.add_row(name, *(f"{value:.4g}" for value in middle.values()))
        middles |= {f"{title}, {name}, {head}": round(value, 4) for head, value in middle.items()}
    Console(width=100).print(table)
    return middles


def main() -> None:
    """Measure each source on each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the data")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank in a step")
    parser.add_argument("--ranks", default="1,4", help="numbers of ranks")
    parser.add_argument("--sources", default="disk,stalls")
    parser.add_argument("--compute_ms", type=float, default=20)
    parser.add_argument("--latency_ms", type=float, default=1)
    parser.add_argument("--stall_ms", type=float, default=200)
    parser.add_argument("--full", type=int, default=0, help="1 shuffles as data.shuffle full")
    parser.add_argument("--ahead_mib", type=int, default=0, help="in place of the default")
    parser.add_argument("--folder", type=Path, help="where the data is made; on a disk, not tmpfs")
    parser.add_argument("--cache", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.source:
        on_rank(options)
        return
    middles: dict[str, float] = {}
    ratios: dict[str, float] = {}
    names = (
        "rounds",
        "steps",
        "batch",
        "compute_ms",
        "latency_ms",
        "stall_ms",
        "ahead_mib",
        "full",
        "cache",
    )
    words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_shards(Path(folder), (options.mib << 20) // SAMPLE_BYTES)
        for source in options.sources.split(","):
            for ranks in map(int, options.ranks.split(",")):
                more = ["--source", source, "--folder", folder, *words]
                found = harness.on_ranks(ranks, "benchmarks.cache", *more)
                title = f"{source}, {ranks} rank{'s' if ranks > 1 else ''}"
                middles |= show(title, found)
                for name in list(CANDIDATES)[1:]:
                    for head in list(found[name][0])[::2]:
                        pair = {one: [part[head] for part in found[one]] for one in found}
                        ratio = harness.paired_ratio(pair, name, "shards")
                        ratios[f"{title}, {name} / shards, {head[:-3]}"] = ratio
    harness.finish("cache", ratios, middles, options.json)


if __name__ == "__main__":
    main()
