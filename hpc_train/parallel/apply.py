"""Apply a layout to a model: cut it into stages, and its layers over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import Parameter

from hpc_train.collectives import Collectives, connect
from hpc_train.errors import UserError
from hpc_train.models.deferred import recipes_of
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.rms_norm import HeadNorm
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.placement import Coordinate
from hpc_train.parallel import recompute as recomputing
from hpc_train.parallel.gradients import LayoutGradients
from hpc_train.parallel.linear import Deferred, ParallelLinear
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.parallel.recompute import RecomputeBlocks
from hpc_train.parallel.runs import runs_of, stage_names
from hpc_train.parallel.stages import Stages
from hpc_train.parallel.tensor import parallelize
from hpc_train.sharding import ParameterSlice, SliceSpec

if TYPE_CHECKING:
    from hpc_train.parallel.schedule import Name


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model after a layout was applied to it.

    Args:
        pipeline: runs micro-batches through the model.
        gradients: completes the model's gradients.
        shards: the slice that this rank holds of each tensor, by the names that the local module's
            parameters and buffers have.
        collectives: the collectives that the model computes with. `close` closes them.
    """

    pipeline: Pipeline
    gradients: LayoutGradients
    shards: Mapping[str, ParameterSlice]
    collectives: Sequence[Collectives] = ()

    def close(self) -> None:
        """Release threads and communicators; the model can no longer be used. Collective.

        The grid's groups stay.
        """
        for each in self.collectives:
            each.close()


def apply(
    model: nn.Module,
    grid: ParallelGrid,
    device: torch.device,
    *,
    schedule: Name = "1f1b",
    virtual_stages: int = 1,
    sequence_parallel: bool = False,
    overlap: bool = False,
    recompute: RecomputeBlocks = "none",
) -> ParallelModel:
    """Reduce a model, in place, to the part that this rank computes. Collective over all ranks.

    All ranks build the same whole model; rank 0's weights are sent to the others. For tp above 1
    the model needs an attribute `tensor_plan` (see `parallelize`), for pp above 1 an attribute
    `stages` (see `stages.stage_names`).

    Args:
        model: the whole model.
        grid: the ranks' places and groups.
        device: the device that the model will be moved to.
        schedule: the pipeline's schedule.
        virtual_stages: number of virtual stages of each pipeline rank.
        sequence_parallel: whether tokens are divided between the tensor-parallel layers.
        overlap: whether a thread sums over tensor-parallel ranks while this rank computes. The
            thread needs a core of its own.
        recompute: which activations are recomputed: see `hpc_train.parallel.recompute`.

    Raises:
        UserError: the model lacks an attribute that the layout needs, or its sizes do not fit.
    """
    everyone = connect(grid.world)
    later = recipes_of(model)  # those parameters get their values when the layout is known
    filled = [p for name, p in model.named_parameters() if name not in later]
    # MPI cannot send sparse buffers: each rank keeps its own.
    dense = [buffer for buffer in model.buffers() if buffer.layout is torch.strided]
    for tensor in [*filled, *dense]:
        everyone.broadcast_(tensor.data)
    whole = _Whole.of(model)
    tensor_group = connect(grid.tensor, device, overlap=overlap, purpose="tensor-parallel")
    if grid.tp > 1 and not getattr(model, "tensor_plan", None):
        raise UserError(
            f"parallel.tp is {grid.tp}, but {type(model).__name__} has no attribute `tensor_plan`",
            "say there how its layers are shared: docs/how-to/parallel.md",
        )
    names = stage_names(model) if grid.pp > 1 else []
    virtual_stages = virtual_stages if grid.pp > 1 else 1
    runs = runs_of(model, names, grid.pp, virtual_stages) if names else []
    deferred = Deferred() if names and schedule == "zero_bubble" else None
    cut = sequence_parallel and grid.tp > 1
    specs = parallelize(
        model,
        getattr(model, "tensor_plan", {}) if grid.tp > 1 else {},
        tensor_group,
        sequence_parallel=cut,
        deferred=deferred,
    )
    recomputing.recompute(model, recompute)  # of the whole model, so that blocks are counted alike
    stages = Stages(model, names, runs[grid.coordinate.pp]) if names else None
    tied = whole.tied(names, runs)
    shards = whole.shards(model, specs, grid.coordinate, names)
    named = dict(model.named_parameters())
    over = {
        "tensor": tensor_group,
        "embedding": connect(grid.embedding, device, purpose="embedding"),
        "model": connect(grid.model, device),
    }
    partial = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, ParallelLinear | HeadNorm)
        for parameter in layer.partial
    }
    summed = [p for name, p in named.items() if id(p) in partial or (cut and name not in specs)]
    known = {*summed}
    held = {shards[name].name: parameter for name, parameter in named.items()}
    gradients = LayoutGradients(
        summed,
        # The last stage may have registered them in another order than the first.
        [held[name] for name in sorted(tied & held.keys())],
        [p for name, p in named.items() if shards[name].owned],
        {p: name for name, p in named.items() if p not in known and name not in specs},
        **over,
    )
    name = "1f1b" if schedule == "zero_bubble" and not names else schedule
    dropouts = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    pipeline = Pipeline(grid.pipe, device, name, virtual_stages, stages, deferred, dropouts)
    return ParallelModel(pipeline, gradients, shards, [everyone, *over.values()])


@dataclass(frozen=True)
class _Whole:
    """The names and shapes of the whole model's tensors, before the model is cut.

    A tensor that several modules share has several names.

    Args:
        first: maps each name of a tensor to the tensor's first name.
        shapes: maps each name of a tensor to its shape.
        parameters: the names that belong to parameters and not to buffers.
    """

    first: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    parameters: Set[str]

    @classmethod
    def of(cls, model: nn.Module) -> _Whole:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        named = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
        names: dict[int, str] = {}
        first = {name: names.setdefault(id(tensor), name) for name, tensor in named.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        return cls(first, shapes, parameters.keys())

    def tied(self, names: list[str], runs: list[list[range]]) -> set[str]:
        """First names of the parameters that the first and the last pipeline rank share.

        Raises:
            UserError: other pipeline ranks share a parameter.
        """
        home = {
            names[position]: rank
            for rank, mine in enumerate(runs)
            for run in mine
            for position in run
        }
        holders: dict[str, set[int]] = {}
        for name in self.parameters:
            ranks = {r for stage, r in home.items() if name.startswith(f"{stage}.")}
            holders.setdefault(self.first[name], set()).update(ranks)
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        for name, ranks in shared.items():
            if ranks != {0, len(runs) - 1}:
                raise UserError(
                    f"{name} is shared by pipeline ranks {sorted(ranks)}",
                    "only the first and the last may share parameters: use fewer ranks",
                )
        return set(shared)

    def shards(
        self,
        model: nn.Module,
        specs: Mapping[str, SliceSpec],
        place: Coordinate,
        stages: Sequence[str],
    ) -> dict[str, ParameterSlice]:
        """The slice that this rank holds of each tensor, and whether the rank owns it.

        In a replica each slice has one owner. A tensor group's first rank owns tensors that all
        ranks of the group hold. The first pipeline rank owns the buffers that lie in no stage.
        """
        found = {}
        local: list[tuple[str, torch.Tensor | Parameter]] = [
            *model.named_parameters(),
            *model.named_buffers(),
        ]
        for name, _ in local:
            spec = specs.get(name, SliceSpec.whole(self.shapes[name]))
            alone = place.pp == 0 or any(name.startswith(f"{stage}.") for stage in stages)
            speaks = name in specs or (place.tp == 0 and alone)
            found[name] = ParameterSlice(
                self.first[name], spec, speaks and self.first[name] == name
            )
        return found
