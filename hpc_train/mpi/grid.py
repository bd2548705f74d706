"""The groups of ranks under data x tensor x pipeline parallelism."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.mpi.group import Group
from hpc_train.mpi.placement import Coordinate, Placement, Ranks, place
from hpc_train.mpi.topology import Topology

logger = logging.getLogger(__name__)

GroupCache = dict[frozenset[Ranks], Group]


@dataclass(frozen=True, eq=False)
class ParallelGrid:
    """This rank's group along each axis of the layout.

    Axes that have the same groups of ranks in the same order on all ranks share one `Group`, which
    may be `world`. A group of one rank has no communicator.

    Args:
        placement: the places of all ranks.
        coordinate: this rank's place.
        world: all ranks of the job.
        data: ranks of the same stage and part of each layer; this one's number is `coordinate.dp`.
        tensor: ranks of the same replica and stage; this one's number is `coordinate.tp`.
        pipe: ranks of the same replica and part of each layer; this one's number is
            `coordinate.pp`.
        model: all ranks of this replica; this one's number is `coordinate.pp * tp + coordinate.tp`.
        embedding: the ranks of `pipe` with the first and the last stage, which share tied
            embeddings. On the stages between them, and if pp is 1, it is this rank alone.
        data_node: the ranks of `data` on this node.
        data_cross: the ranks of `data` on different nodes that have the same number in their
            `data_node` as this one.
    """

    placement: Placement
    coordinate: Coordinate
    world: Group
    data: Group
    tensor: Group
    pipe: Group
    model: Group
    embedding: Group
    data_node: Group
    data_cross: Group

    @classmethod
    def build(
        cls,
        world: Group,
        topology: Topology,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
    ) -> ParallelGrid:
        """Place the ranks and make their groups, by at most one split per axis. Collective.

        Args:
            world: all ranks of the job.
            topology: where these ranks run.
            dp: data-parallel size; by default the number of ranks / (tp * pp).
            tp: tensor-parallel size; rank 0 warns if such groups lie across nodes.
            pp: pipeline-parallel size.

        Raises:
            ConfigError: the product of the sizes is not the number of ranks; raised on all ranks.
        """
        placement = place(topology, dp, tp, pp)
        if world.rank == 0 and (warning := placement.warning()):
            logger.warning(warning)
        made: GroupCache = {frozenset(): Group(waiting=world.waiting)}
        made[_several([tuple(range(world.size))])] = world  # for an axis that spans the job
        with world.waiting("the groups of the layout"):
            groups = {
                axis: _join(world, groups, made) for axis, groups in placement.groups().items()
            }
        return cls(placement, placement.coordinate(world.rank), world, **groups)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.placement.dp

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.placement.tp

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.placement.pp

    def process_sets(self) -> list[list[int]]:
        """World ranks of all data, tensor and embedding groups of the job, for Horovod.

        Each set comes once, in ascending order. Sets of one rank and the set of all ranks are left
        out. All ranks get the same list.
        """
        groups = self.placement.groups()
        axes = [*groups["data"], *groups["tensor"], *groups["embedding"]]
        sets = {tuple(sorted(group)) for group in axes if 1 < len(group) < self.world.size}
        return [list(ranks) for ranks in sorted(sets)]

    def close(self) -> None:
        """Free the groups that `build` has made; `world` stays. Collective."""
        axes = (self.data, self.tensor, self.pipe, self.model, self.embedding)
        made = {id(group): group for group in (*axes, self.data_node, self.data_cross)}
        made.pop(id(self.world), None)
        for group in made.values():
            group.close()


def _join(world: Group, groups: Sequence[Ranks], made: GroupCache) -> Group:
    """This rank's group along an axis; made unless an earlier axis had the same. Collective."""
    # All groups of the job are compared, so that all ranks split or none does.
    several = _several(groups)
    if several not in made:
        alone = (world.rank,)
        mine = next((group for group in several if world.rank in group), alone)
        made[several] = world.split(color=mine[0], key=mine.index(world.rank))
    return made[several]


def _several(groups: Sequence[Ranks]) -> frozenset[Ranks]:
    """The groups of more than one rank."""
    return frozenset(group for group in groups if len(group) > 1)
