"""Sets up gradient averaging for the Trainer, and its state in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.checkpoint.fileformat import Entry, LocalTensor
from hpc_train.checkpoint.state import ExtraState, Streamed, TrainingState
from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.coroutines import drive
from hpc_train.config import GradientsSection, MemorySection, RunConfig
from hpc_train.errors import plural
from hpc_train.gradients import GradientAverager, LossScaler, average_gradients
from hpc_train.gradients.autotune import on_all_nodes
from hpc_train.gradients.averager import best_engine
from hpc_train.gradients.buckets import Slab
from hpc_train.gradients.compression import Compressor
from hpc_train.gradients.division import Reach
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.options import AveragingOptions, Engine
from hpc_train.gradients.staged_sums import in_host_memory
from hpc_train.gradients.sums import LevelSums
from hpc_train.gradients.zero import ShardedAverager
from hpc_train.models.deferred import is_unfilled
from hpc_train.models.initial import InitialValues, values_of
from hpc_train.mpi.agreement import agreed
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import start_horovod
from hpc_train.parallel.apply import ParallelModel
from hpc_train.parallel.batch_norm import average_statistics
from hpc_train.parallel.stages import gates_of
from hpc_train.sharding import ParameterSlice, SliceSpec
from hpc_train.training.offload import OffloadedState
from hpc_train.training.sharing import Sharing

logger = logging.getLogger(__name__)

RESIDUAL = "residual."
DROPPED = (
    "the checkpoint has parts of gradients that compression had not sent yet. They are dropped, "
    "because this start compresses nothing: to keep them, resume on several nodes with "
    "gradients.compression"
)
NOT_TRAINED = (
    "the checkpoint has parts of gradients that compression had not sent yet. Those of %s are "
    "dropped, because this start does not train them, or not yet"
)


def start_engine(config: RunConfig, grid: ParallelGrid, device: torch.device) -> Engine:
    """Choose the engine that averages gradients on this device, and start it. Collective."""
    gradients = config.gradients
    if grid.dp == 1 and grid.world.size > 1:
        return "mpi"  # there is one replica, so nothing is averaged
    engine: Engine = gradients.engine
    if engine == "auto" and gradients.average_every == 1:
        engine = "mpi" if config.memory.staged else best_engine(device)
    if engine == "horovod" and grid.world.size > 1:  # alone, nothing is averaged
        start_horovod(
            *(grid.world, grid.process_sets()),
            fusion_bytes=gradients.bucket_bytes,
            timeline=config.run.profile.span is not None,
        )
    return engine


def options_of(section: GradientsSection, **more: Any) -> AveragingOptions:
    """The averaging options of a configuration, and `more` options that it does not have.

    Its `hang_timeout` is 0, because loops and trainers watch over all their waits themselves.
    """
    return AveragingOptions(
        engine=section.engine,
        bucket_bytes=section.bucket_bytes,
        two_level=section.two_level,
        compression=section.compression,
        average_every=section.average_every,
        reduction=section.reduction,
        hang_timeout=0.0,
        **more,
    )


def make_averager(
    config: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    grid: ParallelGrid,
    layout: ParallelModel,
    engine: Engine,
    shared: Sharing,
    *,
    cores: int,
) -> tuple[GradientAverager, Sharing]:
    """Make the averager of this rank's gradients. Collective.

    If auto has chosen to share parameters, but a node has too little shared memory for it, no rank
    shares them.

    Args:
        config: the configuration; the sections gradients, memory and run are used.
        model: this rank's part of the model.
        optimizer: the optimizer of that part.
        grid: this rank's place and groups.
        layout: the layout that was applied to the model.
        engine: the engine from `start_engine`.
        shared: the value from `sharing.decide`.
        cores: number of this rank's processor cores.

    Returns:
        The averager, and what its ranks share.
    """
    levels = Levels.join(grid.data, grid.data_node, grid.data_cross)
    options = options_of(
        replace(config.gradients, engine=engine),
        whole=layout.gradients.completed,
        gates=gates_of(model) if shared.zero == 3 else (),
        values=_values(model, layout) if is_unfilled(model) else None,
        cores=cores,
        deterministic=config.run.deterministic,
    )

    def make(shared: Sharing) -> GradientAverager:
        return average_gradients(model, optimizer, levels, replace(options, **asdict(shared)))

    if config.memory.zero != "auto" or shared.staged or not shared.zero:
        return make(shared), shared
    made, failure = on_all_nodes(grid.world, lambda: make(shared))
    if made is not None:
        return made, shared
    if grid.world.rank == 0:
        logger.warning("%s; memory.zero auto takes 0", failure)
    return make(Sharing()), Sharing()


def _values(model: nn.Module, layout: ParallelModel) -> InitialValues:
    """The initial values of this rank's part of a model."""
    names = {name: shard.name for name, shard in layout.shards.items()}
    return values_of(model, names, {n: shard.spec for n, shard in layout.shards.items()})


def offload(memory: MemorySection, optimizer: Optimizer, group: Group) -> OffloadedState | None:
    """Move the optimizer's state to a disk, if `memory.offload` names a folder. Collective.

    Raises:
        UserError: the folder has no room for it.
    """
    if memory.offload == "none" or memory.staged:
        return None
    with agreed(group):
        return OffloadedState(optimizer, Path(memory.offload))


class Statistics(ExtraState):
    """Gives all ranks the same running statistics before a checkpoint is saved.

    Until then, layers that are not synchronized take them from the samples of their own rank.

    Args:
        model: this rank's part of the model.
        alike: the collectives of the ranks that have the same part.
    """

    def __init__(self, model: nn.Module, alike: Collectives) -> None:
        self.model, self.alike = model, alike

    def unify(self) -> None:
        """Average the running statistics."""
        average_statistics(self.model, self.alike)


class AveragingState(Statistics):
    """The state of averaging that a checkpoint holds, under names that no layout changes.

    It has the residuals, which are the parts of gradients that compression has not sent yet. Its
    `pieces` say which slices of the parameters this rank's optimizer has.

    Args:
        averager: the averager of this rank's gradients.
        model, alike: as for `Statistics`.
        shards: the slices that this rank holds of the model's tensors, by name.
        world: all ranks.
        scaler: the scaler of the loss, if it has one. Residuals are saved without its scale.
    """

    def __init__(
        self,
        averager: GradientAverager,
        model: nn.Module,
        alike: Collectives,
        shards: Mapping[str, ParameterSlice],
        world: Group,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(model, alike)
        self.averager, self.world, self.scaler = averager, world, scaler
        self.shards = {p: shards[name] for name, p in model.named_parameters()}
        self._totals: dict[int, Tensor] = {}
        self._steps = 0

    @property
    def sums(self) -> LevelSums | None:
        """The averager's sums if they compress, or None."""
        # Looked up each time: the averager makes other sums when it takes new parameters.
        if not isinstance(self.averager, BucketAverager):
            return None
        sums = in_host_memory(self.averager.sums)
        return sums if isinstance(sums, LevelSums) and sums.compressor else None

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of these sums, or None."""
        return None if self.sums is None else self.sums.compressor

    @property
    def pieces(self) -> dict[Parameter, ParameterSlice]:
        """The optimizer's parameters that stand for slices of the model's, each with its slice."""
        if not isinstance(self.averager, ShardedAverager):
            return {}
        # Unless the slabs are divided over all nodes, every node has each of them.
        everyone = Reach.JOB in self.averager.parameters.division.reach
        first = everyone or self.averager.levels.cross.rank == 0
        slabs = self.averager.parameters.slabs.items()
        return {p: self._shard(slab, first=first) for p, slab in slabs if p.requires_grad}

    @property
    def streamed(self) -> Streamed:
        """The parameters that are there only while the model computes (see `Streamed`)."""
        if not isinstance(self.averager, ShardedAverager):
            return {}
        found: dict[Parameter, tuple[ParameterSlice, Tensor] | None] = dict.fromkeys(
            p for p in self.averager.streamed if p.numel()
        )
        for piece, slab in self.averager.parameters.slabs.items():
            if slab.parameter in found:
                found[slab.parameter] = self._shard(slab, first=True), piece
        return found

    def _shard(self, slab: Slab, *, first: bool) -> ParameterSlice:
        """The slice that a slab is. Every node has it; the `first` one writes it."""
        whole = self.shards[slab.parameter]
        spec = whole.spec.rows(slab.first, slab.last)
        return ParameterSlice(whole.name, spec, owned=whole.owned and first)

    def unify(self) -> None:
        """Average local steps and statistics, and divide the residuals evenly over the nodes."""
        super().unify()
        self.averager.settle()
        # All ranks save the same number. A rank compresses nothing, and so counts nothing, if it
        # owns no part of a bucket or its stage has no buckets.
        self._steps = self.world.largest(self.compressor.steps if self.compressor else 0)
        if self.sums is not None and self.sums.cross is not None and self.compressor:
            totals = drive(self.compressor.unify(self.sums.cross))
            self._totals = {n: total / self._scale for n, total in totals.items()}

    def collect(self) -> dict[str, LocalTensor]:
        """The residuals, summed over the nodes."""
        return self._held(self._totals)

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for the residuals that the checkpoint has. Collective."""
        self._totals = {}
        saved = {name for name in entries if name.startswith(RESIDUAL)}
        compresses, sums = False, self.sums
        if sums is not None and sums.cross is not None:
            compresses = True
            for number, bucket in enumerate(sums.buckets):
                if any(RESIDUAL + self.shards[p].name in saved for p in bucket.parameters):
                    begin, end = sums.division.part(number)
                    self._totals[number] = torch.zeros(end - begin, dtype=bucket.dtype)
        held = {n: part for n, part in self._held(self._totals).items() if n in saved}
        if saved:
            # A rank whose stage has no buckets compresses nothing, though others do.
            used = self.world.largest(int(compresses))
            taken = self.world.united(dict.fromkeys(held, True))
            lost = len(saved) - len(taken)
            if lost and self.world.rank == 0:
                told = NOT_TRAINED % plural(lost, "parameter") if used else DROPPED
                logger.warning(told)
        return held

    def values(self) -> dict[str, Any]:
        """The number of steps that compression has seen."""
        return {"compressed_steps": self._steps} if self._steps else {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Give each node an equal share of the residuals, and forget gathered parameters."""
        if isinstance(self.averager, ShardedAverager):
            self.averager.forget()
        if self.sums is not None and self.compressor is not None and "compressed_steps" in values:
            totals = {number: total * self._scale for number, total in self._totals.items()}
            self.compressor.load(totals, self.sums.levels.nodes, values["compressed_steps"])

    @property
    def _scale(self) -> float:
        """The present loss scale; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def _held(self, totals: Mapping[int, Tensor]) -> dict[str, LocalTensor]:
        """Cut residuals, given by bucket number, into tensors of a checkpoint by name."""
        found = {}
        for number, total in totals.items():
            assert self.sums is not None
            begin, end = self.sums.division.part(number)
            first = self.sums.levels.cross.rank == 0
            for slab in self.sums.buckets[number].slabs(begin, end):
                shard = self._shard(slab, first=first)
                part = replace(slab, begin=slab.begin - begin).of(total)
                found[RESIDUAL + shard.name] = LocalTensor(part, shard.spec, shard.owned)
        return found


def training_state(
    config: RunConfig,
    shared: Sharing,
    averager: GradientAverager,
    model: nn.Module,
    optimizer: Optimizer,
    layout: ParallelModel,
    grid: ParallelGrid,
    scaler: LossScaler | None,
) -> TrainingState:
    """The state that the Trainer's checkpoints save, and the parts that this rank has and writes.

    The arguments that decide it are the same on all ranks. So all ranks decide alike, even those of
    stages where nothing is trained, divided or compressed.
    """
    alike = connect(grid.data)
    state = AveragingState(averager, model, alike, layout.shards, grid.world, scaler)
    shards, replica = layout.shards, grid.model
    if shared.zero or config.gradients.compression != "none":  # no replica has all of the state
        first = grid.coordinate.dp == 0
        shards = {n: replace(shard, owned=shard.owned and first) for n, shard in shards.items()}
        replica = grid.world
    return TrainingState(
        model, optimizer, scaler, shards, state.pieces, replica, alike, state, state.streamed
    )


def whole_training_state(
    averager: GradientAverager,
    model: nn.Module,
    optimizer: Optimizer,
    alike: Collectives,
    scaler: LossScaler | None,
    *,
    divided: bool,
) -> TrainingState:
    """The state that a loop's checkpoints save. Each rank has the whole model.

    Args:
        averager: the loop's averager.
        model: the loop's model.
        optimizer: the loop's optimizer.
        alike: the collectives of all ranks.
        scaler: the loop's loss scaler, if it has one.
        divided: whether each rank has only a part of the state, because of `memory.zero` or of
            compression's residuals.
    """
    group = alike.group
    named = {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}
    shards = {
        name: ParameterSlice(name, SliceSpec.whole(tuple(tensor.shape)))
        for name, tensor in named.items()
        if isinstance(tensor, Tensor)
    }
    state = AveragingState(averager, model, alike, shards, group, scaler)
    whole = TrainingState(model, optimizer, scaler, extra=state)
    if not divided:
        return whole
    first = group.rank == 0
    shards = {name: replace(shard, owned=first) for name, shard in shards.items()}
    return replace(
        whole, shards=shards, replica=group, pieces=state.pieces, streamed=state.streamed
    )
