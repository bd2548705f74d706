"""Measure in a second which way of multiplying float32 matrices is faster on this machine."""

from __future__ import annotations

import statistics
import time

import torch

from hpc_train.host.processor import Way
from hpc_train.models import linear
from hpc_train.models.linear import Linear

HIDDEN = 384  # width of a small GPT
ROWS = {"light": 128, "heavy": 1024}  # number of tokens at once
TRIAL_SECONDS = 0.3  # time spent on each of these loads
FEWEST = 3  # least number of measurements


def onednn_speed() -> dict[str, float]:
    """The speed of a linear layer with oneDNN, divided by its speed with torch's own products.

    Forward and backward pass are measured on one thread, for each load in ROWS.

    Raises:
        ConfigError: oneDNN does not work here.
    """
    threads, way = torch.get_num_threads(), linear.used()
    torch.set_num_threads(1)
    try:
        return {load: round(_speed(rows), 2) for load, rows in ROWS.items()}
    finally:
        torch.set_num_threads(threads)
        linear.use(way)


def _speed(rows: int) -> float:
    layer = Linear(HIDDEN, 4 * HIDDEN)
    x = torch.randn(rows, HIDDEN, requires_grad=True)
    gradient = torch.randn(rows, 4 * HIDDEN)
    ways: tuple[Way, Way] = ("onednn", "torch")
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    until = time.perf_counter() + TRIAL_SECONDS
    while time.perf_counter() < until or len(seconds["torch"]) <= FEWEST:
        for way in ways:  # in turn, so that the machine's drift falls on both
            linear.use(way)
            begin = time.process_time()  # others may use this core, too
            torch.autograd.grad(layer(x), (x, *layer.parameters()), gradient)
            seconds[way].append(time.process_time() - begin)
    onednn, torchs = (statistics.median(seconds[way][1:]) for way in ways)  # the first warms up
    return torchs / onednn
