from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.nn import Parameter

from hpc_train.gradients import filling as filling_module
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.filling import STEADY, Filling
from hpc_train.gradients.progress import Progress, ThreadProgress


class SlowSums:
    """Sums whose beginning lets other threads run, as a call of MPI does."""

    early = True

    def __init__(self, buckets):
        self.flats = [torch.zeros(b.numel, device=b.device) for b in buckets]
        self.begun = []

    def begin(self, number):
        self.begun.append(number)
        time.sleep(0.05)
        yield from ()

    def close(self):
        pass


@pytest.mark.parametrize("kind", [Progress, ThreadProgress])
def test_gradients_of_two_threads_begin_each_sum_once(kind):
    """As in a backward pass with parameters on two GPUs, or on one and the processor.

    Autograd calls the hooks of one pass from a thread for each device.
    """
    parameters = [Parameter(torch.ones(4)) for _ in range(2)]
    buckets = [Bucket([parameter]) for parameter in parameters]
    sums, progress, start = SlowSums(buckets), kind(), threading.Barrier(2)
    filling = Filling(buckets, sums, progress, 1.0, lambda _: None, lambda: None)

    def compute(slot):
        start.wait()
        time.sleep(0.01 * slot.home)  # the second one comes while the first one's sum begins
        slot.parameter.grad = torch.ones(4)
        filling._moved(slot, slot.parameter)

    for _ in range(STEADY + 1):
        sums.begun.clear()
        filling.begin_step()
        for parameter in parameters:
            parameter.grad = None
        threads = [threading.Thread(target=compute, args=(slot,)) for slot in filling.slots]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begun = filling.begun
        filling.learn(restless=False)
        filling.over = True
    progress.close()
    assert (sums.begun, begun) == ([0, 1], 2)


class Stream:
    """Stands in for a stream of a GPU."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.mark.parametrize("same", [False, True])
def test_a_sum_begins_after_all_streams_that_have_filled_its_bucket(monkeypatch, same):
    """Autograd calls a hook on the stream on which the parameter's forward pass was computed."""
    first = Stream()
    last = first if same else Stream()
    here = []
    monkeypatch.setattr(filling_module, "stream_now", lambda tensor: here[-1])
    parameters = [Parameter(torch.ones(4, device="meta")) for _ in range(3)]
    sums = SlowSums([Bucket(parameters)])
    filling = Filling([Bucket(parameters)], sums, Progress(), 1.0, lambda _: None, lambda: None)
    for _ in range(STEADY + 1):
        filling.begin_step()
        for slot, stream in zip(filling.slots, (first, last, last), strict=True):
            here.append(stream)
            slot.parameter.grad = torch.ones(4, device="meta")
            filling._moved(slot, slot.parameter)
        filling.learn(restless=False)
        filling.over = True
    assert sums.begun == [0]
    assert (first.waited_for, last.waited_for) == ([], [] if same else [first])
