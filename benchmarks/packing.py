"""Unequal lengths: whole documents packed into samples, and micro-batches cut by length.

    python -m benchmarks.packing [--rounds 5] [--sequence 1024]

The documents are the functions and classes of Python's standard library, as bytes. One table has
the share of padding, and the other two have times.

- samples: whole documents packed by best fit (`data.across_documents: false`), beside one document
  per sample, beside documents that are put into one sample until the next one does not fit, and
  beside the stream of all documents, which has no padding. Times are of reading.
- micro-batches: a step of a small GPT on 64 documents of up to `sequence` bytes, in micro-batches
  of at most 8 x `sequence` padded tokens (`data.micro_tokens`), beside micro-batches of 8 documents
  as they come, each padded to its longest one, and beside one document at a time, without padding.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import harness
from hpc_train.data.by_length import cut_by_length
from hpc_train.data.manifest import Manifest, read_manifest
from hpc_train.data.packing import PACKED_TOGETHER, DocumentWindows, PackedDataset
from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.shard_files import ShardFiles
from hpc_train.data.shards import TokenDataset
from hpc_train.models.gpt.module import GPT
from hpc_train.models.language import NOT_COUNTED

BATCH = 64  # documents of a step
AT_A_TIME = 8  # documents of a micro-batch as they come
READ = 32  # samples that are read together
DOCUMENTS = 40_000


def documents() -> Iterator[str]:
    """The functions and classes of the standard library, in the order of its files."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield ast.get_source_segment(text, node) or ""


def prepared(folder: Path) -> Manifest:
    """Prepare the documents as a data folder."""
    lines = [
        json.dumps({"text": text}) for _, text in zip(range(DOCUMENTS), documents(), strict=False)
    ]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    prepare_text([folder / "texts.jsonl"], folder / "data", validation=0)
    return read_manifest(folder / "data")


def lengths(folder: Path, manifest: Manifest) -> np.ndarray:
    """The number of targets of each document, int64."""
    import h5py

    found = []
    for shard in manifest.splits["train"]:
        with h5py.File(folder / "data" / shard.name) as file:
            found.append(np.diff(np.append(file["documents"][:], shard.tokens)) - 1)
    every = np.concatenate(found)
    return every[every > 0]


def padding_without_packing(sizes: np.ndarray, sequence: int) -> tuple[float, float]:
    """The share of padding with one piece per sample, and with pieces put in while they fit."""
    pieces = [
        part
        for size in sizes.tolist()
        for part in [sequence] * (size // sequence) + [size % sequence]
        if part
    ]
    alone = 1 - sum(pieces) / (len(pieces) * sequence)
    samples, space = 1, sequence
    for piece in pieces:
        if piece > space:
            samples, space = samples + 1, sequence
        space -= piece
    return alone, 1 - sum(pieces) / (samples * sequence)


def reading(dataset: TokenDataset | PackedDataset) -> Callable[[], float]:
    """Measures the microseconds per sample of reading random samples, many at a time."""
    generator = np.random.default_rng(0)

    def measured() -> float:
        wanted = [generator.integers(0, len(dataset), READ) for _ in range(50)]
        begin = time.perf_counter()
        for some in wanted:
            dataset.fetch(some)
        return 1e6 * (time.perf_counter() - begin) / (READ * len(wanted))

    return measured


def stepping(model: GPT, shapes: list[tuple[int, int]]) -> Callable[[], float]:
    """Measures the milliseconds of a step in micro-batches of (documents, padded length)."""

    def measured() -> float:
        begin = time.perf_counter()
        for count, width in shapes:
            tokens = torch.randint(256, (count, width))
            targets = torch.where(tokens > 0, tokens, NOT_COUNTED)
            model(tokens, targets).backward()
        model.zero_grad()
        return 1e3 * (time.perf_counter() - begin)

    return measured


def main() -> None:
    """Measure padding, reading and steps."""
    options = harness.arguments("unequal lengths", rounds=5, sequence=1024)
    sequence = options.sequence
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = prepared(folder)
        windows = DocumentWindows(ShardFiles(folder / "data", manifest, "train"), sequence)
        begin = time.perf_counter()
        counts = windows.count(range(len(windows)))
        counting = 1e3 * (time.perf_counter() - begin) / len(windows)
        packed = PackedDataset(windows, counts)
        sizes = lengths(folder, manifest)
        alone, in_order = padding_without_packing(sizes, sequence)
        padding = {
            "one document per sample": alone,
            "while they fit": in_order,
            "best fit (ours)": 1 - packed.targets / (len(packed) * sequence),
            "across documents": 0.0,
        }
        for candidate, share in padding.items():
            print(f"padding, {candidate}: {100 * share:.2f} %")
        print(f"{len(sizes)} documents, {counting:.1f} ms for a window of {PACKED_TOGETHER}")
        stream = TokenDataset(folder / "data", manifest, "train", sequence)
        times = harness.in_turn(
            {"across documents": reading(stream), "whole documents": reading(packed)},
            options.rounds,
        )
    harness.show(f"reading samples of {sequence}", "us", times, "across documents")
    step = np.random.default_rng(1).permutation(np.minimum(sizes, sequence))[:BATCH]
    as_they_come = [
        (AT_A_TIME, int(step[first : first + AT_A_TIME].max()))
        for first in range(0, BATCH, AT_A_TIME)
    ]
    by_length = [
        (part.count, part.longest) for part in cut_by_length(step, 1, AT_A_TIME * sequence)[0]
    ]
    model = GPT(vocab=256, sequence=sequence, layers=2, hidden=128, heads=4)
    whole = [(1, int(size)) for size in step]
    steps = harness.in_turn(
        {
            "as they come": stepping(model, as_they_come),
            "by length (ours)": stepping(model, by_length),
            "one at a time": stepping(model, whole),
        },
        options.rounds,
    )
    harness.show(f"a step of {BATCH} documents", "ms", steps, "as they come")
    tokens = {"as they come": as_they_come, "by length (ours)": by_length}
    for candidate, shapes in tokens.items():
        padded = sum(count * width for count, width in shapes)
        print(f"padding, {candidate}: {100 * (1 - step.sum() / padded):.1f} %")
    ratios = {"step": harness.paired_ratio(steps, "by length (ours)", "as they come")}
    middles = {f"padding, {key}": value for key, value in padding.items()}
    middles |= {f"us, {key}": value for key, value in harness.medians(times).items()}
    middles |= {f"ms, {key}": value for key, value in harness.medians(steps).items()}
    harness.finish("packing", ratios, middles, options.json)


if __name__ == "__main__":
    main()
