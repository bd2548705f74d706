"""Counts the samples that a run has substituted, and checks shards before it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from hpc_train.checkpoint.state import ExtraState
from hpc_train.data.check import check_shards, every_shard
from hpc_train.data.loader import Step
from hpc_train.data.manifest import Manifest, StoredData, StoredShard
from hpc_train.data.substitutes import (
    COPY_AGAIN,
    MOST_SUBSTITUTED,
    Substituted,
    check_unfit_share,
    unfit_shards,
)
from hpc_train.errors import DataError, plural
from hpc_train.mpi.agreement import agreed, settle
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.runtime import Runtime
from hpc_train.seeds import mix

logger = logging.getLogger(__name__)

_KEY = "substituted_samples"  # in metrics.jsonl and in checkpoints


def check_each_shard(runtime: Runtime, directory: Path, manifest: StoredData[StoredShard]) -> None:
    """Check a data folder's shards, which each node may see in another way. Collective.

    The ranks of each node divide them among them.

    Raises:
        DataError: a shard cannot be used; on all ranks.
    """
    node = runtime.node
    with agreed(runtime.world):
        check_shards(directory, manifest, every_shard(manifest)[node.rank :: node.size])


def check_on_nodes(
    runtime: Runtime,
    directory: Path,
    manifest: Manifest,
    damaged: Literal["raise", "substitute"],
) -> None:
    """Check a data folder's shards as `data.damaged` says. Collective.

    With "raise" as `check_each_shard`. With "substitute" a node warns of shards that cannot be
    used.

    Raises:
        DataError: a shard cannot be used; with "substitute": too many cannot. On all ranks.
    """
    world, node = runtime.world, runtime.node
    if damaged == "raise":
        check_each_shard(runtime, directory, manifest)
        return
    with agreed(world):
        mine = every_shard(manifest)[node.rank :: node.size]
        unfit = unfit_shards(directory, manifest, mine)
    unfit = node.united(unfit)
    with agreed(world):
        check_unfit_share(directory, manifest, unfit)
    if unfit and node.rank == 0:
        logger.warning(
            "%d of %d shards of %s cannot be used, and samples are substituted for theirs: %s",
            len(unfit), len(every_shard(manifest)), directory, ", ".join(sorted(unfit)),
        )  # fmt: skip


class SubstitutedSamples(ExtraState):
    """The number of samples that training has substituted since the run's beginning.

    Args:
        grid: the layout. All ranks of a replica read the same samples, and one counts them.
        dataset: the training data. It substitutes samples if its attribute `substitutes` is not
            None. Its batches then are a `Substituted` where it did so.
        batch: samples per step over the whole job.
    """

    def __init__(self, grid: ParallelGrid, dataset: Any, batch: int) -> None:
        self.grid, self.samples, self.batch = grid, len(dataset), batch
        self.on = getattr(dataset, "substitutes", None) is not None
        self._total = 0  # up to the last sum over the ranks
        self._since = self._mark = 0  # of this replica since then: number, and hash of the pairs
        self._step = 0

    def count(self, step: Step) -> None:
        """Count the samples of a step that is taken."""
        self._step = step.number
        for micro_batch in step.micro_batches:
            if isinstance(micro_batch.data, Substituted):
                pairs = micro_batch.data.pairs
                self._since += len(pairs)
                self._mark = mix(self._mark, *chain.from_iterable(pairs))

    def record(self) -> dict[str, int]:
        """The number, for a record of metrics, if samples are substituted at all. Collective.

        Raises:
            DataError: too many samples were substituted, or the ranks of a replica have read
                different samples; on all ranks.
        """
        if not self.on:
            return {}
        world, replica = self.grid.world, self.grid.model
        if self.grid.tp * self.grid.pp > 1:
            what = "a comparison of the substituted samples"
            alike = replica.same(array("q", [self._mark]).tobytes(), what)
            error = DataError(
                f"ranks that compute the same samples have substituted different ones since the "
                f"last record before step {self._step}, because they see different damage",
                "copy the same data to all nodes, and resume the run",
            )
            settle(world, None if alike else error)
        new = world.total(self._since if replica.rank == 0 else 0)
        self._total += new
        self._since = self._mark = 0
        allowed = max(self.samples, self._step * self.batch)
        if new and self._total > MOST_SUBSTITUTED * allowed:
            error = DataError(
                f"{plural(self._total, 'sample was', 'samples were')} substituted up to step "
                f"{self._step}, and at most "
                f"{MOST_SUBSTITUTED:.0%} of {allowed} may be",
                COPY_AGAIN,
            )
            error.agreed = True  # all ranks have the same numbers
            raise error
        return {_KEY: self._total}

    def unify(self) -> None:
        """Sum the number over the ranks, as `record`."""
        self.record()

    def values(self) -> dict[str, Any]:
        """The number, also if an earlier part of the run has substituted samples."""
        return {_KEY: self._total} if self.on or self._total else {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._total, self._since, self._mark = values.get(_KEY, 0), 0, 0
