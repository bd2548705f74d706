"""Deals the GPUs of a node out to its ranks, so that each rank is near to its own."""

from __future__ import annotations

from collections.abc import Sequence


def nearest(distances: Sequence[Sequence[int]]) -> list[int]:
    """The GPU of each rank: of all ways to deal them out, one whose sum of distances is least.

    Of these ways, it is the one that is closest to rank 0 with GPU 0, rank 1 with GPU 1 and so on.
    If there are more ranks than GPUs, each GPU has as many as if they were dealt out in turn.

    Args:
        distances: for each rank, its distances to all GPUs.
    """
    ranks, gpus = len(distances), len(distances[0])
    in_turn = [rank % gpus for rank in range(ranks)]
    if all(row[gpu] == min(row) for row, gpu in zip(distances, in_turn, strict=True)):
        return in_turn
    seats = range(max(ranks, gpus))  # a seat s is a place on GPU s % gpus
    heavy = len(seats) ** 3  # more than any sum of the squares below
    cost = [
        [heavy * row[seat % gpus] + (rank - seat) ** 2 for seat in seats]
        for rank, row in enumerate(distances)
    ]
    sitting: dict[int, int] = {}  # the rank on each taken seat
    for rank in range(ranks):
        # A rank may take the seat of another one, which takes that of a third one, until one finds
        # a free seat. Bellman and Ford's method finds the cheapest of these chains.
        price, before = list(cost[rank]), dict[int, int]()
        changed = set(sitting)
        while changed:
            seat = changed.pop()
            other = sitting[seat]
            for to in seats:
                offer = price[seat] - cost[other][seat] + cost[other][to]
                if offer < price[to]:
                    price[to], before[to] = offer, seat
                    if to in sitting:
                        changed.add(to)
        free = min((seat for seat in seats if seat not in sitting), key=price.__getitem__)
        while free in before:
            sitting[free] = sitting[before[free]]
            free = before[free]
        sitting[free] = rank
    taken = {rank: seat % gpus for seat, rank in sitting.items()}
    return [taken[rank] for rank in range(ranks)]
