"""Which rank writes which extents, and which ranks of a replica hold pieces of them.

An extent has a keeper: the rank that writes it, or has read it. A rank tells the keepers of the
extents in which a part lies that it holds this part. So what a rank receives and remembers does not
grow with what other ranks hold elsewhere.

The first checkpoint makes a plan of who writes what. A change of the tensors makes a new one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hpc_train.checkpoint import fileformat
from hpc_train.checkpoint.fileformat import (
    DTYPE_BYTES,
    HASHES,
    STATE,
    Contents,
    Entry,
    FileMap,
    LocalTensor,
    hash_of,
)
from hpc_train.checkpoint.parts import Piece, Specs, Strip, pieces_of
from hpc_train.errors import CheckpointError, UserError
from hpc_train.mpi.agreement import agreed, settle
from hpc_train.mpi.group import Group
from hpc_train.sharding import SliceSpec

NOBODY = -1  # the keeper of an extent that no rank of the replica keeps
WIDTH = 6  # integers of a SliceRow
Ints = npt.NDArray[np.int64]
SliceRow = tuple[int, int, int, int, int, int]
"""A part: its tensor's place in the file, and its SliceSpec without the tensor's shape."""


def row_of(place: int, spec: SliceSpec) -> SliceRow:
    """A part as six integers, for a message.

    Args:
        place: of the tensor in the file, counted from 0.
        spec: which part of the tensor it is.
    """
    return place, spec.dim, spec.start, spec.stop, spec.first, spec.last


def spec_of(row: Sequence[int], entries: Sequence[Entry]) -> tuple[str, SliceSpec]:
    """The tensor's name and the part that a row describes."""
    place, *cut = row
    return entries[place].name, SliceSpec(entries[place].shape, *cut)


def extents_of(entry: Entry, spec: SliceSpec) -> range:
    """The extents from the one with a part's first byte to the one with its last byte."""
    first, last = spec.span(DTYPE_BYTES[entry.dtype])
    if first == last:
        return range(0)
    begin, end = entry.begin + first, entry.begin + last
    size = fileformat.EXTENT_BYTES
    return range(begin // size, (end - 1) // size + 1)


class Routes:
    """The pieces of extents that the ranks of a replica hold. Collective to make.

    Each rank learns this for the extents that it keeps, and no others.

    Args:
        specs: this rank's parts that are exchanged, by their tensors' names.
        layout: of the file.
        keepers: (extents,) the rank of the replica that keeps an extent, or NOBODY.
        replica: the ranks.
        remember: the number of extents whose pieces are remembered; None for all.
    """

    def __init__(
        self,
        specs: Specs,
        layout: FileMap,
        keepers: Ints,
        replica: Group,
        remember: int | None = None,
    ) -> None:
        self.layout, self.keepers, self.rank = layout, keepers, replica.rank
        self._specs: dict[int, Specs] = {self.rank: specs}
        self.holders: dict[int, list[int]] = defaultdict(list)
        """For each extent of this rank, the other ranks that may have pieces of it, ascending."""
        self.asked: list[int] = []
        """The extents of other ranks that this rank may have pieces of, ascending."""
        self.strips: dict[int, list[Piece | Strip]] = {}
        """This rank's pieces of an extent, as they are copied. `Exchange` fills it."""
        self.pieces = lru_cache(maxsize=remember)(self._pieces)
        """A rank's pieces of an extent, by their numbers. The rank or the extent is this rank's."""
        if replica.comm is None:
            return
        told = telling(specs, layout, keepers)
        told.pop(self.rank, None)
        for rank, rows in delivered(replica, told):
            self._specs[rank] = dict(spec_of(row, layout.entries) for row in rows)
            mine = (self._kept(row, self.rank) for row in rows)
            for number in np.unique(np.concatenate([*mine])).tolist():
                self.holders[number].append(rank)
        others = (self._kept(row, rank) for rank, rows in told.items() for row in rows)
        self.asked = np.unique(np.concatenate([np.empty(0, np.int64), *others])).tolist()

    def _kept(self, row: Sequence[int], rank: int) -> Ints:
        """The extents in which a part lies and that a rank keeps."""
        _, spec = spec_of(row, self.layout.entries)
        numbers = extents_of(self.layout.entries[row[0]], spec)
        found: Ints = numbers.start + np.flatnonzero(
            self.keepers[numbers.start : numbers.stop] == rank
        )
        return found

    def _pieces(self, rank: int, number: int) -> list[Piece]:
        return pieces_of(self._specs[rank], self.layout, *self.layout.extent(number))


def telling(specs: Specs, layout: FileMap, keepers: Ints) -> dict[int, list[SliceRow]]:
    """The parts that a rank has to tell other ranks of, by rank."""
    told: dict[int, list[SliceRow]] = defaultdict(list)
    for place, entry in enumerate(layout.entries):
        spec = specs.get(entry.name)
        if spec is None:
            continue
        extents = extents_of(entry, spec)
        if len(extents) == 1:
            ranks = [int(keepers[extents.start])]
        else:
            ranks = np.unique(keepers[extents.start : extents.stop]).tolist()
        for rank in ranks:
            if rank != NOBODY:
                told[rank].append(row_of(place, spec))
    return told


def delivered(
    replica: Group, told: Mapping[int, Sequence[SliceRow]]
) -> Iterator[tuple[int, list[list[int]]]]:
    """The parts that other ranks tell this one of, by rank. Collective over the replica."""
    if replica.comm is None:
        return
    counts = np.zeros(replica.size, np.int64)
    for rank, rows in told.items():
        counts[rank] = len(rows)
    coming = np.empty_like(counts)
    sent = np.array([row for rank in sorted(told) for row in told[rank]], np.int64)
    with replica.waiting("what ranks hold of a checkpoint"):
        replica.comm.Alltoall(counts, coming)
        received = np.empty((int(coming.sum()), WIDTH), np.int64)
        replica.comm.Alltoallv([sent, counts * WIDTH], [received, coming * WIDTH])
    begin = 0
    for rank, count in enumerate(coming.tolist()):
        if count:
            yield rank, received[begin : begin + count].tolist()
        begin += count


def check_owned(specs: Specs, layout: FileMap, group: Group, replica: Group) -> None:
    """Check that each element of the tensors has one owner in a replica. Collective.

    Args:
        specs: the parts that this rank owns, by their tensors' names.
        layout: of the file.
        group: the ranks that raise an error together.
        replica: the ranks that hold all tensors together. Each checks some of the tensors.

    Raises:
        CheckpointError: some elements have no owner, or several.
    """
    told: dict[int, list[SliceRow]] = defaultdict(list)
    for place, entry in enumerate(layout.entries[:-2]):
        if entry.name in specs:
            told[place % replica.size].append(row_of(place, specs[entry.name]))
    rows: list[Sequence[int]] = [*told.pop(replica.rank, [])]
    for _, others in delivered(replica, told):
        rows += others
    with agreed(group):
        check_cover(rows, layout, range(replica.rank, len(layout.entries) - 2, replica.size))


def check_cover(rows: Iterable[Sequence[int]], layout: FileMap, places: Iterable[int]) -> None:
    """Check that parts cover each element of some tensors once.

    Args:
        rows: the parts.
        layout: of the file.
        places: of the tensors in the file.

    Raises:
        CheckpointError: they do not.
    """
    parts: dict[int, list[SliceSpec]] = defaultdict(list)
    for row in rows:
        parts[row[0]].append(spec_of(row, layout.entries)[1])
    for place in places:
        entry, specs = layout.entries[place], parts[place]
        if len(specs) == 1 and specs[0].local_shape == entry.shape:
            continue
        elements = sum(math.prod(spec.local_shape) for spec in specs)
        if elements == math.prod(entry.shape) and _covered(entry.shape, specs):
            continue
        what = f"{elements} elements of {entry.name} {list(entry.shape)}"
        if elements == math.prod(entry.shape):
            what = f"some elements of {entry.name} {list(entry.shape)} twice, and others not"
        raise CheckpointError(
            f"the ranks of a replica own {what}", "let each part be owned by one of them"
        )


def _covered(shape: tuple[int, ...], specs: Sequence[SliceSpec]) -> bool:
    """Whether parts cover a tensor. Together they have as many elements as it has.

    Each dimension is divided where a part begins or ends. Then each cell has to be in one part.
    """
    boxes = [spec.ranges() for spec in specs if math.prod(spec.local_shape)]
    if not boxes:  # there is nothing to cover
        return True
    dims = sorted({dim for box in boxes for dim in box})
    full = {dim: (0, shape[dim]) for dim in dims}
    boxes = [full | box for box in boxes]
    cuts = {dim: np.unique([edge for box in boxes for edge in box[dim]]) for dim in dims}
    cells = np.zeros([len(cuts[dim]) - 1 for dim in dims], np.int32)
    places = {dim: {int(cut): i for i, cut in enumerate(cuts[dim])} for dim in dims}
    for box in boxes:
        cells[tuple(slice(*(places[dim][edge] for edge in box[dim])) for dim in dims)] += 1
    return bool((cells == 1).all())


@dataclass(frozen=True)
class WritePlan:
    """How one checkpoint is written.

    Args:
        layout: of the file.
        routes: which ranks have pieces of the extents.
        runs: for each rank of the replica the extents that it writes.
        rounds: the largest number of extents that a rank writes.
        shift: rank r reads back the extents of rank r + shift.
    """

    layout: FileMap
    routes: Routes
    runs: Sequence[range]
    rounds: int
    shift: int


class Plans:
    """Makes the plan of each checkpoint. It keeps the last one while the tensors stay the same.

    All ranks make it and call each method.

    Args:
        group: the ranks that write.
        replica: the ranks that hold the state together.
    """

    def __init__(self, group: Group, replica: Group) -> None:
        self.group, self.replica = group, replica
        self._contents: Contents | None = None
        self._plan: WritePlan | None = None
        self._places: list[int] = []  # the numbers of the replica's ranks in the group
        self._shift = 0

    def forget(self) -> None:
        """Forget the last plan. All ranks do if any of them has other tensors, parts or owners."""
        self._contents = self._plan = None

    def of(self, held: Mapping[str, LocalTensor], state: bytes) -> WritePlan:
        """Plan a checkpoint. Collective.

        Args:
            held: this rank's parts, by their tensors' names.
            state: all values that are not tensors, as JSON.

        Raises:
            CheckpointError: the ranks of a replica do not own all of a tensor together, or a
                tensor's dtype has no name in the format, or there are too many tensors.
            UserError: the ranks do not have the same tensors or state.
        """
        group, replica = self.group, self.replica
        if not self._places:
            self._places = replica.gathered(group.rank)
            self._shift = reader_shift(group.gathered(group.host))
        contents, known = self._contents, self._plan
        self.forget()  # so that an error leaves no plan
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
    """The rank of the replica that writes each extent, (extents,), or NOBODY."""
    found = np.full(extents, NOBODY, np.int64)
    for rank, run in enumerate(runs):
        found[run.start : run.stop] = rank
    return found


def reader_shift(hosts: Sequence[str]) -> int:
    """The shift with which rank r reads back the extents of rank r + shift.

    As many ranks as possible read back what another host has written, because a host may read its
    own bytes from its memory.

    Args:
        hosts: the host of each rank.
    """
    size = len(hosts)

    def crossing(shift: int) -> int:
        return sum(hosts[r] != hosts[(r + shift) % size] for r in range(size))

    first = next((r for r in range(size) if hosts[r] != hosts[0]), 1)
    return max((max(1, size // 2), first, 1), key=crossing)
