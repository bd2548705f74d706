"""Saving and loading checkpoints: GiB/s beside raw writes and reads of the same ranks, and peers.

    python -m benchmarks.checkpoint [--rounds 5] [--mib 1024]

Each rank holds the whole state, as in data-parallel training: tensors of 64 MiB, or 20000 of 1 KiB.
Saving ends when the last rank has its bytes on the disk (fsync). Candidates:

- ours, posix and mpiio: hashed, read back by another rank and compared, committed;
- raw: each rank writes its part of as many bytes into one file, and nothing else;
- torch.save: each rank a file of its part of the tensors;
- DCP: torch.distributed.checkpoint over gloo, which divides a state that all ranks have;
- safetensors: rank 0 writes all with the safetensors library.

Loading begins with files that are not in memory (posix_fadvise) and ends when all ranks have the
whole state. Raw: each rank reads its part, and all receive it by MPI_Bcast, so that each byte is
read once; `torch.load` and safetensors read on each rank what they wrote.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from hpc_train.mpi.group import Group

NAME = "checkpoint"
RANKS = (2, 4)
LARGE, SMALL = 64 << 20, 1 << 10  # bytes of a tensor
SMALL_COUNT = 20000
RAW = "raw"
POSIX, MPIIO, TORCH, DCP, SAFETENSORS = (
    "ours, posix",
    "ours, mpiio",
    "torch.save",
    "DCP",
    "safetensors",
)
STATE = b'{"step":1}'

Named = dict[str, Tensor]


def states(mib: int) -> dict[str, Named]:
    """The states by name."""
    generator = torch.Generator().manual_seed(0)

    def tensors(count: int, nbytes: int) -> Named:
        return {
            f"model.{number:05d}": torch.randn(nbytes // 4, generator=generator)
            for number in range(count)
        }

    return {
        f"{mib} MiB in large tensors": tensors((mib << 20) // LARGE, LARGE),
        f"{SMALL_COUNT} tensors of 1 KiB": tensors(SMALL_COUNT, SMALL),
    }


class Ways:
    """The candidates, all for one state in one folder. All ranks make and call them together."""

    def __init__(self, named: Named, folder: Path, group: Group) -> None:
        self.named, self.folder, self.group = named, folder, group
        self.nbytes = sum(tensor.nbytes for tensor in named.values())
        self.empty = {name: torch.empty_like(tensor) for name, tensor in named.items()}
        names = list(named)
        self.mine = names[group.rank :: group.size]
        self.shard = folder / f"torch-{group.rank}.pt"

    def savers(self) -> dict[str, Callable[[], None]]:
        """How each saves."""
        return {
            POSIX: partial(self.ours, "posix"),
            MPIIO: partial(self.ours, "mpiio"),
            RAW: self.raw,
            TORCH: self.torch_save,
            DCP: self.dcp_save,
            SAFETENSORS: self.safetensors_save,
        }

    def loaders(self) -> dict[str, Callable[[], None]]:
        """How each loads what it saved."""
        return {
            POSIX: partial(self.ours_load, "posix"),
            RAW: self.raw_load,
            TORCH: self.torch_load,
            DCP: self.dcp_load,
            SAFETENSORS: self.safetensors_load,
        }

    def ours(self, engine: Any) -> None:
        """Our save, with all that it checks."""
        from hpc_train.checkpoint.fileformat import Held
        from hpc_train.checkpoint.save import save

        held = {name: Held.whole(tensor) for name, tensor in self.named.items()}
        save(self.folder / f"ours-{engine}.safetensors", held, STATE, self.group, engine)

    def ours_load(self, engine: str) -> None:
        """Our load, verified."""
        from hpc_train.checkpoint import restore
        from hpc_train.checkpoint.fileformat import Held

        path = self.folder / f"ours-{engine}.safetensors"
        reader = restore.open_together(path, self.group)
        held = {name: Held.whole(tensor) for name, tensor in self.empty.items()}
        restore.load(reader, held, self.group)

    def raw(self) -> None:
        """Nothing but this rank's part of the bytes."""
        path, size = self.folder / "raw", self.nbytes // self.group.size
        if self.group.rank == 0:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.posix_fallocate(descriptor, 0, self.nbytes)
            os.close(descriptor)
        self.group.barrier()
        descriptor = os.open(path, os.O_WRONLY)
        rest, offset = memoryview(self.buffer[:size]), self.group.rank * size
        while rest:
            count = os.pwrite(descriptor, rest[: 16 << 20], offset)
            rest, offset = rest[count:], offset + count
        os.fsync(descriptor)
        os.close(descriptor)

    @cached_property
    def buffer(self) -> bytearray:
        """As many bytes as the state has."""
        return bytearray(self.nbytes)

    def raw_load(self) -> None:
        """Each byte read once, and handed on."""
        size = self.nbytes // self.group.size
        target = memoryview(self.buffer)
        descriptor = os.open(self.folder / "raw", os.O_RDONLY)
        begin = self.group.rank * size
        for offset in range(begin, begin + size, 16 << 20):
            os.preadv(descriptor, [target[offset : min(offset + (16 << 20), begin + size)]], offset)
        os.close(descriptor)
        for root in range(self.group.size):
            self.group.comm.Bcast(target[root * size : (root + 1) * size], root)

    def torch_save(self) -> None:
        """A file for each rank."""
        with self.shard.open("wb") as file:
            torch.save({name: self.named[name] for name in self.mine}, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        """All of these files."""
        for rank in range(self.group.size):
            found = torch.load(self.folder / f"torch-{rank}.pt", weights_only=True)
            for name, tensor in found.items():
                self.empty[name].copy_(tensor)

    def dcp_save(self) -> None:
        """With fsync, which is its default."""
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(self.folder / "dcp", sync_files=True, overwrite=True)
        dcp.save(dict(self.named), storage_writer=writer)

    def dcp_load(self) -> None:
        """Into the same tensors."""
        from torch.distributed import checkpoint as dcp

        dcp.load(dict(self.empty), storage_reader=dcp.FileSystemReader(self.folder / "dcp"))

    def safetensors_save(self) -> None:
        """On rank 0 alone."""
        from safetensors.torch import save_file

        if self.group.rank == 0:
            path = self.folder / "one.safetensors"
            save_file(self.named, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def safetensors_load(self) -> None:
        """On each rank."""
        from safetensors.torch import load_file

        for name, tensor in load_file(self.folder / "one.safetensors").items():
            self.empty[name].copy_(tensor)

    def forget(self) -> None:
        """Take all files out of memory, and the state out of the tensors to load into."""
        for tensor in self.empty.values():
            tensor.zero_()
        self.group.barrier()
        if self.group.rank == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.group.barrier()

    def check(self, name: str) -> None:
        """What was loaded is the state.

        Raises:
            RuntimeError: it is not.
        """
        if name != RAW and any(
            not torch.equal(self.empty[key], tensor) for key, tensor in self.named.items()
        ):
            raise RuntimeError(f"{name} has not loaded what was saved")


def measure(options: argparse.Namespace) -> None:
    """What each rank does."""
    from benchmarks.gradient_averaging import start_gloo
    from hpc_train.mpi import runtime as runtimes

    runtime = runtimes.start()
    group = runtime.world
    start_gloo(group.comm)
    torch.set_num_threads(1)
    folder = Path(group.from_first(lambda: tempfile.mkdtemp()))
    found = {}
    for name, named in states(options.mib).items():
        ways = Ways(named, folder, group)
        rate = ways.nbytes / 2**30

        def saved(call: Callable[[], None], rate: float = rate) -> float:
            return rate / harness.elapsed(group, call)

        savers = {way: partial(saved, call) for way, call in ways.savers().items()}
        found[f"save, {name}"] = harness.in_turn(savers, options.rounds)

        def loaded(
            way: str, call: Callable[[], None], ways: Ways = ways, rate: float = rate
        ) -> float:
            ways.forget()
            seconds = harness.elapsed(group, call)
            ways.check(way)
            return rate / seconds

        loaders = {way: partial(loaded, way, call) for way, call in ways.loaders().items()}
        found[f"load, {name}"] = harness.in_turn(loaders, options.rounds)
        group.barrier()
        del ways, savers, loaders
    if group.rank == 0:
        shutil.rmtree(folder)
        harness.hand_back(options.result, found)
    torch.distributed.destroy_process_group()
    runtime.close()


def main() -> None:
    """Start the ranks and show what they found."""
    options = harness.arguments("checkpoints", rounds=5, mib=1024)
    if options.result:
        measure(options)
        return
    ratios, middles = {}, {}
    module = f"benchmarks.{NAME}"
    for ranks, case, samples in harness.sweep(
        module, RANKS, rounds=options.rounds, mib=options.mib
    ):
        key = f"{ranks} ranks, {case}"
        harness.show(key, "GiB/s", samples, RAW)
        ratios |= {
            f"{key}: {POSIX} / {other}": harness.paired_ratio(samples, POSIX, other)
            for other in samples
            if other != POSIX
        }
        middles |= {f"{key}: {n}": value for n, value in harness.medians(samples).items()}
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
