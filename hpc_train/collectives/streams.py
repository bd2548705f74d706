"""The streams of GPUs, in whose order a GPU does its work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stream_now(tensor: Tensor) -> Any:
    """The stream of a tensor's GPU that this thread's work goes to; None for a processor."""
    if tensor.device.type not in ("cuda", "xpu"):
        return None
    return getattr(torch, tensor.device.type).current_stream(tensor.device)
