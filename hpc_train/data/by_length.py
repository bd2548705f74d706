"""Micro-batches of samples of about one length, so that little of them is padding."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any

import numpy as np

from hpc_train.data.lengths import lengths_of
from hpc_train.data.loader import Part
from hpc_train.data.order import SampleOrder

STEPS_KEPT = 64  # the steps whose micro-batches are known: those that are read ahead, and more


def cut_by_length(lengths: np.ndarray, ranks: int, most: int) -> list[list[Part]]:
    """Cut samples into micro-batches, and deal these to ranks. A pure function.

    The samples are sorted by length and cut where a micro-batch would have more than `most` padded
    tokens, which are its number of samples times its longest one. Then the largest micro-batches
    are halved until there are as many for each rank. The rank with the fewest padded tokens so far
    gets the next largest one. If there are too few samples, some ranks get a sample again that does
    not count.

    Args:
        lengths: the samples' lengths, int64 (N,), N at least 1.
        ranks: data-parallel size.
        most: largest number of padded tokens. A longer sample is a micro-batch by itself.

    Returns:
        For each rank its micro-batches, the largest first. All ranks have as many.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered, groups, begin = lengths[order].tolist(), [], 0
    while begin < len(ordered):
        end = min(len(ordered), begin + max(1, most // max(1, ordered[begin])))
        groups.append((-ordered[begin] * (end - begin), begin, end))
        begin = end
    each = -(-len(groups) // ranks)
    halved = [group for group in groups if group[2] - group[1] > 1]
    groups = [group for group in groups if group[2] - group[1] == 1]
    heapq.heapify(halved)
    while halved and len(halved) + len(groups) < each * ranks:
        _, begin, end = heapq.heappop(halved)
        middle = (begin + end) // 2
        for a, b in ((begin, middle), (middle, end)):
            half = (-ordered[a] * (b - a), a, b)
            if b - a > 1:
                heapq.heappush(halved, half)
            else:
                groups.append(half)
    dealt: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for negative, begin, end in sorted([*halved, *groups]):
        load, rank = heapq.heappop(loads)
        places = tuple(sorted(order[begin:end].tolist()))
        dealt[rank].append(Part(places, longest=ordered[begin]))
        if len(dealt[rank]) < each:
            heapq.heappush(loads, (load - negative, rank))
    again = Part((int(order[-1]),), longest=ordered[-1], counted=False)
    return [[*parts, *[again] * (each - len(parts))] for parts in dealt]


class PartsByLength:
    """The micro-batches of a rank in each step, by the lengths of the step's samples.

    Args:
        dataset: has a method `lengths`.
        order: which samples belong to which step.
        most: largest number of padded tokens of a micro-batch.
        ranks: data-parallel size.
        rank: this rank's place among them.
    """

    def __init__(
        self, dataset: Any, order: SampleOrder, most: int, *, ranks: int, rank: int
    ) -> None:
        self.dataset, self.order = dataset, order
        self.most, self.ranks, self.rank = most, ranks, rank
        self._kept = lru_cache(STEPS_KEPT)(self._cut)

    def __call__(self, step: int) -> list[Part]:
        """This rank's micro-batches of a step.

        Raises:
            UserError: as `lengths_of`.
        """
        return self._kept(step)

    def _cut(self, step: int) -> list[Part]:
        indices = self.order.indices(step, 0, self.order.batch)
        lengths = lengths_of(self.dataset, indices)
        return cut_by_length(lengths, self.ranks, self.most)[self.rank]
