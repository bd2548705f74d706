"""Counts what a run costs, over all its restarts: node-hours and joules.

A checkpoint keeps the costs up to its step. A job that is killed has spent more, and what its
records and events tell of that is not forgotten either: a resumed run continues from the largest
costs that the checkpoint and the files of the run directory know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.state import ExtraState
from hpc_train.monitoring.energy import EnergyMeter, EnergyThread
from hpc_train.monitoring.energy_sources import FoundEnergy, find_energy
from hpc_train.monitoring.spent import SpentCosts, costs_in
from hpc_train.mpi.runtime import Runtime

logger = logging.getLogger(__name__)

_KEY = "costs"  # in checkpoints
_HOUR = 3.6e6  # milliseconds


class RunCosts(ExtraState):
    """The costs of a run. All ranks make it, and call each method marked collective.

    Args:
        runtime: the job's runtime.
        nodes: the number of nodes.
        saved: whether checkpoints hold the costs. With `run.deterministic`, and in a loop of the
            user's own, they do not, as their bytes would differ from one run to another; then only
            the files remember them.
    """

    def __init__(self, runtime: Runtime, nodes: int, *, saved: bool) -> None:
        self.world, self.node, self.nodes, self.saved = runtime.world, runtime.node, nodes, saved
        self.total = SpentCosts()
        """The costs up to the last record or checkpoint, the same on all ranks."""
        self.reader = ""
        """What reads the energy, in words; "" if some node has nothing that does."""
        self._start_up = runtime.start_up
        self._meter: EnergyMeter | None = None
        self._share = 0.0  # of its node's sources, which this rank reads
        self._counting = False
        self._checkpoint = self._files = SpentCosts()
        self._since = 0.0
        self._told = SpentCosts()  # up to the last record

    @contextmanager
    def counting(self, directory: Path, found: FoundEnergy | None = None) -> Iterator[None]:
        """Count until the end of the context. Collective at its begin.

        Args:
            directory: the run directory.
            found: this rank's sources of energy; None looks for them.
        """
        self._since = self._start_up.take()
        self._checkpoint = SpentCosts()
        read = self.world.from_first(lambda: asdict(costs_in(directory)))
        self._files = SpentCosts(**read)
        self._meter = self._own_meter(find_energy() if found is None else found)
        self._counting = True
        try:
            with closing(EnergyThread(self._meter)) if self._meter.sources else nullcontext():
                yield
        finally:
            self._counting = False

    def _own_meter(self, found: FoundEnergy) -> EnergyMeter:
        """A meter of the sources that no lower rank of this node reads. Collective."""
        names = {source.name: source.reader for source in found.sources}
        # A rank may see its own GPU only, so each source is read by the lowest rank that sees it.
        everyone = self.node.gathered(names, "the sources of energy")
        before = {name for others in everyone[: self.node.rank] for name in others}
        mine = [source for source in found.sources if source.name not in before]
        of_node = {name: reader for others in everyone for name, reader in others.items()}
        self._share = len(mine) / len(of_node) if of_node else 0.0
        self._tell(sorted({*of_node.values()}), found.refused)
        return EnergyMeter(mine)

    def _tell(self, readers: list[str], refused: list[str]) -> None:
        """Find out what reads the energy of all nodes, and log what does not. Collective."""
        of_host = {(self.world.host, " + ".join(readers)): refused[:1]}
        every = self.world.united(of_host if self.node.rank == 0 else {}, "the sources of energy")
        kinds = {readers for _, readers in every}
        self.reader = "" if "" in kinds else ", ".join(sorted(kinds))
        if self.world.rank:
            return
        lacking = sorted(host for host, readers in every if not readers)
        if len(kinds) > 1:
            told = "; ".join(f"{host} by {readers or 'nothing'}" for host, readers in sorted(every))
            logger.warning("the energy of the hosts is read in different ways: %s", told)
        elif lacking:
            why = next((what[0] for what in every.values() if what), "there is no counter")
            logger.info("the energy of this run is not known: %s (docs/how-to/costs.md)", why)
        else:
            less = next((f", but not by {what[0]}" for what in every.values() if what), "")
            logger.info("the energy of the nodes is read by %s%s", self.reader, less)

    def unify(self) -> None:
        """Add up the costs of all ranks. Collective."""
        if not self._counting:
            return
        assert self._meter is not None
        if self._meter.sources:
            self._meter.update()
        mine = [0, 0, 0]
        if self.world.rank == 0:
            mine[0] = round(1e3 * self._own_seconds()) * self.nodes
        mine[1] = round(1e3 * self._meter.joules)
        mine[2] = round(1e3 * self._meter.seconds * self._share)
        wall, joules, metered = self.world.totals(mine)
        self.total = self._before + SpentCosts(wall / _HOUR, joules / 1e3, metered / _HOUR)

    def at_start(self) -> dict[str, Any]:
        """What the event "start" says about costs. Collective."""
        self.unify()
        self._told = self.total
        return {"energy": self.reader, **self.total.known()}

    def of_record(self, samples: int, tokens_per_sample: float = 0) -> dict[str, float]:
        """The costs as parts of a record, and the work by the energy of it. Collective.

        Where the energy was not read it is taken to be as where it was.

        Args:
            samples: number of samples since the last record.
            tokens_per_sample: number of tokens of a sample; 0 if samples have no tokens.
        """
        self.unify()
        found = self.total.known()
        spent, self._told = self.total - self._told, self.total
        if spent.joules > 0 and (share := min(1.0, spent.metered_share)) > 0:
            found["samples_per_joule"] = samples * share / spent.joules
            if tokens_per_sample:
                found["tokens_per_joule"] = found["samples_per_joule"] * tokens_per_sample
        return found

    def _own_seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def _before(self) -> SpentCosts:
        """What earlier jobs have cost."""
        return max(self._checkpoint, self._files, key=lambda one: one.node_hours)

    def now(self) -> SpentCosts:
        """The costs up to now on rank 0. Energy counts up to the last record or checkpoint."""
        hours = self._before.node_hours + self._own_seconds() * self.nodes / 3600
        known = max(self._before, self.total, key=lambda one: one.node_hours)
        return SpentCosts(hours, known.joules, known.metered_node_hours)

    def values(self) -> dict[str, Any]:
        """The costs up to the checkpoint."""
        return {_KEY: asdict(self.total)} if self.saved and self._counting else {}

    def take(self, values: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._checkpoint = SpentCosts.of(values.get(_KEY, {}))
