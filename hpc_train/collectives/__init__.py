"""Collective operations on tensors: one protocol, several ways to carry it out."""

from hpc_train.collectives.protocol import Collectives, connect

__all__ = ["Collectives", "connect"]
