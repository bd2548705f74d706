"""A small model whose weights tell the step, in files of several extents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.background import carry_out
from hpc_train.checkpoint.engines import CheckpointEngine, WriteEngine
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.checkpoint.parts import Parts
from hpc_train.checkpoint.policy import SavePolicy
from hpc_train.checkpoint.routes import Plans
from hpc_train.checkpoint.save import saving
from hpc_train.checkpoint.state import TrainingState
from hpc_train.collectives import connect
from hpc_train.mpi.group import Group

SMALL = {"EXTENT_BYTES": 1024, "FILE_ALIGNMENT": 4096}
"""What `fileformat` has to say for that."""


def store(
    directory: Path, group: Group, engine: CheckpointEngine = "posix", seed: int = 0, keep: int = 2
) -> Checkpoints:
    """Of the model, the same on all ranks."""
    torch.manual_seed(seed)
    model = nn.Linear(40, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpoints(
        directory,
        connect(group),
        TrainingState(model, optimizer),
        SavePolicy(engine=engine, keep=keep),
    )


def change(made: Checkpoints, step: int) -> None:
    """The weights after a step."""
    with torch.no_grad():
        for parameter in made.state.model.parameters():
            parameter.fill_(step)


def save_tensors(
    path: Path,
    held: Mapping[str, LocalTensor],
    state: bytes,
    group: Group,
    engine: WriteEngine = "posix",
    replica: Group | None = None,
) -> None:
    """Write a checkpoint of named tensors; by default each rank holds all of them. Collective."""
    plans = Plans(group, replica or Group())
    carry_out(saving(path, Parts(held), state, plans, engine=engine))


def save(made: Checkpoints, step: int, *, background: bool = False) -> None:
    """The checkpoint of a step; what comes after it does not enter it. Collective."""
    change(made, step)
    made.save(step, background=background)
    if background:
        made.state.optimizer.step()  # which waits until the weights may be changed
        change(made, -1)
        made.finish()


def found(directory: Path, group: Group) -> int:
    """The step that is found again, complete. Collective."""
    made = store(directory, group, seed=1)
    step = made.resume()
    assert all(bool((parameter == step).all()) for parameter in made.state.model.parameters())
    return step
