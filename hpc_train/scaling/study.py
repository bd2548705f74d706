"""A study: which runs it has, in which order, with which options, and where their results lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train import files
from hpc_train.config import RunConfig
from hpc_train.config.sections import TEST_STEPS_LEAST
from hpc_train.errors import ConfigError, UserError
from hpc_train.planning.schedules import micro_batches_of
from hpc_train.scaling.results import MeasuredRun, read_run

STUDY = "study.json"  # in the study's folder: what all runs have in common
ATTEMPT = "hpc-train scale: this attempt begins here\n"  # a line in the output of a run


@dataclass(frozen=True, eq=False)
class ScaleRun:
    """One run of a study.

    Args:
        nodes: number of nodes.
        repeat: its number among the runs on this number of nodes, from 1.
        directory: its run directory.
        options: options of the training, beside those that the user has given.
    """

    nodes: int
    repeat: int
    directory: Path
    options: Sequence[str]


@dataclass(frozen=True)
class ScaleStudy:
    """A series of short runs on several numbers of nodes.

    Args:
        config: the configuration of the training.
        folder: the folder of the study.
        nodes: numbers of nodes, ascending.
        ranks_per_node: ranks on each node.
        weak: whether the batch grows with the nodes. That of the configuration is then the batch of
            the smallest job.
        repeats: number of runs on each number of nodes.
        steps: number of steps of a run, with its warm-up.
        warmup: number of steps that do not count.
    """

    config: RunConfig
    folder: Path
    nodes: Sequence[int]
    ranks_per_node: int
    weak: bool
    repeats: int
    steps: int
    warmup: int

    def runs(self) -> Iterator[ScaleRun]:
        """The runs in their order: all numbers of nodes, then all of them again.

        So a drift of the machine's speed falls on all numbers of nodes alike.
        """
        for repeat in range(1, self.repeats + 1):
            for nodes in self.nodes:
                directory = self.folder / f"nodes-{nodes}-run-{repeat}"
                yield ScaleRun(nodes, repeat, directory, self._options(nodes, directory))

    def _options(self, nodes: int, directory: Path) -> list[str]:
        given = {
            "run.dir": directory,
            "run.performance_test": self.steps,
            "data.batch": self.batch(nodes),
            "parallel.dp": self.replicas(nodes),
        }
        return [word for key, value in given.items() for word in (f"--{key}", str(value))]

    def batch(self, nodes: int) -> int:
        """Samples per step on this number of nodes."""
        batch = self.config.data.batch
        return batch * nodes // self.nodes[0] if self.weak else batch

    def replicas(self, nodes: int) -> int:
        """The data-parallel size on this number of nodes; tp and pp come from the configuration."""
        return nodes * self.ranks_per_node // self._ranks_of_replica

    @property
    def _ranks_of_replica(self) -> int:
        return self.config.parallel.tp * self.config.parallel.pp

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes: in strong scaling each replica needs a sample."""
        if self.weak:
            return 1 << 30
        return self.config.data.batch * self._ranks_of_replica // self.ranks_per_node

    def check(self) -> None:
        """Check that the training can be divided over each number of nodes.

        Raises:
            UserError: it cannot, or the steps leave nothing to measure.
        """
        if self.steps < TEST_STEPS_LEAST:
            raise UserError(f"--steps is {self.steps}", f"give {TEST_STEPS_LEAST} or more")
        if self.warmup >= self.steps:
            raise UserError(
                f"--warmup is {self.warmup}, and --steps {self.steps}", "give more steps"
            )
        for nodes in self.nodes:
            self._check_division(nodes)

    def can_run(self, nodes: int) -> bool:
        """Whether the training can be divided over this number of nodes."""
        try:
            self._check_division(nodes)
        except UserError:
            return False
        return True

    def _check_division(self, nodes: int) -> None:
        ranks = nodes * self.ranks_per_node
        if ranks % self._ranks_of_replica:
            raise UserError(
                f"{ranks} ranks on {nodes} nodes are no multiple of parallel.tp x parallel.pp, "
                f"which is {self._ranks_of_replica}",
                "give other --nodes or --ranks_per_node",
            )
        try:
            given = self.config.data.samples_at_a_time
            micro_batches_of(self.batch(nodes), self.replicas(nodes), given)
        except ConfigError as error:
            raise UserError(
                f"on {nodes} nodes {error.cause}", "give another data.batch, or other --nodes"
            ) from None

    def claim(self) -> None:
        """Write down what all runs have in common, or check that an earlier study had the same.

        The numbers of nodes, the repeats and the warm-up may differ from those of an earlier call.
        An earlier study is replaced if none of its runs has begun.

        Raises:
            UserError: the folder has another study, or cannot be written.
        """
        path, mine = self.folder / STUDY, self._identity()
        before = None
        with suppress(OSError):
            before = files.parsed_object(path.read_bytes())
        if before not in (None, mine) and any(self.folder.glob("nodes-*-run-*")):
            changed = [key for key in mine if before.get(key) != mine[key]]
            raise UserError(
                f"{self.folder} has a study with another {', '.join(changed)}",
                "give another --out, or remove that folder to begin again",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write_text(path, json.dumps(mine, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"--out {self.folder} cannot be written: {error.strerror}", "give another folder"
            ) from None

    def _identity(self) -> dict[str, Any]:
        run = replace(self.config.run, dir="")
        parallel = replace(self.config.parallel, dp=None)
        return {
            "configuration": replace(self.config, run=run, parallel=parallel).to_yaml(),
            "way of scaling": "weak" if self.weak else "strong",
            "number of nodes of the smallest job": self.nodes[0] if self.weak else None,
            "--ranks_per_node": self.ranks_per_node,
            "--steps": self.steps,
        }

    def result(self, run: ScaleRun) -> MeasuredRun | None:
        """The result of a run; None if it has none yet."""
        return read_run(run.directory, run.nodes, self.warmup)

    def results(self) -> list[MeasuredRun]:
        """The results of all runs that are finished."""
        return [found for run in self.runs() if (found := self.result(run)) is not None]


def cause_of_failure(run: ScaleRun) -> str:
    """The last error that the output of a run's last attempt tells; "" if it tells none."""
    outputs = [*run.directory.glob("*.out"), *run.directory.glob("*.o[0-9]*")]
    with suppress(OSError, ValueError):  # there is no output
        newest = max(outputs, key=lambda path: path.stat().st_mtime)
        text = newest.read_text(encoding="utf-8", errors="replace").rpartition(ATTEMPT)[2]
        told = [line for line in text.splitlines() if "hpc-train: error:" in line]
        return told[-1].split("hpc-train: error:")[1].strip() if told else ""
    return ""
