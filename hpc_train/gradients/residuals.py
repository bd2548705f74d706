"""Carries what compression has not sent yet into other buckets, when parameters come or go."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.collectives import connect
from hpc_train.gradients.sums import LevelSums


def carry_residuals(old: LevelSums, new: LevelSums) -> None:
    """Give new sums the residuals and the number of steps of those before them. Collective.

    Ranks of a node may have other parts of a parameter than before. So each old bucket's residual
    is put together on all of them, and each keeps what lies in its new parts. Residuals of
    parameters that are in no new bucket are dropped.

    Args:
        old: the sums before; they may be closed.
        new: the sums of the same ranks, for other buckets.
    """
    before, after = old.compressor, new.compressor
    if before is None or after is None:
        return
    node = connect(new.levels.node)
    there = node.group.largest_each([int(n in before.residuals) for n in range(len(old.buckets))])
    places = {p: (n, begin) for n, b in enumerate(new.buckets) for p, begin, _ in b.ranges()}
    found: dict[int, Tensor] = {}
    for number, bucket in enumerate(old.buckets):
        if not there[number]:
            continue
        whole = torch.zeros(bucket.numel, dtype=bucket.dtype)
        if number in before.residuals:
            begin, end = old.division.part(number)
            whole[begin:end] = before.residuals[number]
        if node.group.size > 1:
            node.sum_(whole)
        for parameter, begin, end in bucket.ranges():
            if parameter not in places:
                continue
            target, start = places[parameter]
            first, last = new.division.part(target)
            if first == last:
                continue
            part = found.setdefault(target, torch.zeros(last - first, dtype=bucket.dtype))
            low, high = max(start, first), min(start + end - begin, last)
            if low < high:
                part[low - first : high - first] = whole[begin:end][low - start : high - start]
    after.load(found, 1, new.levels.whole.largest(before.steps))
