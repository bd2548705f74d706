"""Divides an optimizer's state over ranks with its parameters, and puts it together again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.collectives import Collectives
from hpc_train.errors import size_text
from hpc_train.gradients.buckets import Slab
from hpc_train.gradients.state import moments, unite_state
from hpc_train.host.memory import free_bytes
from hpc_train.mpi.levels import Levels

logger = logging.getLogger(__name__)

USABLE = 0.9  # the share of a node's free memory that the whole states of its ranks may take

Slabs = Mapping[Parameter, Slab]
"""For each piece that this rank owns, which is a parameter of its own, its slab."""


def divide_state(optimizer: Optimizer, slabs: Slabs, shared: Collection[Parameter]) -> None:
    """Give the pieces their rows of what the optimizer has for whole parameters.

    Args:
        optimizer: it has the pieces already; its state is changed.
        slabs: this rank's pieces.
        shared: all parameters that are divided.
    """
    for piece, slab in slabs.items():
        if piece.requires_grad and (whole := optimizer.state.get(slab.parameter)):
            optimizer.state[piece] = {n: _part(value, slab, piece) for n, value in whole.items()}
    for parameter in shared:
        optimizer.state.pop(parameter, None)


def _part(value: Any, slab: Slab, piece: Parameter) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    part = slab.rows_of(value) if value.shape == slab.parameter.shape else value
    beside = value.device == slab.parameter.device
    return part.to(piece.device if beside else value.device, copy=True).contiguous()


def gather_state(
    optimizer: Optimizer, slabs: Slabs, shared: Collection[Parameter], shards: Collectives
) -> None:
    """Give all ranks the state of whole parameters. Collective.

    Args:
        optimizer: it has the whole parameters again; its state is that of the pieces.
        slabs: this rank's pieces.
        shared: all parameters that are divided.
        shards: the ranks whose pieces together are these parameters.
    """
    for piece, slab in slabs.items():
        if own := optimizer.state.pop(piece, None):
            optimizer.state[slab.parameter] = {n: _whole(v, slab, piece) for n, v in own.items()}
    unite_state(optimizer, shards.group)  # each rank gets zeros for the rows that it has not
    for some in moments(optimizer).values():
        for parameter, moment in some.items():
            if parameter in shared:
                shards.sum_(moment)


def _whole(value: Any, slab: Slab, piece: Parameter) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or value.shape != piece.shape:
        return value
    whole = torch.zeros(slab.parameter.shape, dtype=value.dtype, device=value.device)
    slab.rows_of(whole).copy_(value)
    return whole


def has_room(
    optimizer: Optimizer,
    slabs: Slabs,
    nbytes: int,
    shards: Collectives,
    levels: Levels,
    *,
    staged: bool,
) -> bool:
    """Whether all nodes have memory for whole parameters and states on each rank. Collective.

    Rank 0 warns if not.

    Args:
        optimizer: as for `gather_state`.
        slabs: as for `gather_state`.
        nbytes: what else each rank is about to take.
        shards: as for `gather_state`.
        levels: all ranks.
        staged: whether the parameters are on GPUs, which may have no memory for the state.
    """
    own = (value for piece in slabs for value in optimizer.state.get(piece, {}).values())
    state = shards.group.total(sum(value.nbytes for value in own if isinstance(value, Tensor)))
    lacking = state and (staged or levels.node.total(state + nbytes) > USABLE * free_bytes())
    if not levels.whole.largest(int(lacking)):
        return True
    if levels.whole.rank == 0:
        each = f"a node has no memory for the {size_text(state)} of each rank"
        logger.warning(
            "memory.zero: the optimizer's state (such as the averages of AdamW) is dropped, "
            "because %s; a checkpoint has it",
            "it was kept in the memory of the node, and parameters are on GPUs" if staged else each,
        )
    return False
