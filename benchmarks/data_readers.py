"""The ways to read samples of tokens that `benchmarks.data_loading` compares."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

from hpc_train.data.loader import Loader, cut
from hpc_train.data.manifest import FILE_NAME, Manifest, read_manifest
from hpc_train.data.order import SampleOrder
from hpc_train.data.shards import TokenDataset
from hpc_train.data.write import write_shard

VOCAB, T = 50257, 1024
ROW = T + 1  # tokens of a sample
BLOCK, MICRO = 512, 32  # samples of a sequential and of a random batch
SHARD_SAMPLES = 131072 - BLOCK  # so that a shard has just less than 256 MiB
SAMPLE_BYTES = 2 * T
AHEAD, WORKERS, SHUFFLED = 2, 2, 1000
SEQUENTIAL, RANDOM = "sequential", "random"
RAW, WIDE = "raw", "raw, int64"
Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Pass:
    """One pass of a candidate: `steps` batches of an order."""

    order: SampleOrder
    steps: int

    def batches(self) -> list[np.ndarray]:
        """The numbers of the samples of each batch."""
        steps = range(1, self.steps + 1)
        return [self.order.indices(step, 0, self.order.batch) for step in steps]


def make_shards(folder: Path, samples: int) -> None:
    """Write random tokens as shards with a manifest."""
    generator = np.random.default_rng(0)
    counts = [min(SHARD_SAMPLES, samples - n) for n in range(0, samples, SHARD_SAMPLES)]
    shards = tuple(
        write_shard(
            folder / f"train-{number:05d}.h5",
            generator.integers(0, VOCAB, count * T + 1, dtype=np.uint16),
        )
        for number, count in enumerate(counts)
    )
    manifest = Manifest(VOCAB, "uint16", "bytes", 1, {"train": shards})
    (folder / FILE_NAME).write_text(manifest.to_json())


def open_ours(folder: Path) -> TokenDataset:
    """Our data set."""
    return TokenDataset(folder, read_manifest(folder), "train", T)


def of_rows(rows: Any) -> Pair:
    """Inputs and targets of samples that have a row each."""
    return rows[:, :-1], rows[:, 1:]


def of_slab(slab: Any) -> Pair:
    """Inputs and targets of consecutive samples. Two neighbours share one token."""
    return slab[:-1].reshape(-1, T), slab[1:].reshape(-1, T)


def widened(tokens: np.ndarray) -> torch.Tensor:
    """Tokens as an int64 tensor of their own."""
    return torch.from_numpy(tokens.astype(np.int64))


class Candidate:
    """One way to read. An instance meets the data for the first time."""

    ordered: ClassVar[bool] = True  # whether it delivers the samples in the order of the pass
    kinds: ClassVar[tuple[str, ...]] = (SEQUENTIAL, RANDOM)
    package: ClassVar[str] = "numpy"  # the module that it needs

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def make(folder: Path, samples: int, sequential: int) -> None:
        """Write files of its own, if it cannot read the shards.

        Args:
            folder: the folder that has the shards.
            samples: number of samples in all.
            sequential: number of samples that sequential passes read.
        """

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """The batches of a pass over consecutive samples."""
        return self.random(wanted)

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """The batches of a pass over samples anywhere."""
        raise NotImplementedError


class Ours(Candidate):
    """TokenDataset.fetch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dataset = open_ours(folder)

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        return map(self.dataset.fetch, wanted.batches())


class OursLoader(Ours):
    """TokenDataset through Loader, with a thread that reads ahead."""

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        order = wanted.order
        parts = cut(order.batch, 1, 0)
        loader = Loader(
            self.dataset, order, parts, first_step=1, last_step=wanted.steps, prefetch=AHEAD
        )
        with closing(loader):
            for step in loader:
                yield step.micro_batches[0].data


class OfShards(Candidate):
    """A candidate that finds the samples in the shards itself."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        shards = read_manifest(folder).splits["train"]
        self.paths = [folder / shard.name for shard in shards]
        self.offsets = [shard.offset for shard in shards]
        self.tokens = [shard.tokens for shard in shards]

    def places(self, indices: np.ndarray) -> list[tuple[int, int]]:
        """The shard of each sample, and the number of its first token there."""
        shards, within = np.divmod(indices, SHARD_SAMPLES)
        return list(zip(shards.tolist(), (within * T).tolist(), strict=True))


class Raw(OfShards):
    """os.preadv into a buffer that is used again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [os.open(path, os.O_RDONLY) for path in self.paths]

    def read(self, buffer: np.ndarray, shard: int, token: int) -> None:
        """Fill a buffer."""
        if os.preadv(self.files[shard], [buffer], self.offsets[shard] + 2 * token) < buffer.nbytes:
            raise RuntimeError("a shard ends early")

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        slab = np.empty(BLOCK * T + 1, np.uint16)
        given = self.given(slab)
        for indices in wanted.batches():
            self.read(slab, *self.places(indices[:1])[0])
            yield of_slab(self.convert(slab, given))

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        rows = np.empty((MICRO, ROW), np.uint16)
        given = self.given(rows)
        for indices in wanted.batches():
            for row, (shard, token) in zip(rows, self.places(indices), strict=True):
                self.read(row, shard, token)
            yield of_rows(self.convert(rows, given))

    def given(self, buffer: np.ndarray) -> np.ndarray:
        """The buffer that is delivered."""
        return buffer

    def convert(self, buffer: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Fill the buffer that is delivered."""
        return given


class RawWide(Raw):
    """Raw, with a conversion to int64."""

    def given(self, buffer: np.ndarray) -> np.ndarray:
        """As Raw."""
        return np.empty(buffer.shape, np.int64)

    def convert(self, buffer: np.ndarray, given: np.ndarray) -> np.ndarray:
        """As Raw."""
        np.copyto(given, buffer)
        return given


class Hdf5(OfShards):
    """Slices of h5py's datasets."""

    def arrays(self) -> list[Any]:
        """The tokens of each shard."""
        return [h5py.File(path, "r")["tokens"] for path in self.paths]

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        arrays = self.arrays()
        for indices in wanted.batches():
            shard, token = self.places(indices[:1])[0]
            yield of_slab(widened(arrays[shard][token : token + BLOCK * T + 1]))

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        arrays = self.arrays()
        for indices in wanted.batches():
            rows = [arrays[shard][token : token + ROW] for shard, token in self.places(indices)]
            yield of_rows(widened(np.stack(rows)))


class Mapped(Hdf5):
    """Slices of numpy.memmap. A pass maps anew, because mapped pages stay in the page cache."""

    def arrays(self) -> list[Any]:
        """As Hdf5."""
        found = zip(self.paths, self.offsets, self.tokens, strict=True)
        return [np.memmap(path, "<u2", "r", offset, (count,)) for path, offset, count in found]


class Rows(torch.utils.data.Dataset[Pair]):
    """A data set for torch's DataLoader. Each worker opens the files itself."""

    def __init__(self, shards: Hdf5) -> None:
        self.shards = shards
        self.arrays: list[Any] = []

    def __getitem__(self, index: int) -> Pair:
        self.arrays = self.arrays or self.shards.arrays()
        shard, within = divmod(index, SHARD_SAMPLES)
        row = self.arrays[shard][within * T : within * T + ROW].astype(np.int64)
        return row[:-1], row[1:]


class Torch(Hdf5):
    """torch's DataLoader with worker processes."""

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        return self.random(wanted)

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        indices = [batch.tolist() for batch in wanted.batches()]
        yield from DataLoader(Rows(self), batch_sampler=indices, num_workers=WORKERS)


def all_rows(folder: Path, count: int) -> Iterator[np.ndarray]:
    """The first samples, as peers' writers take them."""
    mapped = Mapped(folder)
    arrays = mapped.arrays()
    for shard, token in mapped.places(np.arange(count)):
        yield np.array(arrays[shard][token : token + ROW])


@functools.cache
def import_streaming() -> Any:
    """mosaicml-streaming without torchvision, which it imports for images alone."""
    parts: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, names in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # transformers asks for it
        vars(module).update(names)
        sys.modules[name] = module
    import streaming

    return streaming


class Streaming(Candidate):
    """mosaicml-streaming. It has a folder for each kind of pass, as it iterates over whole ones."""

    package = "streaming"

    @staticmethod
    def make(folder: Path, samples: int, sequential: int) -> None:
        """As Candidate."""
        columns = {"tokens": f"ndarray:uint16:{ROW}"}
        for kind, count in ((SEQUENTIAL, sequential), (RANDOM, samples)):
            out = str(folder / f"streaming-{kind}")
            with import_streaming().MDSWriter(out=out, columns=columns) as writer:
                for row in all_rows(folder, count):
                    writer.write({"tokens": row})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.module = import_streaming()
        self.opened: dict[str, Any] = {}

    def dataset(self, kind: str, batch: int) -> Any:
        """The data set of a folder, which one process may open only once."""
        if kind not in self.opened:
            self.opened[kind] = self.module.StreamingDataset(
                local=str(self.folder / f"streaming-{kind}"), shuffle=False, batch_size=batch
            )
        return self.opened[kind]

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        samples = iter(self.dataset(SEQUENTIAL, BLOCK))
        for _ in range(wanted.steps):
            rows = [next(samples)["tokens"] for _ in range(BLOCK)]
            yield of_rows(widened(np.stack(rows)))

    def random(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        dataset = self.dataset(RANDOM, MICRO)
        for indices in wanted.batches():
            rows = [dataset[index]["tokens"] for index in indices.tolist()]
            yield of_rows(widened(np.stack(rows)))


class Web(Candidate):
    """webdataset, with its shuffle buffer."""

    ordered = False
    kinds = (SEQUENTIAL,)
    package = "webdataset"

    @staticmethod
    def make(folder: Path, samples: int, sequential: int) -> None:
        """As Candidate."""
        import webdataset

        with webdataset.TarWriter(str(folder / "webdataset.tar")) as writer:
            for number, row in enumerate(all_rows(folder, sequential)):
                writer.write({"__key__": f"{number:09d}", "tokens": row.tobytes()})

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import webdataset

        self.module = webdataset

    def sequential(self, wanted: Pass) -> Iterator[Pair]:
        """As Candidate."""
        tar = str(self.folder / "webdataset.tar")
        samples = iter(self.module.WebDataset(tar, shardshuffle=False).shuffle(SHUFFLED))
        for _ in range(wanted.steps):
            rows = [np.frombuffer(next(samples)["tokens"], np.uint16) for _ in range(BLOCK)]
            yield of_rows(widened(np.stack(rows)))


CANDIDATES: dict[str, type[Candidate]] = {
    RAW: Raw,
    WIDE: RawWide,
    "ours": Ours,
    "ours, Loader": OursLoader,
    "h5py": Hdf5,
    "memmap": Mapped,
    "DataLoader": Torch,
    "streaming": Streaming,
    "webdataset": Web,
}
