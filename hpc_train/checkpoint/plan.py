"""Who writes what of a checkpoint: found for the first one, and again only after a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpc_train.checkpoint.fileformat import HASHES, STATE, Contents, FileMap, LocalTensor, hash_of
from hpc_train.checkpoint.routes import NOBODY, Ints, Routes, check_owned
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import agreed, settle
from hpc_train.mpi.group import Group


@dataclass(frozen=True)
class WritePlan:
    """How one checkpoint is written.

    Args:
        layout: of the file.
        routes: how the extents come together.
        runs: by rank of the replica: the extents that it writes.
        rounds: the largest number of extents that a rank writes.
        shift: how many ranks further on is the one whose extents a rank reads back.
    """

    layout: FileMap
    routes: Routes
    runs: Sequence[range]
    rounds: int
    shift: int


class Plans:
    """Plans of checkpoints of the same tensors. All ranks make it.

    Args:
        group: the ranks that write.
        replica: the ranks that hold the state together.
    """

    def __init__(self, group: Group, replica: Group) -> None:
        self.group, self.replica = group, replica
        self._contents: Contents | None = None
        self._plan: WritePlan | None = None
        self._places: list[int] = []  # in the group, of the replica's ranks
        self._shift = 0

    def forget(self) -> None:
        """Find the next one anew: on all ranks, if any has other tensors, parts or owners."""
        self._contents = self._plan = None

    def of(self, held: Mapping[str, LocalTensor], state: bytes) -> WritePlan:
        """Plan a checkpoint. Collective.

        Args:
            held: this rank's parts, by the tensors' names.
            state: what is no tensor.

        Raises:
            CheckpointError: the ranks of a replica do not own all of a tensor together, or a
                tensor's dtype has no name in the format, or there are too many.
            UserError: the ranks do not have the same tensors or state.
        """
        group, replica = self.group, self.replica
        if not self._places:
            self._places = replica.gathered(group.rank)
            self._shift = shift(group.gathered(group.host))
        contents, known = self._contents, self._plan
        self.forget()  # unless it succeeds
        forms = {}
        if contents is None:
            forms = replica.united({name: part.form for name, part in held.items()})
        with agreed(group):
            contents = contents or Contents.of(forms)
            layout = contents.layout(len(state))
        self._check_same(layout, state)
        if known is not None and known.layout.extents == layout.extents:
            plan = replace(known, layout=layout)
        else:
            specs = {name: part.spec for name, part in held.items() if part.owned}
            check_owned(specs, layout, group, replica)
            runs = [owned(layout.extents, place, group.size) for place in self._places]
            routes = Routes(specs, layout, keepers(runs, layout.extents), replica)
            plan = WritePlan(layout, routes, runs, -(-layout.extents // group.size), self._shift)
        self._contents, self._plan = contents, plan
        return plan

    def _check_same(self, layout: FileMap, state: bytes) -> None:
        """Check that all ranks plan the same file. Collective."""
        group, mine = self.group, [hash_of(part) for part in (layout.description, state)]
        if group.same(b"".join(mine)):
            return
        differs = mine != group.from_first(lambda: mine)
        entries, host = group.from_first(lambda: (layout.entries, group.host))
        failure: Exception | None = None
        if differs:
            ours, theirs = (
                {(e.name, e.dtype, e.shape) for e in of} for of in (layout.entries, entries)
            )
            odd = sorted(name for name, *_ in ours ^ theirs if name not in (STATE, HASHES))
            what = odd[0] if odd else "what is no tensor"
            failure = UserError(
                f"the plan of the checkpoint differs from that of rank 0 ({host}) in {what}",
                "build the same model and optimizer on all ranks",
            )
        settle(group, failure)


def owned(extents: int, rank: int, size: int) -> range:
    """The run of extents that a rank writes."""
    return range(rank * extents // size, (rank + 1) * extents // size)


def keepers(runs: Sequence[range], extents: int) -> Ints:
    """By extent: the rank of the replica that writes it."""
    found = np.full(extents, NOBODY, np.int64)
    for rank, run in enumerate(runs):
        found[run.start : run.stop] = rank
    return found


def shift(hosts: Sequence[str]) -> int:
    """How many ranks further on is the one whose extents a rank reads back.

    That one is on another host, for as many ranks as there can be.

    Args:
        hosts: of all ranks.
    """
    size = len(hosts)

    def crossing(shift: int) -> int:
        return sum(hosts[r] != hosts[(r + shift) % size] for r in range(size))

    first = next((r for r in range(size) if hosts[r] != hosts[0]), 1)
    return max((max(1, size // 2), first, 1), key=crossing)
