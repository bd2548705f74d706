"""Write one checkpoint with all ranks, so that it exists complete or not at all.

The ranks of a replica hold the whole state together, and every replica holds it. The ranks write a
run of extents each, brought together by their replica; every extent is read back by another rank
and compared with the hash of what was in memory (MPI-IO of some libraries reports success on a full
disk), then rank 0 writes the header, its length, and renames the file. Each phase ends in an
agreement: what fails on one rank is raised on all, and older checkpoints stay.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import torch

from hpc_train import files
from hpc_train.checkpoint import extents, fileformat, striping
from hpc_train.checkpoint.engines import PosixWriter, Way, Writer, open_writer
from hpc_train.checkpoint.exchange import Exchange, Scratch
from hpc_train.checkpoint.fileformat import HASHES, STATE, Form, Held, Layout
from hpc_train.checkpoint.parts import Bytes, Specs
from hpc_train.checkpoint.phases import Phases, agree
from hpc_train.checkpoint.snapshot import Snapshot
from hpc_train.errors import CheckpointError, UserError
from hpc_train.mpi.agreement import agreed, settle
from hpc_train.mpi.group import Group
from hpc_train.sharding import ShardSpec

T = TypeVar("T")
Extents = Iterable[tuple[int, Bytes] | None]


def saving(
    path: Path,
    held: Mapping[str, Held],
    state: bytes,
    group: Group,
    engine: Way = "posix",
    replica: Group | None = None,
    snapshot: Snapshot | None = None,
    *,
    verify: bool = True,
    token: str = "",
    check: Callable[[], None] = lambda: None,
) -> Phases[float]:
    """Write a checkpoint, in phases. Collective.

    Args:
        path: the file to make; one that exists is replaced when the new one is complete.
        held: this rank's parts of tensors, by the tensors' names.
        state: what is no tensor, as JSON, the same on all ranks.
        group: the ranks that write.
        engine: how they write.
        replica: the ranks that hold the state together; by default each rank holds all of it.
        snapshot: keeps this rank's extents while the tensors change; by default they must not
            change until the end.
        verify: whether all is read back and compared.
        token: of the one who writes; a part of the name of what is not complete.
        check: makes sure, on rank 0, that the directory is still ours; may raise a ClaimError.

    Returns:
        Seconds that the slowest rank took to write and sync.

    Raises:
        CheckpointError: it could not be written, or the ranks of a replica do not own all of a
            tensor together; nothing is left of it.
        ClaimError: as `check`.
        UserError: the ranks do not have the same tensors or state.
    """
    replica = replica or Group()
    mine = {name: (part.form, part.spec, part.owned) for name, part in held.items()}
    everyone = replica.gathered(mine)
    forms = {name: form for parts in everyone for name, (form, _, _) in parts.items()}
    specs = [{n: spec for n, (_, spec, owned) in parts.items() if owned} for parts in everyone]
    with agreed(group):
        _check_owned(forms, specs)
        layout = fileformat.plan(forms, state)
    _check_same(group, layout, state)
    whole = Held.whole(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    specs[0][STATE] = whole.spec
    exchange = Exchange({**held, STATE: whole}, specs, layout, replica)
    partial_path = path.with_name(f".{path.name}{token and f'.{token}'}.partial")
    explained = partial(_explained, path)
    runs = [owned(layout.extents, rank, group.size) for rank in replica.gathered(group.rank)]
    rounds = -(-layout.extents // group.size)
    if snapshot is not None:
        with agreed(group):
            snapshot.reserve(sum(layout.size(number) for number in runs[replica.rank]))
    with ExitStack() as cleared:
        with agreed(group), _explaining(path):
            if group.rank == 0:
                check()
                cleared.push(lambda failed, *_: _give_up(partial_path) if failed else None)
                _reserve(partial_path, layout.file_bytes)
        if snapshot is None:
            content: Extents = exchange.bring(runs, rounds, Scratch(), own=True)
        else:
            content = snapshot.of(exchange, runs, rounds)
        open_here = partial(open_writer, engine, partial_path, group)
        opened: Writer | None = None
        if engine == "mpiio_collective" and group.comm is not None:
            opened = yield from agree(group, explained(open_here))
        written = yield from agree(
            group, explained(partial(_write, content, layout, open_here, opened))
        )
        found = group.gathered((*written, group.host))
        table = b"".join(hashes for hashes, *_ in found)
        if verify:
            other = partner(group.rank, [host for *_, host in found])
            theirs = owned(layout.extents, other, group.size)
            yield from agree(
                group, explained(partial(_read_back, partial_path, layout, table, other, theirs))
            )
        commit = partial(_commit, partial_path, path, layout, table, group, check)
        yield from agree(group, explained(commit))
    return max(seconds for _, seconds, _ in found)


def _give_up(partial: Path) -> None:
    """Remove what was not completed."""
    with suppress(OSError):  # the error that is being raised says more
        files.remove(partial)


def together(replica: Group, mine: Mapping[str, T]) -> dict[str, T]:
    """What the ranks of a replica have by name, all together. Collective over the replica."""
    return {name: value for part in replica.gathered(mine) for name, value in part.items()}


def _check_owned(forms: Mapping[str, Form], specs: Iterable[Specs]) -> None:
    """Check that each element has one owner in a replica: no holes and nothing twice."""
    parts: dict[str, list[ShardSpec]] = defaultdict(list)
    for of_rank in specs:
        for name, spec in of_rank.items():
            parts[name].append(spec)
    for name, (_, shape) in forms.items():
        if len(parts[name]) == 1 and parts[name][0].local_shape == shape:
            continue
        elements = sum(math.prod(spec.local_shape) for spec in parts[name])
        what = f"{elements} elements of {name} {list(shape)}"
        if elements == math.prod(shape):
            if not any(one.meets(other) for one, other in combinations(parts[name], 2)):
                continue
            what = f"some elements of {name} {list(shape)} twice, and others not"
        raise CheckpointError(
            f"the ranks of a replica own {what}", "let each part be owned by one of them"
        )


def _check_same(group: Group, layout: Layout, state: bytes) -> None:
    """Check that all ranks plan the same file. Collective."""
    mine = (layout.description, state)
    hashes = [fileformat.hash_of(part) for part in mine]
    differs = hashes != group.from_first(lambda: hashes)
    if not group.largest(int(differs)):
        return
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


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"checkpoint {path} could not be written ({error.strerror or error})",
            f"{'free space or quota; ' if full else ''}older checkpoints are untouched",
        ) from error


def _explained(path: Path, work: Callable[[], T]) -> Callable[[], T]:
    def explained() -> T:
        with _explaining(path):
            return work()

    return explained


def _reserve(partial: Path, size: int) -> None:
    """Make the file at its full size, so that a lack of space shows before anything is written."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    files.remove(partial)  # left by a job that was killed
    made = striping.create(partial, size)
    flags = os.O_WRONLY | os.O_CLOEXEC | (0 if made else os.O_CREAT | os.O_EXCL)
    descriptor = files.call("create", os.open, partial, flags, 0o666)
    try:
        files.call("reserve", files.reserve, descriptor, 0, size)
    finally:
        files.call("close", os.close, descriptor)


def _write(
    content: Extents, layout: Layout, open_here: Callable[[], Writer], together: Writer | None
) -> tuple[bytes, float]:
    """Write this rank's extents; returns their hashes and the seconds it took.

    After an error it goes on to fetch extents, which the other ranks of the replica fetch as well,
    and to make the calls that other ranks wait in.

    Args:
        content: the extents.
        layout: of the file.
        open_here: opens the file, on a rank that has something to write.
        together: what all ranks have opened, for collective calls.
    """
    begin = time.monotonic()
    hashes: list[bytes] = []
    failures: list[Exception] = []
    writer = together
    for fetched in content:
        with _noted(failures):
            if fetched is not None and not failures:
                number, extent = fetched
                writer = writer or open_here()
                hashes.append(fileformat.hash_of(extent))
                writer.write_at(layout.data_start + layout.extent(number)[0], extent.data)
            elif together is not None:
                together.write_at(layout.data_start, b"")
    if writer is not None:
        with _noted(failures):
            if together is not None or not failures:
                writer.sync()
        with _noted(failures):
            writer.close()
    if failures:
        raise failures[0]
    return b"".join(hashes), time.monotonic() - begin


@contextmanager
def _noted(failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the first one is raised at the end
        failures.append(error)


def partner(rank: int, hosts: Sequence[str]) -> int:
    """Whose extents a rank reads back: of another host, for as many ranks as there can be.

    Args:
        rank: the one that reads.
        hosts: of all ranks.
    """
    size = len(hosts)

    def crossing(shift: int) -> int:
        return sum(hosts[r] != hosts[(r + shift) % size] for r in range(size))

    first = next((r for r in range(size) if hosts[r] != hosts[0]), 1)
    return (rank + max((max(1, size // 2), first, 1), key=crossing)) % size


def _read_back(
    partial: Path, layout: Layout, table: bytes, other: int, numbers: Iterable[int]
) -> None:
    """Compare what another rank wrote."""
    with files.opened(partial) as descriptor:
        for number in numbers:
            if not extents.read(descriptor, layout, number, table):
                begin, _ = layout.extent(number)
                raise OSError(f"what rank {other} wrote from byte {begin} on is not on the disk")


def _commit(
    partial: Path,
    path: Path,
    layout: Layout,
    table: bytes,
    group: Group,
    check: Callable[[], None],
) -> None:
    """Write hashes and header, then the header's length, then give the file its name."""
    if group.rank > 0:
        return
    check()
    head = fileformat.header(layout, table)
    length = len(head).to_bytes(8, "little")
    writer = PosixWriter(partial)
    try:
        writer.write_at(layout.data_start + layout.content_bytes, table)
        writer.write_at(8, head)
        writer.sync()
        writer.write_at(0, length)
        writer.sync()
    finally:
        writer.close()
    with files.opened(partial) as descriptor:
        written = files.read_at(descriptor, layout.data_start, 0)
        hashes = files.read_at(descriptor, len(table), layout.data_start + layout.content_bytes)
        if written != length + head or hashes != table:
            raise OSError("header or hashes are not on the disk as they were written")
    check()
    files.rename(partial, path)
