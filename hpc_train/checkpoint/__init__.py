"""Checkpoints: named tensors in one file that all ranks write, and back."""

from hpc_train.checkpoint.store import Checkpoints

__all__ = ["Checkpoints"]
