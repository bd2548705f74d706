"""Learning from tables, beside scikit-learn, XGBoost and LightGBM.

    python -m benchmarks.tabular [--results FILE] [--jobs N] [--trials 0|20] [--json FILE]

The tables are four of scikit-learn and three made ones (tables_data.py). Of the made ones the best
score is known, as their rows come with the best prediction that anybody could make. Its line is
"best attainable". It has no rank.

Each seed cuts the rows into 5 folds, stratified for classes, and is given to the estimators as
well. A candidate is fitted on four folds and scored on the fifth one. A figure is the mean over
seeds and folds, with the standard deviation of the seeds' means. Ranks come from accuracy, and from
RMSE for a regression. Equal figures share the mean of their places. A second line ranks
classifications by log loss, and a third one compares neural networks alone.

All candidates have their defaults (tabular_peers.py). With --trials 20 each has a random search
within the training folds of every cell. The first of its 20 settings is the defaults. The others
are drawn from the space in tabular_peers.py. Each is scored by 3 folds of the training rows
if these are fewer than 200, and else on a quarter of them. The best one by accuracy, then by log
loss, or by RMSE, is fitted on all training rows. The results are a table of their own, which takes
about 35 times as long as the first one; --seeds makes it shorter.

A cell is one candidate on one fold of one seed. Scores are measured in --jobs processes, and times
after them in one process: the candidates in turn, on as many folds of the first seed as --rounds
says, after a fit on few rows. Every process computes with one thread. With --results each result is
a line of a file, and the same command goes on where it was stopped. A cell is measured again if the
table, the candidate's version, its defaults or its space have changed. It is not if only code has
changed, so give a new file then.

The peers xgboost and lightgbm are in the extra `benchmarks`. Installed like this they bring neither
another numpy nor the libraries of GPUs. Name the folder in PYTHONPATH, too. A peer that is not
installed is left out:

    pip install --no-deps --target PEERS xgboost lightgbm
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid
from scipy.stats import rankdata
from sklearn.exceptions import ConvergenceWarning

from benchmarks import harness
from benchmarks.cells import Cell, Found, run_cells
from benchmarks.tables_data import TABLES, Scores, Table
from benchmarks.tabular_peers import CANDIDATES, OURS, Settings

DEFAULTS, TIMES = "defaults", "times"
IDEAL = "best attainable"
FEW, PARTS = 200, 3  # a search on fewer training rows than this has this number of folds
WARM_ROWS = 100
HIGHER = ("accuracy", "r2")  # the larger, the better; other measures are errors
FIRST = {True: "accuracy", False: "rmse"}  # what ranks come from: of classes, of values
SECOND = {True: "log_loss", False: "r2"}


@functools.cache
def table_of(name: str) -> Table:
    """A table by its name."""
    return TABLES[name]()


def fitted(name: str, table: Table, seed: int, settings: Settings) -> Any:
    """A candidate that has learned from a table."""
    estimator = CANDIDATES[name].make(table, seed, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # defaults may stop early
        warnings.filterwarnings("ignore", "Got `batch_size`", UserWarning)  # of few rows
        return estimator.fit(table.frame, table.target)


def scored(estimator: Any, table: Table) -> Scores:
    """Scores of an estimator on a table."""
    answer = estimator.predict_proba if table.classes else estimator.predict
    return table.scores(np.asarray(answer(table.frame)))


def merit(found: Sequence[Scores]) -> tuple[float, ...]:
    """Scores of one setting as numbers to compare. Larger ones are better."""
    names = [name for name in ("accuracy", "log_loss", "rmse") if name in found[0]]
    return tuple(
        (1 if name in HIGHER else -1) * statistics.fmean(one[name] for one in found)
        for name in names
    )


def search(name: str, table: Table, seed: int, count: int) -> Settings:
    """The best settings of a random search on a table."""
    small = len(table.target) < FEW
    parts = table.folds(PARTS, seed) if small else table.folds(4, seed)[:1]

    def tried(settings: Settings) -> tuple[float, ...]:
        return merit(
            [
                scored(fitted(name, table.at(train), seed, settings), table.at(test))
                for train, test in parts
            ]
        )

    return max(CANDIDATES[name].trials(count, seed), key=tried)


def measured(cell: Cell) -> dict[str, Any]:
    """The scores of one candidate on one fold of one seed."""
    kind, table, name, seed, fold, folds, _ = cell
    whole = table_of(str(table))
    train, test = whole.folds(int(folds), int(seed))[int(fold)]
    learned = whole.at(train)
    begin = time.perf_counter()
    settings: Settings = {}
    if kind != DEFAULTS:
        settings = search(str(name), learned, int(seed), int(str(kind).split()[0]))
    estimator = fitted(str(name), learned, int(seed), settings)
    taken = time.perf_counter() - begin
    return {
        "scores": scored(estimator, whole.at(test)),
        "settings": settings,
        "seconds": round(taken, 3),
    }


@functools.cache
def warm(name: str, table: str) -> None:
    """Fit a candidate on few rows, so that the clock does not measure what is done only once."""
    whole = table_of(table)
    rows = np.arange(WARM_ROWS)
    if whole.classes:  # the first row of each class, too
        rows = np.union1d(rows, np.unique(whole.target, return_index=True)[1])
    fitted(name, whole.at(rows), 0, {})


def timed(cell: Cell) -> dict[str, Any]:
    """The seconds of fitting one candidate on one fold of the first seed."""
    _, table, name, fold, folds, _ = cell
    warm(str(name), str(table))
    whole = table_of(str(table))
    learned = whole.at(whole.folds(int(folds), 0)[int(fold)][0])
    begin = time.perf_counter()
    fitted(str(name), learned, 0, {})
    return {"seconds": time.perf_counter() - begin}


class Comparison:
    """The scores of all candidates on all tables.

    Args:
        found: the results of cells of one kind.
        options: the command line.
    """

    def __init__(self, found: Found, options: argparse.Namespace) -> None:
        self.tables: list[str] = options.tables
        self.names: list[str] = options.candidates
        self.size = (options.seeds, options.folds)
        self.scores: dict[tuple[str, str], list[Scores]] = {}  # seeds x folds, in order
        for (_, table, name, *_), result in found.items():
            self.scores.setdefault((str(table), str(name)), []).append(result["scores"])
        for whole in map(table_of, self.tables):
            if whole.ideal is not None:
                self.scores[whole.name, IDEAL] = [
                    whole.at(test).scores(whole.ideal[test])
                    for seed in range(options.seeds)
                    for _, test in whole.folds(options.folds, seed)
                ]

    def figure(self, table: str, name: str, measure: str) -> tuple[float, float]:
        """The mean of a score, and the standard deviation of the seeds' means (0 for one seed)."""
        values = np.array([one[measure] for one in self.scores[table, name]]).reshape(self.size)
        seeds = values.mean(1)
        return float(values.mean()), float(seeds.std(ddof=1)) if len(seeds) > 1 else 0.0

    def ranks(self, names: Sequence[str], of_classes: str) -> dict[str, list[float]]:
        """The rank of some candidates on each table: classifications by `of_classes`, 1 is best."""
        columns = []
        for table in self.tables:
            measure = of_classes if table_of(table).classes else FIRST[False]
            values = [round(self.figure(table, name, measure)[0], 6) for name in names]
            columns.append(rankdata([-v if measure in HIGHER else v for v in values]))
        return {name: [float(column[n]) for column in columns] for n, name in enumerate(names)}

    def grid(self, title: str, measures: dict[bool, str]) -> Grid:
        """A table of one measure of classifications and one of regressions."""
        of = {table: measures[bool(table_of(table).classes)] for table in self.tables}
        made = Grid("candidate", *(f"{table}\n{of[table]}" for table in self.tables), title=title)
        for name in [*self.names, IDEAL]:
            cells = []
            for table in self.tables:
                known = (table, name) in self.scores
                middle, spread = self.figure(table, name, of[table]) if known else (0.0, 0.0)
                cells.append(f"{middle:.4g} ± {spread:.2g}" if known else "")
            made.add_row(name, *cells)
        return made

    def rank_grid(self, title: str) -> tuple[Grid, dict[str, float]]:
        """A table of ranks, and the mean ranks by their names."""
        made = Grid("ranked by", "candidate", *self.tables, "mean", title=title)
        means = {}
        neural = [name for name in self.names if CANDIDATES[name].neural]
        for what, names, measure in (
            ("accuracy, RMSE", self.names, "accuracy"),
            ("log loss, RMSE", self.names, "log_loss"),
            ("accuracy, RMSE; neural ones", neural, "accuracy"),
        ):
            ranks = self.ranks(names, measure) if names else {}
            for name, values in sorted(ranks.items(), key=lambda item: sum(item[1])):
                means[f"mean rank by {what}, {name}"] = mean = round(statistics.fmean(values), 3)
                made.add_row(what, name, *(f"{value:g}" for value in values), f"{mean:.2f}")
            made.add_section()
        return made, means

    def show(self, title: str) -> dict[str, float]:
        """Print all tables. Returns the figures by their names."""
        console = Console(width=170)
        console.print(self.grid(title, FIRST))
        console.print(self.grid(title, SECOND))
        ranks, figures = self.rank_grid(title)
        console.print(ranks)
        for (table, name), scores in self.scores.items():
            for measure in scores[0]:
                middle = self.figure(table, name, measure)[0]
                figures[f"{table}, {name}, {measure}"] = round(middle, 5)
        return figures


def show_times(found: Found, options: argparse.Namespace) -> dict[str, float]:
    """Print the median seconds of a fit. Returns them by their names."""
    taken: dict[tuple[str, str], list[float]] = {}
    for (_, table, name, *_), result in found.items():
        taken.setdefault((str(table), str(name)), []).append(result["seconds"])
    title = f"seconds of a fit with one thread: median of {options.rounds}"
    made = Grid("candidate", *options.tables, "sum", title=title)
    figures = {}
    for name in options.candidates:
        row = [statistics.median(taken[table, name]) for table in options.tables]
        made.add_row(name, *(f"{value:.3g}" for value in [*row, sum(row)]))
        for table, value in zip(options.tables, row, strict=True):
            figures[f"{table}, {name}, s"] = round(value, 4)
        figures[f"all tables, {name}, s"] = round(sum(row), 4)
    Console(width=170).print(made)
    return figures


def parsed() -> argparse.Namespace:
    """The command line, with the candidates that are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=0, help="settings of a search; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="times of each fit; 0: none")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure scores")
    parser.add_argument("--results", type=Path, metavar="FILE", help="lines of finished cells")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    options = parser.parse_args()
    if options.trials == 1 or min(options.seeds, options.jobs) < 1 or options.folds < 2:
        parser.error("give 2 or more trials or 0, 2 or more folds, and 1 or more seeds and jobs")
    if options.rounds > options.folds:
        parser.error("give at most as many rounds as folds")
    absent = [name for name, one in CANDIDATES.items() if not one.present]
    if wrong := [name for name in options.candidates or [] if name in absent]:
        parser.error(f"{wrong[0]}: {CANDIDATES[wrong[0]].module} cannot be imported, see --help")
    for name in absent if options.candidates is None else []:
        print(f"{name} is left out: {CANDIDATES[name].module} cannot be imported, see --help")
    chosen = options.candidates or CANDIDATES
    options.candidates = [name for name in CANDIDATES if name in chosen and name not in absent]
    return options


def main() -> None:
    """Measure all cells that are not yet known, and print the tables."""
    options = parsed()
    machine = harness.machine()
    print(f"{machine['processor']}, {machine['instruction_sets']}, {machine['cores']} cores")
    cases = [(table, name) for table in options.tables for name in options.candidates]
    figures: dict[str, float] = {}
    for kind in [DEFAULTS] + [f"{options.trials} trials"] * (options.trials > 0):
        of = {
            (table, name): CANDIDATES[name].identity(table_of(table), kind != DEFAULTS)
            for table, name in cases
        }
        cells: list[Cell] = [
            (kind, table, name, seed, fold, options.folds, of[table, name])
            for table, name in cases
            for seed in range(options.seeds)
            for fold in range(options.folds)
        ]
        found, fresh = run_cells(measured, cells, options.results, options.jobs)
        print(
            f"{kind}: {len(cells)} cells ({len(options.tables)} tables x {len(options.candidates)} "
            f"candidates x {options.seeds} seeds x {options.folds} folds), {fresh} measured now"
        )
        shown = Comparison(found, options).show(kind)
        figures |= {f"{kind}, {key}": value for key, value in shown.items()}
    ratios: dict[str, float] = {}
    if options.rounds:
        turns: list[Cell] = [
            (
                TIMES,
                table,
                name,
                fold,
                options.folds,
                CANDIDATES[name].identity(table_of(table), False),
            )
            for table in options.tables
            for fold in range(options.rounds)
            for name in options.candidates
        ]
        found, _ = run_cells(timed, turns, options.results)
        seconds = show_times(found, options)
        figures |= seconds
        if OURS in options.candidates:
            ours = seconds[f"all tables, {OURS}, s"]
            for name in options.candidates:
                if name != OURS:
                    ratios[f"seconds, {OURS} / {name}"] = ours / seconds[f"all tables, {name}, s"]
    harness.finish("tabular", ratios, figures, options.json)


if __name__ == "__main__":
    main()
