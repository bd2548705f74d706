from __future__ import annotations

import math
import threading
from collections import Counter

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import DataError
from hpc_train.staging.relay import WINDOW, Relay, neighbours

SIZES = [7] * (3 * WINDOW) + [3]  # a chain for these
FEW = [1000]  # a tree for this


@given(st.integers(1, 300), st.integers(0, 300))
def test_each_node_gets_the_stream_once_and_the_first_one_sends_it_once(nodes, chunks):
    places = [neighbours(rank, nodes, chunks) for rank in range(nodes)]
    sends = [(rank, other) for rank, place in enumerate(places) for other in place.after]
    assert sorted(other for _, other in sends) == [*range(1, nodes)]
    assert all(places[other].before == rank < other for rank, other in sends)
    counts = Counter(rank for rank, _ in sends)
    assert counts[0] <= 1
    assert max(counts.values(), default=0) <= (1 if nodes <= chunks else 2)


@given(st.integers(2, 5000))
def test_the_tree_is_as_deep_as_the_logarithm(nodes):
    depths = [0]
    for rank in range(1, nodes):
        before = neighbours(rank, nodes, 0).before
        depths.append(depths[before] + 1)
    assert max(depths) <= nodes.bit_length()


def steps(nodes: int, chunks: int, chosen_for: int) -> int:
    """Steps until all nodes have all chunks, if a link carries one chunk in a step.

    Args:
        chosen_for: the number of chunks that the chain or the tree is chosen by.
    """
    comes = {0: [0] * chunks}  # the step at whose end a node has each chunk
    for rank in range(nodes):  # a node comes before those that it sends to
        link = 0
        after = neighbours(rank, nodes, chosen_for).after
        for other in after:
            comes[other] = [0] * chunks
        for number in range(chunks):
            for other in after:
                link = max(link, comes[rank][number]) + 1
                comes[other][number] = link
    return max(times[-1] for times in comes.values())


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 33, 128])
@pytest.mark.parametrize("chunks", [1, 2, 10, 60, 140, 400])
def test_the_chain_is_taken_where_it_is_faster(nodes, chunks):
    chain, tree = steps(nodes, chunks, nodes), steps(nodes, chunks, 0)
    assert chain == chunks + nodes - 2
    assert tree <= 2 * (chunks + math.log2(nodes))
    taken = steps(nodes, chunks, chunks)
    assert taken == (chain if nodes <= chunks else tree)
    assert taken <= min(chain, tree) + 2 * math.log2(nodes)


def content(number: int, size: int) -> bytes:
    return bytes([number % 251]) * size


class Node:
    """Reads what `content` says, and keeps what is written."""

    def __init__(self, group, sizes, fails_at: dict[tuple[str, int], int] | None = None) -> None:
        self.group, self.sizes, self.fails_at = group, sizes, fails_at or {}
        self.written: dict[int, bytes] = {}
        self.lock = threading.Lock()

    def _check(self, what, number):
        if self.fails_at.get((what, self.group.rank)) == number:
            raise DataError(f"{what} {number}")

    def read(self, number, memory):
        assert self.group.rank == 0
        self._check("read", number)
        memory[:] = content(number, self.sizes[number])

    def write(self, number, memory):
        self._check("write", number)
        with self.lock:
            self.written[number] = bytes(memory)

    def run(self):
        relay = Relay(self.group, self.sizes, self.read, self.write)
        return relay, relay.run()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", [SIZES, FEW, []], ids=["chain", "tree", "nothing"])
def test_every_node_gets_every_chunk(group, sizes):
    node = Node(group, sizes)
    relay, got = node.run()
    whole = {number: content(number, size) for number, size in enumerate(sizes)}
    assert node.written == whole
    assert got == xxhash.xxh3_128(b"".join(whole.values())).hexdigest()
    assert relay.complete
    assert relay.error is None


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["chain", "tree"])
def test_a_node_that_cannot_write_passes_on_all_the_same(group, sizes):
    last, bad = len(sizes) - 1, group.size // 2
    node = Node(group, sizes, {("write", bad): last // 2})
    relay, _ = node.run()
    assert relay.complete
    if group.rank == bad:
        assert str(relay.error) == f"write {last // 2}"
        assert last // 2 not in node.written
    else:
        assert relay.error is None
        assert sorted(node.written) == [*range(last + 1)]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", [SIZES, FEW], ids=["chain", "tree"])
def test_where_the_first_node_cannot_read_on_all_end(group, sizes):
    bad = len(sizes) // 2
    node = Node(group, sizes, {("read", 0): bad})
    relay, _ = node.run()
    assert not relay.complete
    assert sorted(node.written) == [*range(bad)]
    assert (str(relay.error) == f"read {bad}") if group.rank == 0 else relay.error is None
