"""Time to plan a checkpoint on one of very many ranks, which are simulated in one process.

    python -m benchmarks.checkpoint_plan [--ranks 4096] [--tensors 3000] [--json FILE]

Every rank owns a part of every tensor of 4 MiB: some of its rows, or some of its columns. With
columns a rank has something of every extent. One rank, which writes, plans a first save and a later
one. The messages of all other ranks are made before; a union of values costs what the tree of
messages would cost. The benchmark shows seconds, and the most memory that Python and numpy took
(tracemalloc, in a second run, which is slower). With more ranks only one thing grows: the list of
what they own of this rank's extents.
"""

from __future__ import annotations

import math
import pickle
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from hpc_train.checkpoint.fileformat import Contents, FileMap, LocalTensor
from hpc_train.checkpoint.routes import Plans, extents_of, keepers, owned, row_of
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

NAME = "checkpoint_plan"
LONG, SHORT = 4096, 256  # sides of each float32 tensor
STATE = b'{"step":1}'

Rows = dict[int, list[Any]]


@dataclass(frozen=True)
class Others(Group):
    """A group of simulated ranks, whose messages were made before."""

    messages: tuple[Rows, ...] = ()

    def gathered(self, value: Any, what: str = "") -> list[Any]:
        """For each rank its number or, for text, the name of its host; 64 ranks share a host."""
        if isinstance(value, str):
            return [f"node{rank // 64}" for rank in range(self.size)]
        return [*range(self.size)]

    def united(self, values: Mapping[Any, Any], what: str = "") -> dict[Any, Any]:
        """Take the same values from all ranks. A level of the tree costs a message and a merge."""
        found = dict(values)
        for _ in range(math.ceil(math.log2(self.size))):
            found = pickle.loads(pickle.dumps(found)) | found
        return found

    def same(self, data: bytes, what: str = "") -> bool:
        """Return True, as all ranks have the same bytes."""
        return True

    def largest(self, number: int, what: str = "") -> int:
        """Return the number, as all ranks have the same."""
        return number


def world(rank: int, ranks: int, messages: tuple[Rows, ...]) -> Others:
    """A group in which this process is one rank, with a communicator that delivers `messages`."""
    coming = iter(messages)
    current: list[Rows] = []

    def counts(_: Any, into: Any) -> None:
        current[:] = [next(coming)]
        into[:] = [len(current[0].get(rank, ())) for rank in range(ranks)]

    def rows(_: Any, received: list[Any]) -> None:
        found = [row for rank in sorted(current[0]) for row in current[0][rank]]
        received[0][:] = np.array(found, np.int64).reshape(received[0].shape)

    comm: Any = SimpleNamespace(Alltoall=counts, Alltoallv=rows)
    return Others(rank, ranks, comm, messages=messages)


def prepared(
    layout: FileMap, me: int, ranks: int, part: Callable[[int], SliceSpec]
) -> tuple[Rows, Rows]:
    """The messages from the other ranks to one rank.

    The first ones are for the check that each element has one owner. The second ones say what the
    other ranks have of this rank's extents.
    """
    runs = [owned(layout.extents, rank, ranks) for rank in range(ranks)]
    keeping = keepers(runs, layout.extents)
    mine = {*runs[me]}
    checked, routed = Rows(), Rows()
    tensors = layout.entries[:-2]
    for rank in range(ranks):
        spec = part(rank)
        if rank == me:
            continue
        checked[rank] = [row_of(n, spec) for n in range(me, len(tensors), ranks)]
        near = [
            n for n, e in enumerate(tensors) if mine & {*extents_of(e, SliceSpec.whole(e.shape))}
        ]
        routed[rank] = [
            row_of(n, spec)
            for n in near
            if any(keeping[i] == me for i in extents_of(tensors[n], spec))
        ]
    return checked, {rank: rows for rank, rows in routed.items() if rows}


def plan(ranks: int, tensors: int, dim: int) -> tuple[float, float, float]:
    """Seconds for the first plan and for a later one, and MB of memory for the first."""
    shape = (LONG, SHORT) if dim == 0 else (SHORT, LONG)
    names = [f"model.{number:05d}" for number in range(tensors)]
    layout = Contents.of(dict.fromkeys(names, (torch.float32, shape))).layout(len(STATE))

    def part(rank: int) -> SliceSpec:
        return SliceSpec.part(shape, dim, rank, ranks)

    me = next(rank for rank in range(ranks) if owned(layout.extents, rank, ranks))
    messages = prepared(layout, me, ranks, part)
    tensor = torch.empty(part(me).local_shape)
    held = {name: LocalTensor(tensor, part(me)) for name in names}
    group = world(me, ranks, messages)
    plans = Plans(group, group)
    begin = time.perf_counter()
    plans.of(held, STATE)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    plans.of(held, STATE)
    later = time.perf_counter() - begin
    group = world(me, ranks, messages)
    tracemalloc.start()
    Plans(group, group).of(held, STATE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return first, later, peak / 1e6


def main() -> None:
    """Show what it takes."""
    options = harness.arguments("the plan of a checkpoint", ranks=4096, tensors=3000)
    ratios, middles = {}, {}
    for dim, what in enumerate(("rows", "columns")):
        first, later, megabytes = plan(options.ranks, options.tensors, dim)
        print(
            f"{options.ranks} ranks, {options.tensors} tensors, {what} of each: first plan "
            f"{first:.2f} s, {megabytes:.0f} MB; a later one {later * 1e3:.1f} ms"
        )
        ratios[f"{what}: first plan / a later one"] = first / later
        middles |= {f"{what}: first plan": first, f"{what}: a later plan": later}
        middles[f"{what}: MB for the first plan"] = megabytes
    harness.finish(NAME, ratios, middles, options.json)


if __name__ == "__main__":
    main()
