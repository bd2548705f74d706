"""Flat buckets: large contiguous buffers that the averaged gradients are views of.

A model has hundreds of gradients, and a collective call costs its latency each time. Gradients
that lie side by side in a few buffers are averaged in a few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Bucket:
    """One buffer and the parameters whose gradients it holds.

    Args:
        flat: the buffer, one dimension, of the parameters' dtype and device.
        views: for each parameter, its part of the buffer in the parameter's shape.
    """

    flat: Tensor
    views: dict[Parameter, Tensor]

    @classmethod
    def of(cls, parameters: Sequence[Parameter]) -> Bucket:
        """Allocate a bucket for parameters of one dtype and device."""
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        pieces = zip(parameters, torch.split(flat, sizes), strict=True)
        return cls(flat, {parameter: piece.view(parameter.shape) for parameter, piece in pieces})


def make_buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Distribute parameters over buckets in reverse order, about that of the backward pass.

    Args:
        parameters: those that require a gradient; a bucket holds one dtype and device only.
        bucket_bytes: a bucket is closed before it would hold more; a larger parameter has its own.
    """
    buckets: list[Bucket] = []
    pending: list[Parameter] = []
    for parameter in reversed(parameters):
        if pending and not _fits(pending, parameter, bucket_bytes):
            buckets.append(Bucket.of(pending))
            pending = []
        pending.append(parameter)
    return [*buckets, Bucket.of(pending)] if pending else buckets


def _fits(pending: Sequence[Parameter], parameter: Parameter, bucket_bytes: int) -> bool:
    alike = (parameter.dtype, parameter.device) == (pending[0].dtype, pending[0].device)
    return alike and sum(p.nbytes for p in pending) + parameter.nbytes <= bucket_bytes
