"""Checkpoints: named tensors in one file that all ranks write, and back.

store                   what a run calls: save, poll, finish, resume
content, holdings       what is saved and restored; what of it a rank holds
state, more             names of a model's and its optimizer's tensors; what else is saved
savable                 what a checkpoint cannot hold, before training begins
extra                   what modules keep beside tensors
directory, retention    names of files; which are kept
claim                   one writer for a directory
fileformat              where each byte of a file lies, and names of types: pure
parts                   bytes of extents in a rank's tensors
plan, routes, exchange  who writes what; who has what of an extent; bytes moved between ranks
save, phases, snapshot  write a file; on the spot or in the background
engines, striping       ways to write; stripes on Lustre
headers                 read a file's header; the checkpoints of a run: without torch
restore, extents        read a file, verified
divergence, finite      replicas that should hold the same, and do not; NaN and infinities
weights, tools          start from other files; verify, diff, export
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.store import Checkpoints as Checkpoints

__all__ = ["Checkpoints"]


def __getattr__(name: str) -> Any:
    if name != "Checkpoints":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_train.checkpoint.store import Checkpoints  # torch, which a list of files does without

    return Checkpoints
