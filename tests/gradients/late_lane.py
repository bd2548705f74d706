"""Stands in for the stream of a GPU: copies end as late as they may, and nobody may look before."""

from __future__ import annotations

import threading
from collections import deque

import torch

from hpc_train.gradients.staging import CopyLane

PATIENCE = 3  # questions after which a copy has ended


class LateMark:
    def __init__(self, lane, source, into):
        self.lane, self.source, self.into = lane, source, into
        self.asked, self.done = 0, False

    def query(self):
        self.asked += 1
        if self.asked > PATIENCE:
            self.synchronize()
        return self.done

    def synchronize(self):
        with self.lane.lock:
            while not self.done:
                self.lane.end_next()


class LateLane(CopyLane):
    """A lane between memory of the CPU. What is copied to has no numbers until the copy ends."""

    def __init__(self, device):
        super().__init__(device)
        self.lock = threading.RLock()
        self.begun = deque()
        self.followed = 0

    def copy(self, source, into, *, after_device=True):
        assert source.shape == into.shape
        assert source.dtype == into.dtype
        assert source.is_contiguous()
        assert into.is_contiguous()
        with self.lock:
            if into.is_floating_point():
                into.fill_(torch.nan)
            mark = LateMark(self, source, into)
            self.begun.append(mark)
        return mark

    def end_next(self):
        mark = self.begun.popleft()
        mark.into.copy_(mark.source)
        mark.done = True

    def follow(self, mark):
        self.followed += 1
        mark.synchronize()

    def finish(self):
        with self.lock:
            while self.begun:
                self.end_next()
