"""Pickles a data set for another process, with copies of its tensors."""

from __future__ import annotations

import io
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch


class _Copying(ForkingPickler):
    """torch's pickler puts all tensors into memory that processes share: each would write to it.

    So this one copies them, and each memory once, however many tensors lie in it. What a data set
    itself has put into shared memory remains shared with a process that is being started.
    """

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.is_cuda and get_spawning_popen() is None:
            return _on_device, (
                part.detach().cpu(),
                part.device,
            )  # torch shares it with others only
        if not isinstance(part, torch.UntypedStorage) or part.device.type != "cpu":
            return NotImplemented
        if part.is_shared() and get_spawning_popen() is not None:
            return NotImplemented
        whole = torch.empty(0, dtype=torch.uint8).set_(part)
        return _storage, (whole.numpy(),)


def _storage(content: np.ndarray) -> torch.UntypedStorage:
    return torch.from_numpy(content).clone().untyped_storage()


def _on_device(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    return content.to(device)


def pickled(part: Any) -> bytes:
    """An object's pickle. `pickle.loads` makes a copy of it."""
    buffer = io.BytesIO()
    _Copying(buffer, 5).dump(part)
    return buffer.getvalue()
