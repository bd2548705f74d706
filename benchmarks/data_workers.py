"""Time of a step without workers, with threads, with processes, and with torch's DataLoader.

torch's DataLoader has worker processes, too. Each candidate runs in a process of its own, as one
rank without MPI. All take steps of the same model on the same batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import torch
from torch.utils.data import DataLoader

import hpc_train
from benchmarks import harness
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder

SAMPLES, BATCH, SIDE, WARM = 512, 16, 384, 5
CANDIDATES = ("no workers", "threads", "processes", "torch")


class Images:
    """A data set of compressed images. zlib decompresses without the interpreter's lock."""

    def __init__(self) -> None:
        noise = np.random.default_rng(1).integers(0, 64, (SAMPLES // 16, 3, SIDE, SIDE), np.uint8)
        self.files = [zlib.compress(image.tobytes()) for image in noise] * 16

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        image = np.frombuffer(zlib.decompress(self.files[index]), np.uint8)
        return torch.from_numpy(image.reshape(3, SIDE, SIDE)[:, :64, :64].astype(np.float32))


class Text(Images):
    """A data set of numbers in text. Python parses them under the interpreter's lock."""

    def __init__(self) -> None:
        values = np.random.default_rng(1).integers(0, 64, (SAMPLES // 16, 3 * 64 * 64))
        self.files = [" ".join(map(str, row)) for row in values] * 16

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [float(word) for word in self.files[index].split()]
        return torch.tensor(numbers).view(3, 64, 64)


def batches(kind: str, candidate: str, workers: int, steps: int) -> Iterator[torch.Tensor]:
    """The batches of all steps. They are the same for each candidate."""
    dataset, order = (Images if kind == "images" else Text)(), SampleOrder(SAMPLES, BATCH)
    if candidate == "torch":
        indices = [order.indices(step, 0, BATCH).tolist() for step in range(1, steps + 1)]
        yield from DataLoader(dataset, batch_sampler=indices, num_workers=workers)
        return
    loader = Loader(
        dataset,
        order,
        cut(BATCH, 1, 0),
        first_step=1,
        last_step=steps,
        prefetch=0 if candidate == "no workers" else 2,
        workers=0 if candidate == "no workers" else workers,
    )
    with closing(loader):
        for step in loader:
            yield step.micro_batches[0].data


def measure(kind: str, candidate: str, workers: int, steps: int) -> dict[str, float]:
    """Seconds per step after the first ones, and a sum over all batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)
    )
    begin, total = 0.0, 0.0
    for number, batch in enumerate(batches(kind, candidate, workers, WARM + steps)):
        if number == WARM:
            begin = time.perf_counter()
        total += float(batch.double().sum())
        model(batch).square().mean().backward()
    return {"seconds": (time.perf_counter() - begin) / steps, "sum": total}


def main() -> None:
    """Measure all candidates in turn, each in a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--only", nargs=2)  # kind and candidate, for a candidate's own process
    options = parser.parse_args()
    if options.only:
        if options.only[1] == "processes":
            hpc_train.start_workers()
        print(json.dumps(measure(*options.only, options.workers, options.steps)))
        return
    ratios, middles = {}, {}
    for kind in ("images", "text"):
        sums = set()

        def run(candidate: str, kind: str = kind, sums: set[float] = sums) -> float:
            words = ["--steps", str(options.steps), "--workers", str(options.workers)]
            words += ["--only", kind, candidate]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.data_workers", *words],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            told = json.loads(done.stdout.splitlines()[-1])
            sums.add(told["sum"])
            return float(told["seconds"])

        samples = harness.in_turn(
            {name: (lambda name=name: run(name)) for name in CANDIDATES}, options.rounds, warmup=0
        )
        if len(sums) > 1:
            raise RuntimeError(f"{kind}: the candidates have read different batches")
        harness.show(f"{kind}, {options.workers} workers", "s/step", samples, "torch")
        for name in CANDIDATES:
            middles[f"{kind}, {name}"] = harness.medians(samples)[name]
            ratios[f"{kind}, {name} / torch"] = harness.paired_ratio(samples, name, "torch")
    harness.finish("data_workers", ratios, middles, options.json)


if __name__ == "__main__":
    main()
