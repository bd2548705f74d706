"""Put a layout on a model: its stages, its tensor-parallel layers, what each rank then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import Parameter

from hpc_train.collectives import Collectives, connect
from hpc_train.errors import UserError
from hpc_train.models.dropout import SampleDropout
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.placement import Coordinate
from hpc_train.parallel.gradients import LayoutGradients
from hpc_train.parallel.linear import Deferred
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.parallel.stages import Stages, runs_of, stage_names
from hpc_train.parallel.tensor import parallelize
from hpc_train.sharding import ParameterSlice, SliceSpec

if TYPE_CHECKING:
    from hpc_train.parallel.schedule import Name


@dataclass(frozen=True)
class ParallelModel:
    """A model that a layout was put on, for one rank.

    Args:
        pipeline: runs micro-batches through it.
        gradients: completes its gradients.
        shards: what this rank holds, by the names of the local module's parameters and buffers.
        collectives: what the model computes with, closed with this.
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
    chunks: int = 1,
    sequence_parallel: bool = False,
    overlap: bool = False,
) -> ParallelModel:
    """Leave of a model, in place, what this rank computes. Collective over all ranks.

    All ranks build the same whole model. For tp above 1 it has an attribute `tensor_plan`
    (see `parallelize`), for pp above 1 an attribute `stages` (see `stages.stage_names`).

    Args:
        model: as above.
        grid: the ranks' places and groups.
        device: where the model will lie.
        schedule: the pipeline's.
        chunks: virtual stages of each pipeline rank.
        sequence_parallel: whether tokens are divided between the tensor-parallel layers.
        overlap: whether tensor-parallel sums go on in a thread while this rank computes; it needs a
            core to itself.

    Raises:
        UserError: the model lacks what the layout needs, or its sizes do not fit.
    """
    everyone = connect(grid.world)
    for tensor in [*model.parameters(), *model.buffers()]:
        everyone.broadcast_(tensor.data)
    whole = _Whole.of(model)
    tensor_group = connect(grid.tensor, device, overlap=overlap)
    if grid.tp > 1 and not getattr(model, "tensor_plan", None):
        raise UserError(
            f"parallel.tp is {grid.tp}, but {type(model).__name__} has no attribute `tensor_plan`",
            "say there how its layers are shared: docs/how-to/parallel.md",
        )
    names = stage_names(model) if grid.pp > 1 else []
    chunks = chunks if grid.pp > 1 else 1
    runs = runs_of(model, names, grid.pp, chunks) if names else []
    deferred = Deferred() if names and schedule == "zero_bubble" else None
    cut = sequence_parallel and grid.tp > 1
    specs = parallelize(
        model,
        getattr(model, "tensor_plan", {}) if grid.tp > 1 else {},
        tensor_group,
        sequence_parallel=cut,
        deferred=deferred,
    )
    stages = Stages(model, names, runs[grid.coordinate.pp]) if names else None
    tied = whole.tied(names, runs)
    shards = whole.shards(model, specs, grid.coordinate, names)
    parameters = dict(model.named_parameters())
    over = {
        "tensor": tensor_group,
        "embedding": connect(grid.embedding, device),
        "model": connect(grid.model, device),
    }
    gradients = LayoutGradients(
        [p for name, p in parameters.items() if cut and name not in specs],
        [p for name, p in parameters.items() if shards[name].name in tied],
        [p for name, p in parameters.items() if shards[name].owned],
        **over,
    )
    name = "1f1b" if schedule == "zero_bubble" and not names else schedule
    dropouts = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    pipeline = Pipeline(grid.pipe, device, name, chunks, stages, deferred, dropouts)
    return ParallelModel(pipeline, gradients, shards, [everyone, *over.values()])


@dataclass(frozen=True)
class _Whole:
    """The names and shapes of the whole model, before anything is taken from it.

    Args:
        first: the name that stands for a tensor, for each of the names that it has.
        shapes: by any name.
        parameters: those of the names that are not buffers'.
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
            UserError: other ranks share one.
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
        """What this rank has.

        For what all of a tensor group have its first rank speaks, and the first stage for buffers
        that lie in no stage.
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
