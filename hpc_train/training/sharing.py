"""Decides for `memory.zero: auto` whether ranks share parameters and divide optimizer state."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpc_train.config import GradientsSection, MemorySection, RunConfig
from hpc_train.config.spread import Zero
from hpc_train.errors import ConfigError
from hpc_train.gradients.buckets import has_slabs
from hpc_train.gradients.options import Engine, Scope
from hpc_train.gradients.overlap import check_movable, overlap
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.grid import ParallelGrid

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What ranks share and divide: the keys of section memory, with auto decided.

    Args:
        zero, scope: as in `MemorySection`.
        staged, only_modules_read: as in `AveragingOptions`.
    """

    zero: Zero = 0
    scope: Scope = "all"
    staged: bool = False
    only_modules_read: bool = False


@dataclass(frozen=True, kw_only=True)
class SharingFacts:
    """The facts, besides the configuration, that decide the choice. All ranks have the same.

    Args:
        engine: the engine that averages the gradients.
        device: the type of the device that holds the parameters.
        replicas: number of replicas of the model in the job.
        together: the smallest number of replicas of one part of the model on any node.
        sparse: whether a layer makes sparse gradients.
        overlap: which tensors of the model lie in the memory of a parameter, as text.
        private: see `decide`.
    """

    engine: Engine = "mpi"
    device: str = "cpu"
    replicas: int = 2
    together: int = 2
    sparse: bool = False
    overlap: str = ""
    private: bool = True


def choose_zero(gradients: GradientsSection, facts: SharingFacts) -> tuple[Zero, str]:
    """The value that auto takes, and the reason as text. Pure."""
    for obstacle, why in (
        (facts.replicas == 1, "the job has one replica of the model"),
        (facts.together == 1, "a node has one replica of the model"),
        (facts.device != "cpu", f"parameters lie on {facts.device}"),
        (facts.engine in ("horovod", "nccl"), f"gradients.engine is {facts.engine}"),
        (gradients.two_level == "off", "gradients.two_level is off"),
        (gradients.compression != "none", f"gradients.compression is {gradients.compression}"),
        (gradients.average_every > 1, f"gradients.average_every is {gradients.average_every}"),
        (facts.sparse, "the model makes sparse gradients"),
        (facts.overlap, facts.overlap),
        (
            not facts.private,
            "code outside hpc_train may write to parameters, and would write to shared ones once "
            "per rank",
        ),
    ):
        if obstacle:
            return 0, why
    return 1, "ranks share parameters and the optimizer's work"


def on_host(device: torch.device) -> bool:
    """Whether parameters of a device are in the host's memory."""
    return device.type == "cpu"


def check_device(memory: MemorySection, device: torch.device) -> None:
    """Check that the state can be where section memory asks for, if parameters are on a device.

    Raises:
        ConfigError: it cannot.
    """
    if on_host(device) and memory.staged:
        raise ConfigError(
            "memory.offload is optimizer, but ranks compute on processors, so the optimizer's "
            "state is in the host's memory already",
            "leave memory.offload out; a Trainer also takes the path of a folder on the nodes' own "
            "disks",
        )
    if on_host(device) or memory.staged:
        return
    if memory.zero in (1, 2):
        raise ConfigError(
            f"memory.zero is {memory.zero}, but parameters are on {device}, and ranks divide the "
            "optimizer in the memory of their node",
            "set memory.offload optimizer as well, or leave memory.zero out",
        )
    if memory.zero == 3:
        raise ConfigError(
            f"memory.zero is 3, but parameters are on {device}",
            "set memory.offload optimizer and memory.zero 2, or leave memory.zero out",
        )
    if memory.offload != "none":
        raise ConfigError(
            f"memory.offload is {memory.offload}, but parameters are on {device}: the optimizer's "
            "state would have to cross to the host and back in each step",
            "set memory.offload optimizer, which also takes the step on the host",
        )


def check_private(memory: MemorySection, what: str, *, private: bool) -> None:
    """Check that nobody reads parameters that another node has.

    Args:
        memory: the section of the configuration.
        what: the class that has an argument `private_parameters`.
        private: its value.

    Raises:
        ConfigError: memory.zero is 3, and parameters are not private.
    """
    if memory.zero == 3 and not private:
        raise ConfigError(
            "memory.zero is 3, and code outside hpc_train may read parameters while other nodes "
            "have them",
            f"give {what} private_parameters=True if only the model's modules read them, or set "
            "memory.zero 2",
        )


def decide(
    config: RunConfig,
    grid: ParallelGrid,
    engine: Engine,
    device: torch.device,
    model: nn.Module,
    *,
    private: bool,
) -> Sharing:
    """What the ranks of this job share, the same on all ranks. Rank 0 logs auto's choice.

    Args:
        config: the configuration; the sections memory and gradients are used.
        grid: the places of the ranks.
        engine: the engine from `averaging.start_engine`.
        device: the device that will hold the parameters.
        model: the whole model, before a layout is applied to it.
        private: see `private_parameters` of `TrainingTask`.

    Raises:
        ConfigError: memory.zero is 3, and parameters are not private; or as `check_device`.
        UserError: as `check_movable`, if the value of memory.zero is given.
    """
    memory = config.memory
    check_private(memory, "TrainingTask", private=private)
    movable = [
        p for p in model.parameters() if has_slabs(p) and (p.requires_grad or memory.zero == 3)
    ]
    with agreed(grid.world):
        check_device(memory, device)
        if memory.stage:
            check_movable(model, movable)
    if memory.staged and grid.world.rank == 0:
        logger.info(
            "memory.offload optimizer: the ranks of a node divide the optimizer's state and step "
            "in its memory (memory.zero %d)",
            memory.stage,
        )
    given = Sharing(
        zero=memory.stage, scope=memory.scope, staged=memory.staged, only_modules_read=private
    )
    if memory.staged or memory.zero != "auto":
        return given
    facts = SharingFacts(
        engine=engine,
        device=device.type,
        replicas=grid.dp,
        together=min(map(len, grid.placement.groups()["data_node"])),
        sparse=any(getattr(module, "sparse", False) is True for module in model.modules()),
        overlap=(overlap(model, movable) or [""])[0],
        private=private,
    )
    zero, why = choose_zero(config.gradients, facts)
    if grid.world.rank == 0:
        logger.info("memory.zero auto takes %d: %s", zero, why)
    return replace(given, zero=zero)
