"""Checkpoints: named tensors in one file that all ranks write, and back.

For a run:
store       what a run calls: save, poll, finish, resume
policy      how checkpoints are saved, and which are kept
known       their scores, and whether their numbers are finite
content     all that is saved and restored
state       a model's tensors by name, and what else is saved
optimizer_state  the slots of its optimizer by name, saved and made again
holdings    the tensors that a rank holds, looked at before each save
buffers     the same buffers on all replicas; a warning where they differed
checks      whether it can be saved, is the same on all replicas, and is finite
claim       one writer for a directory
owner       who that is, whether it has ended, and when another may follow
catalogue   names of files, which there are, and a list of them: without torch

For one file:
fileformat  where each byte of it lies: pure, without torch
parts       bytes of an extent in a rank's tensors
routes      which rank writes which extents, and who has what of them
exchange    moves the bytes of extents between ranks
save        writes a file with all ranks
background  the phases of a save, carried out at once or while training goes on
engines     ways to write: POSIX, MPI-IO; stripes on Lustre
reading     header and extents of a file, verified: one rank, without torch
restore     fills the tensors of all ranks from a file
weight_sources  the files that weights are in
weights     weights alone: start from them
merged      the weights with adapters merged into them
adapters    writes the adapters alone, as PEFT has them
export      write them for other programs
inspection  verify one file, compare two
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.policy import SavePolicy as SavePolicy
    from hpc_train.checkpoint.state import TrainingState as TrainingState
    from hpc_train.checkpoint.store import Checkpoints as Checkpoints

_HOMES = {"Checkpoints": "store", "SavePolicy": "policy", "TrainingState": "state"}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Most of them load torch, which a list of files does without.
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
