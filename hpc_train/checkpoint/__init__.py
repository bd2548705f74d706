"""Checkpoints: named tensors in one file that all ranks write, and back.

store                   what a run calls: save, poll, finish, resume
state, more             names of a model's and its optimizer's tensors; what else is saved
directory, retention    names of files; which are kept
fileformat              where each byte of a file lies: pure
parts, exchange         bytes of extents in a rank's tensors; moved between ranks
save, phases, snapshot  write a file; on the spot or in the background
engines, striping       ways to write; stripes on Lustre
restore, extents        read a file, verified
divergence              replicas that should hold the same, and do not
weights, tools          start from other files; list, verify, diff, export
"""

from hpc_train.checkpoint.store import Checkpoints

__all__ = ["Checkpoints"]
