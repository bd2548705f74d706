"""Measures how many operations per second a rank computes at most."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hpc_train.models.linear import product

PEAK_SECONDS = 0.2  # of a measurement, about
PRODUCTS = 8  # number of products that fit into it, at the least
SMALLEST, LARGEST = 256, 8192  # rows and columns of the matrices


def peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = PEAK_SECONDS) -> float:
    """Floating-point operations per second of products of two square matrices.

    The matrices are as large as they can be for eight products in the given time, at most 8192 x
    8192, with random numbers. The fastest product counts, because other programs may disturb some.
    Products are computed as in linear layers, by all threads of this rank. Call it on all ranks at
    once, as ranks slow each other down.

    Args:
        device: the device that this rank computes on.
        dtype: the type of the matrices.
        seconds: how long to measure.

    Raises:
        RuntimeError: the device cannot multiply such matrices, or has no memory for them.
    """
    size = SMALLEST
    with torch.no_grad():
        one, other = _matrices(size, device, dtype)
        taken = _shortest(one, other)  # the first product starts threads, and loads libraries
        until = time.perf_counter() + seconds
        while size < LARGEST and 8 * taken * PRODUCTS < until - time.perf_counter():
            size *= 2
            one, other = _matrices(size, device, dtype)
            taken = _shortest(one, other)
        every = [taken]
        while time.perf_counter() < until:
            every.append(_seconds(one, other))
    return 2.0 * size**3 / min(every)


def _matrices(size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)  # leaves the generator of the training alone
    one, other = (
        torch.rand(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    return one, other


def _shortest(one: Tensor, other: Tensor) -> float:
    """The shorter time of two products. A GPU loads code for their size when it first needs it."""
    return min(_seconds(one, other), _seconds(one, other))


def _seconds(one: Tensor, other: Tensor) -> float:
    wait: Callable[[], None] = (
        (lambda: None) if one.is_cpu else getattr(torch, one.device.type).synchronize
    )
    wait()
    begin = time.perf_counter()
    product(one, other)
    wait()
    return time.perf_counter() - begin
