"""What a study has shown: a row for each number of nodes, the model, and where it stops paying."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from hpc_train.scaling.fit import (
    STRONG,
    WEAK,
    Basis,
    StepTimeModel,
    TimePoint,
    gustafson_share,
    largest_worthwhile,
    left_out,
    predictions,
)
from hpc_train.scaling.results import ERROR_OF_MEDIAN, MeasuredRun

REACH = 8  # predictions go to so many times as many nodes as were measured
MILLION = 1e6
MUCH_LATENCY = 0.1  # share of a step from which on Amdahl's law says little


@dataclass(frozen=True)
class ScaleRow:
    """The figures of a number of nodes.

    Args:
        nodes, ranks, batch: the size of the job, and samples per step.
        kind: measured or predicted.
        runs: number of runs; 0 if it is predicted.
        seconds: seconds of a step. Measured: the median over the runs, each of which counts with
            its median step.
        low, high: measured: the fastest and the slowest run; of a single run the quartiles of its
            steps. Predicted: the bounds of `PredictedTime`.
        samples_per_second, tokens_per_second: of the whole job.
        speedup: samples per second, divided by those of the smallest job.
        efficiency: the speed-up, divided by how many times as many nodes there are.
        node_hours: node-hours for a million samples.
        joules: energy per sample in joules; None: not known.
        tflops, mfu: 10^12 floating-point operations of the model per second of the whole job, and
            their share of the measured peak; None: not known.
        phases: seconds per step of each phase, on rank 0.
    """

    nodes: int
    ranks: int
    batch: int
    kind: str
    runs: int
    seconds: float
    low: float
    high: float
    samples_per_second: float
    tokens_per_second: float | None
    speedup: float
    efficiency: float
    node_hours: float
    joules: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether the row was measured."""
        return self.kind == "measured"


@dataclass(frozen=True)
class Figures:
    """All figures of a study.

    Args:
        weak: whether the batch grows with the nodes.
        rows: measured rows, then predicted ones.
        model: the fitted model; None if there are fewer than two numbers of nodes.
        missed: see `left_out`.
        worthwhile: the largest number of nodes with the least efficiency; None without a model.
        most: the largest number of nodes that was looked at for that.
        least_efficiency: the least efficiency, from 0 to 1.
        shared: why ranks share cores, or that all nodes are one host; "" if neither is so.
    """

    weak: bool
    rows: Sequence[ScaleRow]
    model: StepTimeModel | None
    missed: float | None
    worthwhile: int | None
    most: int
    least_efficiency: float
    shared: str

    @property
    def measured(self) -> list[ScaleRow]:
        """The measured rows."""
        return [row for row in self.rows if row.measured]

    @property
    def predicted(self) -> list[ScaleRow]:
        """The predicted rows."""
        return [row for row in self.rows if not row.measured]

    @property
    def serial_share(self) -> float | None:
        """Amdahl's share, or in weak scaling Gustafson's on most nodes.

        None: it is not known, as the model gives no time on one node; it is above 1, as more nodes
        are slower than one; or Amdahl's law does not hold, as the time grows with the nodes: the
        largest job is slower than a smaller one, or the latency of messages, which grows, has
        MUCH_LATENCY of its step.
        """
        if self.model is None:
            return None
        first, last = self.measured[0], self.measured[-1]
        share: float | None
        if self.weak:
            share = max(0.0, gustafson_share(last.nodes / first.nodes, last.speedup))
        elif (
            last.seconds > min(row.seconds for row in self.measured)
            or self.model.share_of_messages(last.nodes) > MUCH_LATENCY
        ):
            share = None
        else:
            share = self.model.serial_share
        return share if share is not None and share <= 1 else None


def time_points(runs: Sequence[MeasuredRun]) -> list[TimePoint]:
    """The times of a step by number of nodes, with the errors of their medians.

    Few runs tell little of their scatter. So the variance of a number of nodes is the mean of its
    own and of that of all, as shares of the times. A run that is alone has the scatter of its steps
    instead.
    """
    nodes = sorted({run.nodes for run in runs})
    medians = {n: [run.median for run in runs if run.nodes == n] for n in nodes}
    middle = {n: statistics.median(values) for n, values in medians.items()}
    own = {
        n: statistics.variance(values) / middle[n] ** 2
        for n, values in medians.items()
        if len(values) > 1
    }
    points = []
    for n, values in medians.items():
        if n in own:
            scatter = ((own[n] + statistics.fmean(own.values())) / 2) ** 0.5
            error = ERROR_OF_MEDIAN * scatter * middle[n] / len(values) ** 0.5
        else:
            error = next(run.error for run in runs if run.nodes == n)
        points.append(TimePoint(n, middle[n], error, len(values)))
    return points


def figures_of(
    runs: Sequence[MeasuredRun],
    *,
    weak: bool,
    least_efficiency: float,
    most_nodes: int,
    can_run: Callable[[int], bool] = lambda nodes: True,
    targets: Sequence[int] = (),
) -> Figures:
    """All figures of the runs of a study.

    Args:
        runs: the finished runs, at least one.
        weak: whether the batch grows with the nodes.
        least_efficiency: the parallel efficiency below which more nodes are not worth it.
        most_nodes: the largest number of nodes that the training can be divided over.
        can_run: whether it can be divided over a number of nodes, by default any.
        targets: numbers of nodes to predict; by default 2, 4 and 8 times as many as were measured.
            Those that cannot be predicted have no row.
    """
    basis: Basis = WEAK if weak else STRONG
    points = time_points(runs)
    largest = points[-1].nodes
    most = min(most_nodes, max([REACH * largest, *targets]))
    most = next((nodes for nodes in range(most, largest, -1) if can_run(nodes)), largest)
    rows = [_measured(point, runs, runs[0]) for point in points]
    by_nodes = {row.nodes: row for row in rows}
    rows = [_relative(row, by_nodes[points[0].nodes]) for row in rows]
    model, worthwhile = None, None
    if len(points) > 1:
        model = StepTimeModel.of(points, basis)
        wanted = sorted({*(targets or (2 * largest, 4 * largest, 8 * largest))} - {*by_nodes})
        wanted = [
            nodes
            for nodes in wanted
            if nodes <= most and _batch(rows[0], nodes, weak=weak) and can_run(nodes)
        ]
        for one in predictions(points, basis, wanted):
            batch = _batch(rows[0], one.nodes, weak=weak)
            row = ScaleRow(
                one.nodes,
                rows[0].ranks * one.nodes // rows[0].nodes,
                batch,
                "predicted",
                0,
                one.seconds,
                one.low,
                one.high,
                batch / one.seconds,
                _tokens(batch, one.seconds, runs[0]),
                1.0,
                1.0,
                one.nodes / 3600 * one.seconds * MILLION / batch,
            )
            rows.append(_relative(row, rows[0]))
        worthwhile = largest_worthwhile(
            model,
            {one.nodes: one.seconds for one in points},
            most,
            least_efficiency,
            weak=weak,
            can_run=can_run,
        )
    shared = next((told for run in runs if (told := run.told.get("shared_cores"))), "")
    if not shared and any(run.told["hosts"] < run.nodes for run in runs):
        shared = "all ranks ran on one host, and a node of this study is a part of it"
    missed = left_out(points, basis)
    return Figures(weak, rows, model, missed, worthwhile, most, least_efficiency, shared)


def _measured(point: TimePoint, runs: Sequence[MeasuredRun], any_run: MeasuredRun) -> ScaleRow:
    mine = [run for run in runs if run.nodes == point.nodes]
    medians = sorted(run.median for run in mine)
    if len(mine) == 1:
        medians = np.quantile(mine[0].seconds, [0.25, 0.75]).tolist()
    told = mine[0].told
    batch, seconds = told["batch"], point.seconds
    return ScaleRow(
        point.nodes,
        told["ranks"],
        batch,
        "measured",
        len(mine),
        seconds,
        medians[0],
        medians[-1],
        batch / seconds,
        _tokens(batch, seconds, any_run),
        1.0,
        1.0,
        point.nodes / 3600 * seconds * MILLION / batch,
        _median([run.joules for run in mine]),
        _median([run.told.get("tflops") for run in mine]),
        _median([run.told.get("mfu") for run in mine]),
        {
            name: statistics.median(run.phases.get(name, 0.0) for run in mine)
            for name in mine[0].phases
        },
    )


def _batch(first: ScaleRow, nodes: int, *, weak: bool) -> int:
    """Samples per step on this number of nodes."""
    return first.batch * nodes // first.nodes if weak else first.batch


def _relative(row: ScaleRow, first: ScaleRow) -> ScaleRow:
    """The row with speed-up and efficiency relative to the smallest job."""
    speedup = row.samples_per_second / first.samples_per_second
    values = {one.name: getattr(row, one.name) for one in fields(row)}
    return ScaleRow(
        **values | {"speedup": speedup, "efficiency": speedup * first.nodes / row.nodes}
    )


def _tokens(batch: int, seconds: float, run: MeasuredRun) -> float | None:
    tokens = run.told.get("tokens_per_sample")
    return batch * tokens / seconds if tokens else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def as_csv(figures: Figures) -> str:
    """The rows as CSV with a line of titles. Phases are columns of their own, in seconds."""
    plain = [one.name for one in fields(ScaleRow) if one.name != "phases"]
    phases = list(figures.rows[0].phases)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*plain, *(f"{name}_seconds" for name in phases), "shared_cores"])
    for row in figures.rows:
        values = [getattr(row, name) for name in plain]
        values += [row.phases.get(name) for name in phases]
        writer.writerow(["" if value is None else value for value in [*values, figures.shared]])
    return file.getvalue()
