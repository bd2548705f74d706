from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.nn import Parameter

from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.filling import STEADY, Filling
from hpc_train.gradients.progress import Progress, ThreadProgress


class SlowSums:
    """Sums whose beginning lets other threads run, as a call of MPI does."""

    early = True

    def __init__(self, buckets):
        self.flats = [torch.zeros(bucket.numel) for bucket in buckets]
        self.begun = []

    def begin(self, number):
        self.begun.append(number)
        time.sleep(0.05)
        yield from ()

    def close(self):
        pass


@pytest.mark.parametrize("kind", [Progress, ThreadProgress])
def test_backward_passes_in_two_threads_begin_each_sum_once(kind):
    """As autograd does if parameters are on two GPUs, or on one and the processor."""
    parameters = [Parameter(torch.ones(4)) for _ in range(2)]
    buckets = [Bucket([parameter]) for parameter in parameters]
    sums, progress, start = SlowSums(buckets), kind(), threading.Barrier(2)
    filling = Filling(buckets, sums, progress, 1.0, lambda _: None, lambda: None)

    def compute(parameter):
        start.wait()
        parameter.sum().backward()

    for _ in range(STEADY + 1):
        sums.begun.clear()
        filling.begin_step()
        for parameter in parameters:
            parameter.grad = None
        threads = [threading.Thread(target=compute, args=(p,)) for p in parameters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        begun = filling.begun
        filling.learn(restless=False)
        filling.over = True
    progress.close()
    assert (sums.begun, begun) == ([0, 1], 2)
