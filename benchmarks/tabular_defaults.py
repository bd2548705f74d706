"""Choose the defaults of hpc_train.tabular on made tables that benchmarks/tabular.py does not have.

    python -m benchmarks.tabular_defaults [--settings FILE] [--estimator ours|MLP] [--jobs N]

Each setting is fitted on each table for each seed. The seed also decides how the table is made. It
is scored on 4000 further rows, which were not learned from. The lost share of a setting says how
much it leaves of what can be gained: (error - best error) / (error of the constant answer - best
error), where the error is the share of wrong classes, or the RMSE. Its regret is how much more it
loses than the best setting on this table. Settings are sorted by mean regret. The mean regret by
log loss in place of the share of wrong classes stands beside it.

FILE is a JSON list of objects, each with the arguments of a setting; {} are the defaults. Without
--settings each setting is drawn from the space in tabular_peers.py, and the first one is {}. With
--results each result is a line of a file, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid
from scipy.special import softmax
from scipy.stats import rankdata

from benchmarks import harness
from benchmarks.cells import Cell, Found, run_cells
from benchmarks.tables_data import Table, frame_of, frequent_first, labels_of
from benchmarks.tabular import fitted, scored
from benchmarks.tabular_peers import CANDIDATES, OURS, Settings

TEST_ROWS = 4000
Made = tuple[Any, np.ndarray]  # features, and logits (N, classes) or values (N,)
Maker = Callable[[np.random.Generator, int], Made]


def linear(draws: np.random.Generator, rows: int) -> Made:
    """A linear function of 12 correlated features."""
    x = draws.standard_normal((rows, 12)) @ draws.standard_normal((12, 12)) / 3
    return frame_of(x), x @ draws.standard_normal(12)


def trees(draws: np.random.Generator, rows: int) -> Made:
    """Two classes by the sum of five random trees of depth 3, on 8 skewed features."""
    x = draws.lognormal(size=(rows, 8))
    value = np.zeros(rows)
    for _ in range(5):
        leaf = np.zeros(rows, int)
        for features in draws.integers(8, size=(3, 8)):
            borders = np.exp(0.7 * draws.standard_normal(8))  # of each node of the level
            node = leaf % 8
            leaf = 2 * leaf + (x[np.arange(rows), features[node]] > borders[node])
        value += draws.standard_normal(8)[leaf]
    return frame_of(x), np.stack([-2 * value, 2 * value], 1)


def network(draws: np.random.Generator, rows: int) -> Made:
    """A smooth function of 6 features: a network of random cosines."""
    x = draws.standard_normal((rows, 6))
    waves = np.cos(0.6 * x @ draws.standard_normal((6, 30)) + 2 * np.pi * draws.random(30))
    return frame_of(x), waves @ draws.standard_normal(30) / np.sqrt(15)


def shops(draws: np.random.Generator, rows: int) -> Made:
    """Two classes by the effects of 12, 60 and 150 categories, of pairs of them, and 4 numbers."""
    counts = (12, 60, 150)
    codes = [frequent_first(draws, rows, count) for count in counts]
    x = draws.standard_normal((rows, 4))
    value = x[:, 0] - 0.5 * x[:, 1] ** 2 + draws.standard_normal((12, 60))[codes[0], codes[1]] / 2
    for code, count in zip(codes, counts, strict=True):
        value += draws.standard_normal(count)[code]
    logits = np.stack([-value, value], 1)
    return frame_of(x, list(zip(codes, counts, strict=True))), logits


def tiny(draws: np.random.Generator, rows: int) -> Made:
    """Three classes by 8 features, one of them through its square."""
    x = draws.standard_normal((rows, 8))
    known = np.column_stack([x[:, :4], x[:, 4] ** 2 - 1])
    return frame_of(x), 1.5 * known @ draws.standard_normal((5, 3))


def wide(draws: np.random.Generator, rows: int) -> Made:
    """Two classes by 5 of 100 features. Two of these act together."""
    x = draws.standard_normal((rows, 100))
    used = draws.choice(100, 5, replace=False)
    value = 1.5 * x[:, used[0]] - x[:, used[1]] + np.abs(x[:, used[2]])
    value += 1.5 * x[:, used[3]] * x[:, used[4]] - 0.8
    return frame_of(x), np.stack([-value, value], 1)


def clouds(draws: np.random.Generator, rows: int) -> Made:
    """Eight classes by clouds of points, two each, in 6 directions of 30 features."""
    centers = 1.6 * draws.standard_normal((8, 2, 6))
    inner = centers[draws.integers(8, size=rows), draws.integers(2, size=rows)]
    inner = inner + draws.standard_normal((rows, 6))
    distance = ((inner[:, None, None] - centers) ** 2).sum(3)
    logits = np.logaddexp.reduce(-distance / 2, 2)
    x = inner @ draws.standard_normal((6, 30)) + 0.3 * draws.standard_normal((rows, 30))
    return frame_of(x), logits


def holes(draws: np.random.Generator, rows: int) -> Made:
    """A value by 10 features with heavy tails, whose missing values have an effect."""
    x = draws.standard_t(2, (rows, 10))
    missing = draws.random((rows, 10)) < np.linspace(0, 0.4, 10)
    effects, steps = draws.standard_normal((2, 10))
    value = np.where(missing, steps, np.arctan(x) * effects).sum(1)
    return frame_of(np.where(missing, np.nan, x)), value


MAKERS: dict[str, tuple[int, Maker]] = {  # rows to learn from, and how they are made
    "linear": (500, linear),
    "trees": (3000, trees),
    "network": (2000, network),
    "shops": (4000, shops),
    "tiny": (150, tiny),
    "wide": (1000, wide),
    "clouds": (1500, clouds),
    "holes": (1500, holes),
}


@functools.cache
def pair_of(name: str, seed: int) -> tuple[Table, Table]:
    """The rows to learn from, and those to score."""
    rows, maker = MAKERS[name]
    draws = np.random.default_rng([7, seed, list(MAKERS).index(name)])
    frame, known = maker(draws, rows + TEST_ROWS)
    if known.ndim == 2:
        ideal = softmax(known, 1)
        target = labels_of(draws, ideal)
    else:
        ideal = known
        target = known + 0.4 * known.std() * draws.standard_normal(len(known))
    whole = Table(name, frame, target, ideal)
    return whole.at(np.arange(rows)), whole.at(np.arange(rows, rows + TEST_ROWS))


def constant(learned: Table, rows: int) -> np.ndarray:
    """The answer that is the same for all rows: the classes' shares, or the mean."""
    if not learned.classes:
        return np.full(rows, learned.target.mean())
    shares = np.bincount(learned.target, minlength=learned.classes) / len(learned.target)
    return np.tile(shares, (rows, 1))


def lost(scores: dict[str, float], best: dict[str, float], least: dict[str, float]) -> list[float]:
    """The lost shares by the first measure, and by log loss (by RMSE for values)."""
    names = ("accuracy", "log_loss") if "accuracy" in scores else ("rmse", "rmse")
    return [(scores[one] - best[one]) / (least[one] - best[one]) for one in names]


def measured(cell: Cell) -> dict[str, Any]:
    """The lost shares of one setting on one table, and its seconds."""
    name, table, seed, settings, _ = cell
    learned, test = pair_of(str(table), int(seed))
    begin = time.perf_counter()
    estimator = fitted(str(name), learned, int(seed), json.loads(str(settings)))
    taken = time.perf_counter() - begin
    assert test.ideal is not None
    best = test.scores(test.ideal)
    least = test.scores(constant(learned, TEST_ROWS))
    return {"lost": lost(scored(estimator, test), best, least), "seconds": round(taken, 3)}


def show(found: Found, settings: list[str], tables: list[str]) -> dict[str, float]:
    """Print the table of settings, the best first. Returns the mean regrets."""
    shares: dict[tuple[str, str], list[list[float]]] = {}
    seconds: dict[str, list[float]] = {one: [] for one in settings}
    for (_, table, _, setting, _), result in found.items():
        shares.setdefault((str(setting), str(table)), []).append(result["lost"])
        seconds[str(setting)].append(result["seconds"])
    means = np.array(
        [[np.mean(shares[one, table], 0) for table in tables] for one in settings]
    )  # settings, tables, measures
    regrets = means - means.min(0)
    ranks = np.stack([rankdata(column) for column in means[:, :, 0].T], 1).mean(1)
    names = ("mean regret", "worst regret", "by log loss", "mean rank", "seconds")
    made = Grid("setting", *tables, *names, title="lost shares, in percent, and regrets")
    for number in np.argsort(regrets[:, :, 0].mean(1)):
        cells = [f"{100 * value:.1f}" for value in means[number, :, 0]]
        by_first, by_log_loss = regrets[number].T
        three = (by_first.mean(), by_first.max(), by_log_loss.mean())
        cells += [f"{100 * value:.2f}" for value in three]
        cells += [f"{ranks[number]:.2f}", f"{statistics.median(seconds[settings[number]]):.3g}"]
        made.add_row(settings[number], *cells)
    Console(width=200).print(made)
    rounded = regrets[:, :, 0].mean(1).round(5).tolist()
    return {f"mean regret, {one}": value for one, value in zip(settings, rounded, strict=True)}


def main() -> None:
    """Measure all settings that are not yet known, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="JSON list of settings")
    parser.add_argument("--draws", type=int, default=20, help="settings, if no file is given")
    parser.add_argument("--estimator", choices=CANDIDATES, default=OURS)
    parser.add_argument("--tables", nargs="+", choices=MAKERS, default=list(MAKERS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--results", type=Path, metavar="FILE", help="lines of finished cells")
    parser.add_argument("--json", metavar="FILE", help="write the last line there as well")
    options = parser.parse_args()
    chosen: list[Settings]
    if options.settings:
        chosen = json.loads(options.settings.read_text())
    else:
        chosen = CANDIDATES[options.estimator].trials(options.draws, 0)
    settings = list(dict.fromkeys(json.dumps(one, sort_keys=True) for one in chosen))
    cells: list[Cell] = [
        (options.estimator, table, seed, setting, identity)
        for table in options.tables
        for seed in range(options.seeds)
        for identity in [CANDIDATES[options.estimator].identity(pair_of(table, seed)[0], False)]
        for setting in settings
    ]
    found, fresh = run_cells(measured, cells, options.results, options.jobs)
    print(
        f"{len(cells)} cells ({len(settings)} settings x {len(options.tables)} tables x "
        f"{options.seeds} seeds), {fresh} measured now"
    )
    harness.finish("tabular_defaults", {}, show(found, settings, options.tables), options.json)


if __name__ == "__main__":
    main()
