"""Find a rank whose tensors have drifted from those of the ranks that should hold the same.

A processor that computes wrongly now and then, or memory that loses a bit, shows nowhere: training
goes on, and the next checkpoint keeps what is wrong. Replicas hold the same bits, so comparing
hashes finds it. A sample of each checkpoint is compared; after enough of them all has been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from hpc_train.checkpoint.fileformat import hash_of
from hpc_train.checkpoint.parts import Parts
from hpc_train.errors import DivergenceError
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

COMPARED_BYTES = 16 << 20  # bytes of a rank in a checkpoint: a few milliseconds


def sample(sizes: Mapping[str, int], turn: int) -> list[tuple[str, int, int]]:
    """Which bytes are compared in a turn: name, first byte, byte behind the last.

    The turns go round through all bytes, SAMPLE at a time.
    """
    names, edges = [*sizes], np.cumsum([0, *sizes.values()])
    everything = int(edges[-1])
    if not everything:
        return []
    begin = turn * COMPARED_BYTES % everything
    end = begin + min(COMPARED_BYTES, everything)
    found = []
    # A turn that passes the end goes on at the start.
    for first, last in ((begin, min(end, everything)), (0, end - everything)):
        place = int(np.searchsorted(edges, first, side="right")) - 1
        while first < last:
            stop = min(last, int(edges[place + 1]))
            low = int(edges[place])
            if first < stop:
                found.append((names[place], first - low, stop - low))
            first, place = stop, place + 1
    return found


def compare(parts: Parts, sizes: Mapping[str, int], alike: Group, group: Group, turn: int) -> None:
    """Compare a sample between ranks that should hold the same bits. Collective over both groups.

    Args:
        parts: what this rank holds.
        sizes: bytes of those that are compared, in the same order on all ranks of `alike`. Ranks
            with other tensors are left to those who compare plans.
        alike: these ranks.
        group: all ranks of the job, each in one such group.
        turn: which sample.

    Raises:
        DivergenceError: on all ranks, naming rank, host and tensor; if one rank of several differs
            from all others, it is that one.
    """
    failure: DivergenceError | None = None
    if alike.size > 1:
        pieces = sample(sizes, turn)
        hashed = xxhash.xxh3_128()
        for name, begin, end in pieces:
            hashed.update(parts.on_host(name, begin, end).data)
        names = hash_of(repr(pieces).encode())
        if not alike.same(hashed.digest() + names, "a sample of what replicas hold"):
            failure = _found(parts, pieces, names, alike, group)
    settle(group, failure)


def _found(
    parts: Parts, pieces: Sequence[tuple[str, int, int]], names: bytes, alike: Group, group: Group
) -> DivergenceError | None:
    """The first tensor that differs, unless the ranks have others. Collective over `alike`."""
    found = alike.gathered((group.rank, alike.host, names))
    if len({names for *_, names in found}) > 1:
        return None
    by_rank = alike.gathered([hash_of(parts.on_host(*piece)) for piece in pieces])
    for (name, _, _), values in zip(pieces, zip(*by_rank, strict=True), strict=True):
        if len({*values}) > 1:
            return _error(name, values, [(rank, host) for rank, host, _ in found])
    return None


def _error(name: str, values: tuple[bytes, ...], ranks: list[tuple[int, str]]) -> DivergenceError:
    (usual, count), *_ = Counter(values).most_common()
    if 2 * count > len(values):
        odd = [f"rank {r} ({h})" for (r, h), v in zip(ranks, values, strict=True) if v != usual]
        return DivergenceError(
            f"{name} of {', '.join(odd)} is not what the other {count} replicas have",
            "start again from the last checkpoint, without that host if it happens again",
        )
    both = ", ".join(f"rank {rank} ({host})" for rank, host in ranks)
    return DivergenceError(
        f"{name} differs between {both}, which should have the same",
        "start again from the last checkpoint; one of these hosts computes wrongly",
    )
