"""Ranks of a ring in one process: their coroutines advance in turn, the last to arrive computes."""

from __future__ import annotations

import torch

from hpc_train.mpi.group import Group

LARGEST = 1 << 30  # in place of a tag: ranks start these in one order


class Meeting:
    """Where the ranks' calls of one operation meet."""

    def __init__(self, size):
        self.arrived = [None] * size
        self.done = False


class FakeCross:
    """One rank's `Cross`; `ranks(n)` makes those of all."""

    def __init__(self, rank, size, meetings):
        self.group = Group(rank, size)
        self.bytes_sent = 0
        self.meetings = meetings
        self.calls = {}

    def sum_(self, flat, tag):
        self.bytes_sent += sum(c.nbytes for c in self._sent(flat))
        yield from self._meet("sum", tag, flat, _add_up)

    def sum_16_(self, flat, dtype, residual, tag):
        self.bytes_sent += sum(2 * len(chunk) for chunk in self._sent(flat))
        compute = lambda pairs: _add_up_rounded(pairs, dtype)  # noqa: E731
        yield from self._meet("sum_16", tag, (flat, residual), compute)

    def gather(self, payload, tag):
        self.bytes_sent += (self.group.size - 1) * payload.nbytes
        meeting = yield from self._meet("gather", tag, payload.clone(), lambda payloads: None)
        return torch.stack(meeting.arrived)

    def largest(self, number):
        assert number == number, "MPI's maximum is of no use with NaN"
        meeting = yield from self._meet("largest", LARGEST, number, lambda numbers: None)
        return max(meeting.arrived)

    def _sent(self, flat):
        """What a ring sends: every chunk twice but for the one it owns and the one before."""
        n, rank = self.group.size, self.group.rank
        chunks = flat.tensor_split(n)
        skipped = [(rank + 1) % n, (rank + 2) % n]
        return [c for skip in skipped for i, c in enumerate(chunks) if i != skip]

    def _meet(self, what, tag, given, compute):
        assert tag >= 0
        self.calls[tag] = self.calls.get(tag, 0) + 1
        key = (tag, self.calls[tag])
        meeting = self.meetings.setdefault(key, (what, Meeting(self.group.size)))
        assert meeting[0] == what, "the ranks make different calls"
        meeting = meeting[1]
        meeting.arrived[self.group.rank] = given
        if all(each is not None for each in meeting.arrived):
            compute(meeting.arrived)
            meeting.done = True
        yield lambda: meeting.done
        return meeting


def _add_up(flats):
    total = sum(flats[1:], flats[0].clone())
    for flat in flats:
        flat.copy_(total)


def _add_up_rounded(pairs, dtype):
    """As round a ring: each chunk's sum is rounded before every hop, by the rank that sends it."""
    n = len(pairs)
    flats = [flat.tensor_split(n) for flat, _ in pairs]
    losses = [residual.tensor_split(n) for _, residual in pairs]
    for chunk in range(n):
        arrived = torch.zeros_like(flats[0][chunk])
        for hop in range(n):
            rank = (chunk + hop) % n
            total = flats[rank][chunk] + arrived
            arrived = total.to(dtype).to(total.dtype)
            losses[rank][chunk].add_(total - arrived)
        for rank in range(n):
            flats[rank][chunk].copy_(arrived)


def ranks(size):
    """The ranks of one ring."""
    meetings = {}
    return [FakeCross(rank, size, meetings) for rank in range(size)]


def together(*coroutines):
    """Advance the coroutines of all ranks until all have ended; returns their results."""
    results, waits = {}, {i: lambda: True for i in range(len(coroutines))}
    while waits:
        ready = [i for i, wait in waits.items() if wait()]
        assert ready, f"ranks {sorted(waits)} wait for ever"
        for i in ready:
            try:
                waits[i] = next(coroutines[i])
            except StopIteration as end:
                results[i] = end.value
                del waits[i]
    return [results[i] for i in range(len(coroutines))]
