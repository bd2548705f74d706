"""What is known of a table's training rows: moments, quantiles, and counts of texts.

Each portion's numbers are found by one rank. All are put together in the order of the portions, so
that the result has the same bits on any number of ranks. Memory is bounded:

- Quantiles come from a sample of at most QUANTILE_ROWS training rows, those with the smallest
  hashes of their numbers. They are exact if there are no more training rows. Else the share of the
  rows below a quantile is off by more than 0.01 with a probability below 1e-5, and by some 0.002
  usually (Dvoretzky, Kiefer, Wolfowitz 1956, with the constant of Massart 1990). Of a column with
  missing values the sample has fewer values.
- Texts are counted exactly while a column has at most COUNTED_TEXTS different ones. Else a count is
  too small by at most (number of rows) / (COUNTED_TEXTS + 1), and a text with fewer rows may be
  missing (Misra and Gries 1982; merged as by Agarwal et al., "Mergeable summaries", 2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hpc_train.data.arrays.statistics import Moments, moments_of, together
from hpc_train.data.tables.features import Categories, NumericFeature, RawColumns
from hpc_train.data.tables.row_files import read_array, read_texts, write_array, write_texts
from hpc_train.data.tables.schema import TableSchema
from hpc_train.data.tables.splits import (
    HELD_OUT,
    LEFT_OUT,
    NEEDED_ROLES,
    SAMPLE_SEED,
    TRAIN,
    RowSplit,
    as_shares,
    row_hashes,
)
from hpc_train.data.tables.targets import class_texts
from hpc_train.errors import DataError

QUANTILE_ROWS = 1 << 16
SLACK = 1.2  # factor of the rows that are looked at, because how many are found is chance
COUNTED_TEXTS = 1 << 16
MOST_TEXTS = 1 << 18  # of a column of a portion, in memory
CLASS_LIMIT = 1 << 12


def sampled_share(rows: float) -> float:
    """The share of the rows to look at, so that QUANTILE_ROWS are found among about `rows`."""
    return min(1.0, SLACK * QUANTILE_ROWS / max(rows, 1.0))


def smallest(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which rows of a sample have the QUANTILE_ROWS smallest hashes, bool (N,)."""
    if len(hashes) <= QUANTILE_ROWS:
        return np.ones(len(hashes), bool)
    return np.asarray(hashes <= np.partition(hashes, QUANTILE_ROWS - 1)[QUANTILE_ROWS - 1])


def only_largest(counts: dict[str, int], most: int) -> dict[str, int]:
    """Counts of at most `most` texts: the next largest count is taken from each."""
    if len(counts) <= most:
        return counts
    values = np.fromiter(counts.values(), np.int64, len(counts))
    next_largest = int(np.partition(values, len(values) - most - 1)[len(values) - most - 1])
    return {text: n - next_largest for text, n in counts.items() if n > next_largest}


def ranked(counts: Mapping[str, int], most: int | None = None) -> list[str]:
    """Texts by count, the largest first, and equal ones by value."""
    return sorted(counts, key=lambda text: (-counts[text], text))[:most]


@dataclass
class NumberColumn:
    """What is known of the numbers of a feature, of a target or of the weights."""

    moments: list[Moments] = field(default_factory=list)
    least: float = math.inf
    most: float = -math.inf
    sample: list[np.ndarray] = field(default_factory=list)

    def add(self, values: npt.NDArray[np.float64], sampled: np.ndarray | None = None) -> None:
        """Add the numbers of some training rows.

        Args:
            values: float64 (N,); NaN is a missing one.
            sampled: which of them are in the sample, bool (N,); None: none is.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # it is told when all are together
            self.moments.append(moments_of(values))
        there = values[~np.isnan(values)]
        if len(there):
            self.least = min(self.least, float(there.min()))
            self.most = max(self.most, float(there.max()))
        if sampled is not None:
            self.sample.append(values[sampled])


def check_classes(name: str, counts: Mapping[str, int]) -> None:
    """Make sure that a target has few enough classes.

    Raises:
        DataError: it has too many.
    """
    if len(counts) > CLASS_LIMIT:
        raise DataError(
            f"the target {name} has more than {CLASS_LIMIT} classes",
            "give --task regression, or another target",
        )


class PortionStatistics:
    """The statistics of a portion's rows.

    Args:
        schema: the table's schema.
        split: how the table's rows are divided.
        candidates: the numeric features that the table may get, unscaled.
        share: share of the training rows that are in the sample.
    """

    def __init__(
        self,
        schema: TableSchema,
        split: RowSplit,
        candidates: Sequence[NumericFeature],
        share: float,
    ) -> None:
        self.schema, self.split, self.share = schema, split, share
        self.candidates = candidates
        self.numbers = [NumberColumn() for _ in candidates]
        texts = [c.name for c in schema.features if c.kind == "categorical"]
        self.texts: dict[str, dict[str, int]] = {name: {} for name in texts}
        self.missing = dict.fromkeys(texts, 0)
        self.hashes: list[np.ndarray] = []
        self.rows = np.zeros(LEFT_OUT + len(NEEDED_ROLES), np.int64)  # by what `RowSplit.of` says
        self.targets = [NumberColumn() for _ in self._number_targets()]
        self.weights = NumberColumn()
        self.classes: tuple[dict[str, int], dict[str, int]] = {}, {}  # of TRAIN and of HELD_OUT

    def _number_targets(self) -> tuple[str, ...]:
        return self.schema.targets if self.schema.task in ("regression", "multilabel") else ()

    def add(self, key: int, numbers: np.ndarray, columns: RawColumns) -> None:
        """Add some rows of the portion.

        Args:
            key: the portion's key.
            numbers: number of each row in it, int64 (N,).
            columns: the values of all columns.

        Raises:
            DataError: the target has too many classes.
        """
        where = self.split.of(key, numbers, columns)
        self.rows += np.bincount(where, minlength=len(self.rows))
        if self.schema.task == "classification":
            [name] = self.schema.targets
            for split in (TRAIN, HELD_OUT):
                _count(self.classes[split], class_texts(columns[name][where == split]))
            check_classes(name, self.classes[TRAIN])
        training = where == TRAIN
        own = {name: values[training] for name, values in columns.items()}
        hashes = row_hashes(key, numbers[training], SAMPLE_SEED)
        sampled = as_shares(hashes) < self.share
        self.hashes.append(hashes[sampled])
        for number, feature in zip(self.numbers, self.candidates, strict=True):
            number.add(feature.values(own), sampled)
        for name, counts in self.texts.items():
            self.missing[name] += int((own[name].codes < 0).sum())
            _count(counts, own[name])
            if len(counts) > MOST_TEXTS:  # a portion may be a row group of any size
                self.texts[name] = only_largest(counts, COUNTED_TEXTS)
        for target, name in zip(self.targets, self._number_targets(), strict=True):
            target.add(own[name])
        if self.schema.weight is not None:
            self.weights.add(own[self.schema.weight])

    def write(self, file: BinaryIO) -> dict[str, Any]:
        """Write what there is of each column to a file.

        Returns:
            The other numbers, and places in the file, as JSON values. They are few, because rank 0
            has those of all portions in memory.
        """
        hashes = np.concatenate([*self.hashes, np.empty(0, np.uint64)])
        begin = write_array(file, hashes)
        samples = [
            write_array(file, np.concatenate([*one.sample, np.empty(0)])) for one in self.numbers
        ]
        texts = []
        for name, every in self.texts.items():
            counts = only_largest(every, COUNTED_TEXTS)
            texts.append([write_texts(file, [*counts]), self.missing[name]])
            write_array(file, np.array([*counts.values()], np.int64))
        columns = [*self.numbers, *self.targets, self.weights]
        rows = [[*together(one.moments), one.least, one.most] for one in columns]
        return {
            "rows": self.rows.tolist(),
            "classes": self.classes,
            "hashes": begin,
            "samples": write_array(file, np.array(samples, np.int64)),
            "texts": write_array(file, np.array(texts, np.int64).reshape(-1, 2)),
            "numbers": write_array(file, np.array(rows, np.float64)),
        }


def _count(counts: dict[str, int], values: Categories) -> None:
    found = np.bincount(values.codes + 1, minlength=len(values.values) + 1)[1:]
    for place in np.flatnonzero(found).tolist():
        text = values.values[place]
        counts[text] = counts.get(text, 0) + int(found[place])


@dataclass(frozen=True)
class NumberSummary:
    """What is known of the numbers of a column's training rows.

    Args:
        count: how many are not missing.
        missing: how many are missing.
        mean: their mean.
        std: their standard deviation (of the population).
        least: the least one.
        most: the largest one.
    """

    count: int
    missing: int
    mean: float
    std: float
    least: float
    most: float


def summaries_of(
    trees: Sequence[Any], opened: Callable[[int], BinaryIO]
) -> tuple[NumberSummary, ...]:
    """The numbers of all portions together: of each feature, each target and the weights.

    Args:
        trees: what `PortionStatistics.write` returned, for all portions in their order.
        opened: opens the file that it wrote for a portion.
    """
    every: list[tuple[Moments, float, float]] = []
    for number, tree in enumerate(trees):
        with opened(number) as file:
            rows = read_array(file, tree["numbers"]).tolist()
        every = every or [((0, 0.0, 0.0, 0), math.inf, -math.inf)] * len(rows)
        every = [
            (together([before, tuple(moments)]), min(least, own_least), max(most, own_most))
            for (before, least, most), (*moments, own_least, own_most) in zip(
                every, rows, strict=True
            )
        ]
    return tuple(_summary(*one) for one in every)


def _summary(moments: Moments, least: float, most: float) -> NumberSummary:
    count, mean, squares, missing = moments
    if not count:
        return NumberSummary(0, int(missing), 0.0, 0.0, 0.0, 0.0)
    return NumberSummary(int(count), int(missing), mean, math.sqrt(squares / count), least, most)


def add_counts(counts: dict[str, int], file: BinaryIO, place: int) -> dict[str, int]:
    """The counts of texts of some portions, and of one more.

    Args:
        counts: those of the portions before it.
        file: the portion's file.
        place: the place of its texts there.
    """
    texts = read_texts(file, place)
    for text, number in zip(texts, read_array(file).tolist(), strict=True):
        counts[text] = counts.get(text, 0) + number
    return only_largest(counts, COUNTED_TEXTS)
