"""Bytes and times of operations, of one rank and of all."""

from __future__ import annotations

import time

import pytest

from hpc_train.mpi.traffic import Traffic, totals


def test_operations_under_way_at_once_count_their_time_once():
    operation = Traffic().of("sums", "inside")
    begin = time.perf_counter()
    with operation, operation:
        time.sleep(0.01)
    assert 0.01 <= operation.seconds <= time.perf_counter() - begin


def test_what_threads_count_is_added_and_nothing_is_told_of_what_moved_nothing():
    traffic, thread = Traffic(), Traffic()
    traffic.parts.append(thread)
    traffic.of("sums", "inside").nbytes += 3
    thread.of("sums", "inside").nbytes += 4
    traffic.of("gathers", "across")
    assert traffic.counted() == [("sums", "inside", 7, 0.0)]
    traffic.clear()
    assert traffic.counted() == []


def test_links_belong_to_hosts_and_memory_to_ranks():
    one, other = [("sums", "across", 100, 2.0)], [("gathers", "inside", 30, 1.0)]
    found = totals([one + other, one, one, []], ["a", "a", "b", "b"])
    assert [(each.name, each.nbytes) for each in found] == [("sums", 300), ("gathers", 30)]
    assert [each.seconds for each in found] == [2.0, 1.0]
    assert [each.bandwidth for each in found] == pytest.approx([300 / 2 / 2.0, 30.0])
