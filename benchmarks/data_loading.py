"""Speed of reading samples of tokens, beside plain reads and peers.

    python -m benchmarks.data_loading [--gib 2] [--rounds 5] [--folder DIR] [--candidates NAME ...]

All candidates deliver the same samples: 1025 random tokens of a 50257-word vocabulary in uint16, of
which 1024 are new. A batch is a pair, inputs and targets, as int64 unless the name says otherwise.
MB/s count the new tokens as uint16, so a sample is 2048 bytes. These are the cases:

- sequential: batches of 512 consecutive samples, which is 1 MiB, from the first --sequential_mib.
- random: micro-batches of 32 samples from anywhere, in the order of `SampleOrder`.
- dropped: the page cache was emptied before. In "sequential, dropped" the candidate also meets the
  data for the first time. In "random, dropped" it has read the same samples once before.
- warm: the candidate has read the same samples just before, and they are in the page cache.
- first touch: random micro-batches, but few. The candidate meets the data for the first time, and
  the page cache was emptied. The table also has the bytes that came from the disk, and the bytes
  that the process asked the system for, both for each byte of a new token.

These are the candidates:

- raw: os.preadv into one buffer that is used again and again. It delivers uint16, and is the limit
  of calls that copy what they read. "raw, int64" also converts the tokens into a second buffer of
  this kind. memmap can pass both, as it copies nothing, and as the system reads ahead for it.
- ours: `TokenDataset.fetch`. In "ours, Loader" a thread reads two batches ahead.
- h5py: slices of the dataset, a row or a whole batch of consecutive ones at once. memmap: the same
  with `numpy.memmap` on the shards.
- DataLoader: torch's, with two worker processes that read rows with h5py.
- streaming: mosaicml-streaming's `StreamingDataset` on a local folder, without hashes. In the
  sequential cases it is iterated over, and in the random ones indexed.
- webdataset: tar files. It has no random access, so it only takes part in the sequential cases,
  where it delivers the samples in the order of its shuffle buffer of 1000.

raw, h5py and memmap read a sequential batch at once. All others get it sample by sample, as that is
what they offer. streaming and webdataset run in the consumer's process, without workers.

The consumer does nothing with a batch, so reading ahead gains only what a second core gives. The
clock starts when the first batch has arrived, so that no candidate pays for starting workers. One
that reads ahead has up to four more batches then. First touch with its 32 batches flatters it by as
much. Each turn of a candidate is a process of its own. Before the warm cases it reads all of their
samples once more, compares them with what h5py reads, and fails if one differs. What the clock
measures is only counted.

A pass of 20000 random samples of 2 GiB touches each part of the files several times. So in "random,
dropped" much of it comes from what the system has read around earlier samples.

The peers are the extra `benchmarks`. What mosaicml-streaming 0.13 asks for would replace torch, and
numpy and transformers by older ones. So install only what it uses here, in an environment of its
own. It was measured with numpy 2.4 and transformers 5, which are newer than it declares, and with a
stand-in for torchvision, which it imports for images alone:

    pip install --no-deps mosaicml-streaming
    pip install webdataset brotli catalogue pillow python-snappy transformers zstd
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.data_readers import (
    BLOCK,
    CANDIDATES,
    MICRO,
    RANDOM,
    RAW,
    SAMPLE_BYTES,
    SEQUENTIAL,
    WIDE,
    Candidate,
    Hdf5,
    Pair,
    Pass,
    T,
    make_shards,
)
from hpc_train.data.order import SampleOrder

TOUCH = "first touch"
WARM, DROPPED = "warm", "dropped"
DISK, ASKED = "from the disk", "asked for"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Plan:
    """Numbers of samples: in all, and in each pass."""

    samples: int
    sequential: int
    random: int
    touched: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """The plan for the command line: whole batches, and no more than there is."""
        samples = max(int(options.gib * (1 << 30)) // SAMPLE_BYTES // BLOCK, 2) * BLOCK
        sequential = min((options.sequential_mib << 20) // SAMPLE_BYTES // BLOCK * BLOCK, samples)
        few = [min(count, samples) // MICRO * MICRO for count in (options.rows, options.touched)]
        return cls(samples, max(sequential, 2 * BLOCK), *(max(count, 2 * MICRO) for count in few))

    def passes(self) -> dict[str, Pass]:
        """The passes by their names."""
        sequential = SampleOrder(self.sequential, BLOCK, shuffle=False)
        return {
            SEQUENTIAL: Pass(sequential, self.sequential // BLOCK),
            RANDOM: Pass(SampleOrder(self.samples, MICRO, seed=1), self.random // MICRO),
            TOUCH: Pass(SampleOrder(self.samples, MICRO, seed=2), self.touched // MICRO),
        }


def drop_cache(folder: Path) -> str:
    """Empty the page cache of the files in a folder. Returns the way that was used, in words."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    try:
        DROP_CACHES.write_text("1", encoding="utf-8")
    except OSError:
        return "posix_fadvise"
    return f"posix_fadvise and {DROP_CACHES}"


def digest(batches: Iterator[Pair], *, ordered: bool) -> int:
    """A number that differs if a token does, or with `ordered` the order of the samples."""
    weights = np.random.default_rng(3).integers(1, 1 << 62, (2, T), np.uint64)
    total, position = 0, 0
    for pair in batches:
        inputs, targets = (np.asarray(tokens).astype(np.uint64) for tokens in pair)
        sums = inputs @ weights[0] + targets @ weights[1]  # modulo 2**64
        numbers = np.arange(position + 1, position + len(sums) + 1, dtype=np.uint64)
        total += int((sums * numbers if ordered else sums).sum())
        position += len(sums)
    return total % (1 << 64)


def check(folder: Path, candidate: Candidate, kind: str, wanted: Pass) -> None:
    """Compare all samples of a pass with what h5py reads.

    Raises:
        RuntimeError: they differ.
    """
    read = getattr(candidate, kind)
    expected = digest(getattr(Hdf5(folder), kind)(wanted), ordered=candidate.ordered)
    if digest(read(wanted), ordered=candidate.ordered) != expected:
        raise RuntimeError(f"{type(candidate).__name__} has delivered wrong samples")


def timed(batches: Iterator[Pair], wanted: Pass) -> float:
    """MB/s after the first batch."""
    next(batches)
    begin = time.perf_counter()
    count = sum(len(inputs) for inputs, _ in batches)
    seconds = time.perf_counter() - begin
    if count != (wanted.steps - 1) * wanted.order.batch:
        raise RuntimeError(f"{count} samples were delivered after the first batch")
    return count * SAMPLE_BYTES / seconds / 1e6


def counted() -> dict[str, int]:
    """Bytes that this process, and its children that have ended, have read so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    numbers = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return {DISK: numbers["read_bytes"], ASKED: numbers["rchar"]}


def measure(name: str, folder: Path, plan: Plan) -> dict[str, float]:
    """One turn of a candidate: all cases, by their names."""
    kind, passes, found = CANDIDATES[name], plan.passes(), {}
    candidate = kind(folder)
    wanted = passes[SEQUENTIAL]
    drop_cache(folder)
    found[f"{SEQUENTIAL}, {DROPPED}"] = timed(candidate.sequential(wanted), wanted)
    check(folder, candidate, SEQUENTIAL, wanted)
    found[f"{SEQUENTIAL}, {WARM}"] = timed(candidate.sequential(wanted), wanted)
    if RANDOM not in kind.kinds:
        return found
    candidate = kind(folder)
    wanted = passes[TOUCH]
    drop_cache(folder)
    before = counted()
    found[TOUCH] = timed(candidate.random(wanted), wanted)
    for what, after in counted().items():
        found[f"{TOUCH}, {what}"] = (after - before[what]) / (plan.touched * SAMPLE_BYTES)
    wanted = passes[RANDOM]
    check(folder, candidate, RANDOM, wanted)
    found[f"{RANDOM}, {WARM}"] = timed(candidate.random(wanted), wanted)
    drop_cache(folder)
    found[f"{RANDOM}, {DROPPED}"] = timed(candidate.random(wanted), wanted)
    return found


def table(case: str, rates: harness.Samples, extra: dict[str, harness.Samples]) -> None:
    """Print the rates of a case, and medians of what else was counted."""
    heads = ("candidate", "MB/s", "min", "max", "us/sample", f"x {RAW}", f"x {WIDE}")
    shown = Table(*heads, *(f"{what}, B/B" for what in extra), title=case)
    for name, values in rates.items():
        middle = harness.medians({name: values})[name]
        cells = [middle, min(values), max(values), SAMPLE_BYTES / middle]
        cells += [harness.paired_ratio(rates, name, other) for other in (RAW, WIDE)]
        cells += [harness.medians(counts)[name] for counts in extra.values()]
        shown.add_row(name, *(f"{cell:.4g}" for cell in cells))
    Console(width=120).print(shown)


def run(name: str, folder: Path, words: list[str]) -> dict[str, float]:
    """One turn of a candidate, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data_loading", *words]
    command += ["--folder", str(folder), "--only", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def make(folder: Path, plan: Plan, wanted: list[str]) -> list[str]:
    """Write the data. Returns those of the wanted candidates whose packages are installed."""
    begin = time.perf_counter()
    make_shards(folder, plan.samples)
    present = []
    for name, kind in CANDIDATES.items():
        if name not in {RAW, WIDE, *wanted}:
            continue
        if find_spec(kind.package):
            kind.make(folder, plan.samples, plan.sequential)
            present.append(name)
        else:
            print(f"{name} is not installed: see `python -m benchmarks.data_loading --help`")
    print(f"{plan}: files were made in {time.perf_counter() - begin:.0f} s")
    print(f"the page cache is emptied by {drop_cache(folder)}")
    return present


def report(cases: dict[str, harness.Samples], json_file: str | None) -> None:
    """Print the tables and the last line."""
    counts = {what: cases.pop(f"{TOUCH}, {what}") for what in (DISK, ASKED)}
    ratios, middles = {}, {}
    for case, rates in cases.items():
        table(case, rates, counts if case == TOUCH else {})
        for name, value in harness.medians(rates).items():
            middles[f"{case}, {name}, MB/s"] = round(value, 2)
            for other in sorted({RAW, WIDE} - {name}):
                ratios[f"{case}, {name} / {other}"] = harness.paired_ratio(rates, name, other)
    for what, samples in counts.items():
        for name, value in harness.medians(samples).items():
            middles[f"{TOUCH}, {name}, bytes {what} per byte"] = round(value, 4)
    harness.finish("data_loading", ratios, middles, json_file)


def main() -> None:
    """Measure all candidates in turn, each in a process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2, help="size of the data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequential_mib", type=int, default=256, help="part read in order")
    parser.add_argument("--rows", type=int, default=20000, help="samples of a random pass")
    parser.add_argument("--touched", type=int, default=1024, help="samples of a first touch")
    parser.add_argument("--folder", type=Path, help="where the data is made; on a disk, not tmpfs")
    parser.add_argument(
        "--candidates",
        nargs="+",
        metavar="NAME",
        choices=CANDIDATES,
        default=[*CANDIDATES],
        help=f"candidates besides {RAW!r} and {WIDE!r}; by default all",
    )
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    plan = Plan.of(options)
    if options.only:
        print(json.dumps(measure(options.only, options.folder, plan)))
        return
    sizes = ("gib", "sequential_mib", "rows", "touched")
    words = [word for name in sizes for word in (f"--{name}", str(getattr(options, name)))]
    cases: dict[str, harness.Samples] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        present = make(Path(folder), plan, options.candidates)
        for _ in range(options.rounds):
            for name in present:
                for case, value in run(name, Path(folder), words).items():
                    cases.setdefault(case, {}).setdefault(name, []).append(value)
    report(cases, options.json)


if __name__ == "__main__":
    main()
