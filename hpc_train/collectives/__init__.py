"""Collective operations on tensors: one protocol and several implementations."""

from hpc_train.collectives.protocol import Collectives, connect

__all__ = ["Collectives", "connect"]
