"""Speed of saving and loading checkpoints in GiB/s, beside raw writes and reads, and peers.

    python -m benchmarks.checkpoint [--rounds 5] [--mib 1024]

Each rank holds the whole state, as in data-parallel training: tensors of 64 MiB, or 5000 of 1 KiB.
When a save begins, the candidate has no files, and all else is on the disk (sync). The save ends
when the last rank has its bytes on the disk (fsync). These are the candidates:

- ours, posix, mpiio and collective: extents are hashed, read back by another rank and compared, and
  the file is committed.
- unverified: ours with posix, without reading back.
- columns: ours with posix. Each rank holds some columns of each tensor, as in tensor parallelism.
- raw: each rank writes its part of the same number of bytes into one file, and does nothing else.
- torch.save: each rank writes a file with its part of the tensors.
- DCP: torch.distributed.checkpoint over gloo. It divides a state that all ranks have.
- safetensors: rank 0 writes everything with the safetensors library.

When a load begins, no file is in memory (posix_fadvise). The load ends when all ranks have the
whole state. In raw, each rank reads its part and MPI_Bcast sends it to the others, so that each
byte is read once. With `torch.load` and safetensors each rank reads all files. In columns, ranks
that need some columns load a file that was saved by ranks with all columns.

Stall is the time in seconds for which one save keeps a training rank from computing. It is the time
of the call that saves, plus the time of the optimizer and of polling the save after each step until
the save is complete. A step computes for a second, less than a model of this size takes on such
cores. If a rank has no spare core, the threads that write also slow down its computation. None of
these numbers includes that.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness
from hpc_train.checkpoint import Checkpoints, restore
from hpc_train.checkpoint.background import carry_out
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.routes import Plans
from hpc_train.checkpoint.save import saving
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

NAME = "checkpoint"
RANKS = (2, 4)
LARGE, SMALL = 64 << 20, 1 << 10  # bytes of a tensor
SMALL_COUNT = 5000
RAW = "raw"
POSIX, MPIIO, COLLECTIVE, UNVERIFIED, COLUMNS, TORCH, DCP, SAFETENSORS = (
    "ours, posix",
    "ours, mpiio",
    "ours, collective",
    "ours, unverified",
    "ours, columns",
    "torch.save",
    "DCP",
    "safetensors",
)
FOREGROUND, BACKGROUND, ASYNC = "ours, foreground", "ours, background", "DCP async"
STEP_SECONDS = 1.0
STATE = b'{"step":1}'

Named = dict[str, Tensor]


def states(mib: int) -> dict[str, Named]:
    """The states to save, by their names."""
    generator = torch.Generator().manual_seed(0)

    def tensors(count: int, nbytes: int) -> Named:
        return {
            f"model.{number:05d}": torch.randn(side, side, generator=generator)
            for number in range(count)
            for side in [math.isqrt(nbytes // 4)]
        }

    return {
        f"{mib} MiB in large tensors": tensors((mib << 20) // LARGE, LARGE),
        f"{SMALL_COUNT} tensors of 1 KiB": tensors(SMALL_COUNT, SMALL),
    }


class Ways:
    """The candidates for one state and one folder. Its methods are collective."""

    def __init__(self, named: Named, folder: Path, group: Group) -> None:
        self.named, self.folder, self.group = named, folder, group
        self.nbytes = sum(tensor.nbytes for tensor in named.values())
        self.empty = {name: torch.empty_like(tensor) for name, tensor in named.items()}
        names = list(named)
        self.mine = names[group.rank :: group.size]
        self.columns = {
            name: SliceSpec.part(tuple(tensor.shape), 1, group.rank, group.size)
            for name, tensor in named.items()
        }
        self.shard = folder / f"torch_save-{group.rank}.pt"

    def savers(self) -> dict[str, Callable[[], None]]:
        """The function with which each candidate saves."""
        return {
            POSIX: partial(self.ours, "posix"),
            MPIIO: partial(self.ours, "mpiio"),
            COLLECTIVE: partial(self.ours, "mpiio_collective"),
            UNVERIFIED: partial(self.ours, "posix", verify=False),
            COLUMNS: self.ours_columns,
            RAW: self.raw,
            TORCH: self.torch_save,
            DCP: self.dcp_save,
            SAFETENSORS: self.safetensors_save,
        }

    def loaders(self) -> dict[str, Callable[[], None]]:
        """The function with which each candidate loads what it has saved."""
        return {
            POSIX: self.ours_load,
            COLUMNS: self.ours_columns_load,
            RAW: self.raw_load,
            TORCH: self.torch_load,
            DCP: self.dcp_load,
            SAFETENSORS: self.safetensors_load,
        }

    def ours(self, engine: Any, *, verify: bool = True) -> None:
        """Save with ours, with all checks."""
        held = {name: LocalTensor.whole(tensor) for name, tensor in self.named.items()}
        path = self.folder / "ours.safetensors"
        plans = Plans(self.group, Group())
        carry_out(saving(path, Parts(held), STATE, plans, engine=engine, verify=verify))

    @cached_property
    def parts(self) -> dict[str, LocalTensor]:
        """This rank's columns of all tensors."""
        return {
            name: LocalTensor(self.named[name][:, spec.start : spec.stop].contiguous(), spec)
            for name, spec in self.columns.items()
        }

    def ours_columns(self) -> None:
        """Save with ours, where each rank holds some columns."""
        path = self.folder / "ours_columns.safetensors"
        plans = Plans(self.group, self.group)
        carry_out(saving(path, Parts(self.parts), STATE, plans))

    def ours_load(self) -> None:
        """Load with ours, verified."""
        reader = restore.open_together(self.folder / "ours.safetensors", self.group)
        held = {name: LocalTensor.whole(tensor) for name, tensor in self.empty.items()}
        restore.load_tensors(reader, held, self.group, alike=self.group)

    def ours_columns_load(self) -> None:
        """Load with ours, where each rank needs some columns."""
        reader = restore.open_together(self.folder / "ours.safetensors", self.group)
        restore.load_tensors(reader, self.parts, self.group, replica=self.group)

    def raw(self) -> None:
        """Write this rank's part of the bytes, and nothing else."""
        path, size = self.folder / "raw.bin", self.nbytes // self.group.size
        if self.group.rank == 0:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            os.posix_fallocate(descriptor, 0, self.nbytes)
            os.close(descriptor)
        self.group.barrier()
        descriptor = os.open(path, os.O_WRONLY)
        rest, offset = memoryview(self.buffer)[:size], self.group.rank * size
        while rest:
            count = os.pwrite(descriptor, rest[: 16 << 20], offset)
            rest, offset = rest[count:], offset + count
        os.fsync(descriptor)
        os.close(descriptor)

    @cached_property
    def buffer(self) -> bytearray:
        """A buffer of the state's size."""
        return bytearray(self.nbytes)

    def raw_load(self) -> None:
        """Read this rank's part and send it to all ranks."""
        size = self.nbytes // self.group.size
        target = memoryview(self.buffer)
        descriptor = os.open(self.folder / "raw.bin", os.O_RDONLY)
        begin = self.group.rank * size
        for offset in range(begin, begin + size, 16 << 20):
            os.preadv(descriptor, [target[offset : min(offset + (16 << 20), begin + size)]], offset)
        os.close(descriptor)
        for root in range(self.group.size):
            self.group.comm.Bcast(target[root * size : (root + 1) * size], root)

    def torch_save(self) -> None:
        """Write a file with this rank's tensors."""
        with self.shard.open("wb") as file:
            torch.save({name: self.named[name] for name in self.mine}, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        """Read the files of all ranks."""
        for rank in range(self.group.size):
            found = torch.load(self.folder / f"torch_save-{rank}.pt", weights_only=True)
            for name, tensor in found.items():
                self.empty[name].copy_(tensor)

    def dcp_save(self) -> None:
        """Save with DCP and fsync, which is its default."""
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(self.folder / "dcp_save.d", sync_files=True, overwrite=True)
        dcp.save(dict(self.named), storage_writer=writer)

    def dcp_load(self) -> None:
        """Load with DCP."""
        from torch.distributed import checkpoint as dcp

        dcp.load(dict(self.empty), storage_reader=dcp.FileSystemReader(self.folder / "dcp_save.d"))

    def safetensors_save(self) -> None:
        """Save on rank 0 with the safetensors library."""
        from safetensors.torch import save_file

        if self.group.rank == 0:
            path = self.folder / "safetensors_save.safetensors"
            save_file(self.named, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def safetensors_load(self) -> None:
        """Load on each rank with the safetensors library."""
        from safetensors.torch import load_file

        for name, tensor in load_file(self.folder / "safetensors_save.safetensors").items():
            self.empty[name].copy_(tensor)

    def clear(self, call: Callable[[], None]) -> None:
        """Remove the files of a candidate, and wait until all other files are on the disk."""
        self.group.barrier()
        if self.group.rank == 0:
            kind = getattr(call, "func", call).__name__
            for path in self.folder.iterdir():
                if path.name.startswith((f"{kind}.", f"{kind}-")):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        self.group.barrier()

    def forget(self) -> None:
        """Drop all files from the page cache, and set the tensors to load into to zero."""
        for tensor in self.empty.values():
            tensor.zero_()
        for part in self.parts.values():
            part.tensor.zero_()
        self.group.barrier()
        if self.group.rank == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.group.barrier()

    def check(self, name: str) -> None:
        """Check that the loaded tensors are those of the state.

        Raises:
            RuntimeError: they are not.
        """
        found = self.empty
        if name == COLUMNS:
            found = {key: part.tensor for key, part in self.parts.items()}
        for key, tensor in self.named.items():
            spec = self.columns[key]
            wanted = tensor[:, spec.start : spec.stop] if name == COLUMNS else tensor
            if name != RAW and not torch.equal(found[key], wanted):
                raise RuntimeError(f"{name} has not loaded what was saved")


class Training:
    """A model whose checkpoints are saved while steps compute. Collective."""

    def __init__(self, named: Named, folder: Path, group: Group) -> None:
        self.group, self.folder = group, folder
        self.model = nn.ParameterList([nn.Parameter(tensor) for tensor in named.values()])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpoints = Checkpoints(
            folder / "run",
            connect(group),
            TrainingState(self.model, self.optimizer),
            SavePolicy(keep=1, engine="posix"),
        )
        self.named, self.steps = named, 0
        self.matrix = torch.randn(512, 512)

    def compute(self) -> None:
        """Compute for as long as a forward and a backward pass would."""
        end = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < end:
            torch.mm(self.matrix, self.matrix)

    def blocked(self, how: str) -> float:
        """Seconds for which a save keeps the main thread of the slowest rank from computing."""
        self.steps += 1
        later: list[Any] = []
        stall = harness.elapsed(self.group, lambda: later.append(self._save(how)))
        while self.group.largest(int(not self._saved(how, *later))):
            self.compute()
            stall += harness.elapsed(self.group, lambda: self._step(how))
        return stall

    def _step(self, how: str) -> None:
        self.optimizer.step()
        if how == BACKGROUND:
            self.checkpoints.poll()

    def _save(self, how: str) -> Any:
        if how in (FOREGROUND, BACKGROUND):
            return self.checkpoints.save(self.steps, background=how == BACKGROUND)
        from torch.distributed import checkpoint as dcp

        writer = dcp.FileSystemWriter(self.folder / "async", sync_files=True, overwrite=True)
        return dcp.async_save(dict(self.named), storage_writer=writer)

    def _saved(self, how: str, later: Any) -> bool:
        if how == ASYNC:
            return bool(later.done())
        return self.checkpoints.saved_step == self.steps


def _use_blocks(path: Path, mib: int) -> None:
    """Write to free blocks once. The first write to a block of a virtual disk is slow."""
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def measure(options: argparse.Namespace) -> None:
    """Measure all candidates, on each rank."""
    from benchmarks.gradient_averaging import start_gloo
    from hpc_train.mpi import runtime as runtimes

    runtime = runtimes.start_runtime()
    group = runtime.world
    start_gloo(group.comm)
    torch.set_num_threads(1)
    folder = Path(group.from_first(lambda: tempfile.mkdtemp()))
    if group.rank == 0:
        _use_blocks(folder / "used", 12 * options.mib)
    found = {}
    for name, named in states(options.mib).items():
        ways = Ways(named, folder, group)
        rate = ways.nbytes / 2**30

        def saved(call: Callable[[], None], ways: Ways = ways, rate: float = rate) -> float:
            ways.clear(call)
            return rate / harness.elapsed(group, call)

        savers = {way: partial(saved, call) for way, call in ways.savers().items()}
        found[f"save, {name}"] = harness.in_turn(savers, options.rounds, shuffled=True)

        def loaded(
            way: str, call: Callable[[], None], ways: Ways = ways, rate: float = rate
        ) -> float:
            ways.forget()
            seconds = harness.elapsed(group, call)
            ways.check(way)
            return rate / seconds

        loaders = {way: partial(loaded, way, call) for way, call in ways.loaders().items()}
        found[f"load, {name}"] = harness.in_turn(loaders, options.rounds, shuffled=True)
        group.barrier()
        training = Training(named, folder, group)
        stalls = {how: partial(training.blocked, how) for how in (FOREGROUND, BACKGROUND, ASYNC)}
        found[f"stall, {name}"] = harness.in_turn(stalls, options.rounds, shuffled=True)
        del ways, savers, loaders, training, stalls
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
        stall = case.startswith("stall")
        first = BACKGROUND if stall else POSIX
        harness.show(key, "s" if stall else "GiB/s", samples, FOREGROUND if stall else RAW)
        ratios |= {
            f"{key}: {first} / {other}": harness.paired_ratio(samples, first, other)
            for other in samples
            if other != first
        }
        middles |= {f"{key}: {n}": value for n, value in harness.medians(samples).items()}
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
