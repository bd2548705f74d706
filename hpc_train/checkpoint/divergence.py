"""Find a rank whose tensors have drifted from those of the ranks that should hold the same.

A processor that computes wrongly now and then, or memory that loses a bit, shows nowhere: training
goes on, and the next checkpoint keeps what is wrong. Replicas hold the same bits, so comparing
hashes finds it. A sample of each checkpoint is compared; after enough of them all has been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from hpc_train.checkpoint.fileformat import hash_of
from hpc_train.checkpoint.parts import as_bytes
from hpc_train.errors import DivergenceError
from hpc_train.mpi.agreement import settle
from hpc_train.mpi.group import Group

SAMPLE = 16 << 20  # bytes of a rank in a checkpoint: a few milliseconds


def sample(sizes: Mapping[str, int], turn: int) -> list[tuple[str, int, int]]:
    """Which bytes are compared in a turn: name, first byte, byte behind the last.

    The turns go round through all bytes, SAMPLE at a time.
    """
    everything = sum(sizes.values())
    if not everything:
        return []
    begin = turn * SAMPLE % everything
    end = begin + min(SAMPLE, everything)
    found = []
    for lap in (0, everything):  # a turn that passes the end goes on at the begin
        position = lap
        for name, size in sizes.items():
            first, last = max(begin, position), min(end, position + size)
            if first < last:
                found.append((name, first - position, last - position))
            position += size
    return found


def compare(tensors: Mapping[str, Tensor], alike: Group, group: Group, turn: int) -> None:
    """Compare a sample between ranks that should hold the same bits. Collective over both groups.

    Args:
        tensors: contiguous, in the same order on all ranks of `alike`. Ranks with other tensors
            are left to those who compare plans.
        alike: these ranks.
        group: all ranks of the job, each in one such group.
        turn: which sample.

    Raises:
        DivergenceError: on all ranks, naming rank, host and tensor; if one rank of several differs
            from all others, it is that one.
    """
    pieces = sample({name: tensor.nbytes for name, tensor in tensors.items()}, turn)
    hashes = [hash_of(as_bytes(tensors[name])[b:e].cpu().numpy()) for name, b, e in pieces]
    mine = (hash_of(b"".join(hashes)), group.rank, alike.host, hash_of(repr(pieces).encode()))
    found = alike.gathered(mine)
    failure: DivergenceError | None = None
    if len({whole for whole, *_ in found}) > len({names for *_, names in found}) == 1:
        by_rank = alike.gathered(hashes)
        for (name, _, _), values in zip(pieces, zip(*by_rank, strict=True), strict=True):
            if len({*values}) > 1:
                failure = _error(name, values, [(rank, host) for _, rank, host, _ in found])
                break
    settle(group, failure)


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
