"""How the Trainer averages gradients, and what of it belongs into a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_train.checkpoint.fileformat import Entry, LocalTensor
from hpc_train.checkpoint.state import ExtraState, TrainingState
from hpc_train.collectives import Collectives, connect
from hpc_train.collectives.coroutines import drive
from hpc_train.config import GradientsSection, RunConfig
from hpc_train.gradients import GradientAverager, LossScaler, average_gradients
from hpc_train.gradients.autotune import on_all_nodes
from hpc_train.gradients.averager import best_engine
from hpc_train.gradients.buckets import Slab
from hpc_train.gradients.compression import Compressor
from hpc_train.gradients.mpi import BucketAverager
from hpc_train.gradients.options import AveragingOptions, Engine
from hpc_train.gradients.sums import LevelSums
from hpc_train.gradients.zero import ShardedAverager
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import start_horovod
from hpc_train.parallel.apply import ParallelModel
from hpc_train.parallel.batch_norm import average_statistics
from hpc_train.sharding import ParameterSlice, SliceSpec
from hpc_train.training.sharing import Zero

logger = logging.getLogger(__name__)

RESIDUAL = "residual."


def start_engine(config: RunConfig, grid: ParallelGrid, device: torch.device) -> Engine:
    """Choose who averages the gradients of parameters on this device, and start it. Collective."""
    gradients = config.gradients
    if grid.dp == 1 and grid.world.size > 1:
        return "mpi"  # one replica averages with nobody
    engine: Engine = gradients.engine
    if engine == "auto" and gradients.average_every == 1:
        engine = best_engine(device)
    if engine == "horovod":
        start_horovod(grid.world, grid.process_sets(), fusion_bytes=gradients.bucket_bytes)
    return engine


def options_of(section: GradientsSection, **more: Any) -> AveragingOptions:
    """The options of averaging, by the configuration; with those that it does not have."""
    return AveragingOptions(
        engine=section.engine,
        bucket_bytes=section.bucket_bytes,
        two_level=section.two_level,
        compression=section.compression,
        average_every=section.average_every,
        reduction=section.reduction,
        **more,
    )


def make_averager(
    config: RunConfig,
    model: nn.Module,
    optimizer: Optimizer,
    grid: ParallelGrid,
    layout: ParallelModel,
    engine: Engine,
    *,
    zero: Zero,
    cores: int,
) -> tuple[GradientAverager, Zero]:
    """The averager of a rank's replicas, and the `zero` that it has. Collective.

    Where auto has chosen to share parameters and a node has too little shared memory for it, no
    rank shares them.

    Args:
        config: sections gradients, memory and run.
        model: this rank's part.
        optimizer: of it.
        grid: where this rank stands.
        layout: what was put on the model.
        engine: from `start_engine`.
        zero: from `sharing.decide`.
        cores: of this rank.
    """
    levels = Levels.join(grid.data, grid.data_node, grid.data_cross)
    options = options_of(
        replace(config.gradients, engine=engine),
        whole=layout.gradients.completed,
        cores=cores,
        deterministic=config.run.deterministic,
    )

    def make(zero: Zero) -> GradientAverager:
        return average_gradients(model, optimizer, levels, replace(options, zero=zero))

    if config.memory.zero != "auto" or not zero:
        return make(zero), zero
    made, failure = on_all_nodes(grid.world, lambda: make(1))
    if made is not None:
        return made, 1
    if grid.world.rank == 0:
        logger.warning("%s; memory.zero auto takes 0", failure)
    return make(0), 0


class Statistics(ExtraState):
    """Running statistics that ranks take from their own samples become the same when one is saved.

    Args:
        model: this rank's part.
        alike: of the ranks that have the same part.
    """

    def __init__(self, model: nn.Module, alike: Collectives) -> None:
        self.model, self.alike = model, alike

    def unify(self) -> None:
        """Average them."""
        average_statistics(self.model, self.alike)


class AveragingState(Statistics):
    """Pieces of the optimizer's state, and what compression has not sent yet, by logical names.

    Args:
        averager: of the Trainer.
        model, alike: as for `Statistics`.
        shards: of the model's tensors.
        world: all ranks.
        scaler: of the loss: what is saved is without its scale.
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
        """Those that compress; other ones once the averager has taken new parameters."""
        sums = self.averager.sums if isinstance(self.averager, BucketAverager) else None
        return sums if isinstance(sums, LevelSums) and sums.compressor else None

    @property
    def compressor(self) -> Compressor | None:
        """Theirs."""
        return None if self.sums is None else self.sums.compressor

    @property
    def pieces(self) -> dict[Parameter, ParameterSlice]:
        """What the optimizer has in place of whole parameters."""
        if not isinstance(self.averager, ShardedAverager):
            return {}
        first = self.averager.levels.cross.rank == 0
        slabs = self.averager.slabs
        return {piece: self._shard(slab, first=first) for piece, slab in slabs.items()}

    def _shard(self, slab: Slab, *, first: bool) -> ParameterSlice:
        whole = self.shards[slab.parameter]
        spec = whole.spec.rows(slab.first, slab.last)
        return ParameterSlice(whole.name, spec, owned=whole.owned and first)

    def unify(self) -> None:
        """Average local steps and statistics; share evenly what compression has not sent."""
        super().unify()
        self.averager.settle()
        # Ranks that own no part of a bucket, and those of stages without any, compress nothing.
        self._steps = self.world.largest(self.compressor.steps if self.compressor else 0)
        if self.sums is not None and self.sums.cross is not None and self.compressor:
            totals = drive(self.compressor.unify(self.sums.cross))
            self._totals = {n: total / self._scale for n, total in totals.items()}

    def collect(self) -> dict[str, LocalTensor]:
        """What compression has not sent, summed over the nodes."""
        return self._held(self._totals)

    def expect(self, entries: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Memory for it, where the checkpoint has it."""
        self._totals = {}
        if self.sums is None or self.sums.cross is None:
            return {}
        for number, bucket in enumerate(self.sums.buckets):
            names = [RESIDUAL + self.shards[p].name for p in bucket.parameters]
            if any(name in entries for name in names):
                begin, end = self.sums.part(number)
                self._totals[number] = torch.zeros(end - begin, dtype=bucket.dtype)
        return {n: held for n, held in self._held(self._totals).items() if n in entries}

    def values(self) -> dict[str, Any]:
        """How many steps compression has seen."""
        return {"compressed_steps": self._steps} if self._steps else {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Share evenly what was not sent."""
        if self.sums is not None and self.compressor is not None and "compressed_steps" in values:
            totals = {number: total * self._scale for number, total in self._totals.items()}
            self.compressor.load(totals, self.sums.levels.nodes, values["compressed_steps"])

    @property
    def _scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def _held(self, totals: Mapping[int, Tensor]) -> dict[str, LocalTensor]:
        found = {}
        for number, total in totals.items():
            assert self.sums is not None
            begin, end = self.sums.part(number)
            first = self.sums.levels.cross.rank == 0
            for slab in self.sums.buckets[number].slabs(begin, end):
                shard = self._shard(slab, first=first)
                part = replace(slab, begin=slab.begin - begin).of(total)
                found[RESIDUAL + shard.name] = LocalTensor(part, shard.spec, shard.owned)
        return found


def training_state(
    config: RunConfig,
    zero: Zero,
    averager: GradientAverager,
    model: nn.Module,
    optimizer: Optimizer,
    layout: ParallelModel,
    grid: ParallelGrid,
    scaler: LossScaler | None,
) -> TrainingState:
    """What the Trainer's checkpoints save, and which rank holds and writes what.

    All ranks decide alike: also those of stages where nothing is trained, divided or compressed.
    """
    alike = connect(grid.data)
    state = AveragingState(averager, model, alike, layout.shards, grid.world, scaler)
    shards, replica = layout.shards, grid.model
    if zero or config.gradients.compression != "none":  # no replica has it all
        first = grid.coordinate.dp == 0
        shards = {n: replace(shard, owned=shard.owned and first) for n, shard in shards.items()}
        replica = grid.world
    return TrainingState(model, optimizer, scaler, shards, state.pieces, replica, alike, state)


def whole_training_state(
    averager: GradientAverager,
    model: nn.Module,
    optimizer: Optimizer,
    alike: Collectives,
    scaler: LossScaler | None,
    *,
    divided: bool,
) -> TrainingState:
    """As `training_state`, of a model that each rank has whole.

    Args:
        averager: of the loop.
        model: of the loop.
        optimizer: of the loop.
        alike: of all ranks.
        scaler: of the loop, if it has one.
        divided: whether ranks share what is saved by `memory.zero`, or have compression's rests.
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
    return replace(whole, shards=shards, replica=group, pieces=state.pieces)
