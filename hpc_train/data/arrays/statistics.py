"""Means and standard deviations of variables, by one pass that the ranks share.

The values are cut into fixed pieces. Each rank reads some of them. The moments of all pieces are
then put together in the order of the pieces, so the result has the same bits on any number of
ranks. The formula for two parts is that of Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances" (1979).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from hpc_train import files
from hpc_train.errors import DataError, HpcTrainError, RankError

V = TypeVar("V")
PIECE_VALUES = 1 << 22  # most values of a piece, unless one chunk has more


class RankGroup(Protocol):
    """What is needed of a group of ranks, such as `runtime.world`."""

    @property
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def gathered(self, value: V, what: str = ..., /) -> list[V]:
        """The values of all ranks, by rank. Collective."""


@dataclass(frozen=True)
class ArrayStatistics:
    """Moments of each variable over all values that are not missing.

    Args:
        mean: the mean of each variable, by its name.
        std: the standard deviation (of the population); 0 if all values are equal.
        count: number of values that are not missing.
        missing: number of values that are NaN or stand for missing ones.
    """

    mean: Mapping[str, float]
    std: Mapping[str, float]
    count: Mapping[str, int]
    missing: Mapping[str, int]

    def write(self, path: Path | str) -> None:
        """Write the numbers to a JSON file, with all their digits. One rank calls it."""
        files.write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> ArrayStatistics:
        """Read what `write` has written.

        Raises:
            DataError: the file is missing or holds something else.
        """
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
            mean, std, count, missing = (
                {str(name): float(value) for name, value in tree[key].items()}
                for key in ("mean", "std", "count", "missing")
            )
            if not mean.keys() == std.keys() == count.keys() == missing.keys():
                raise ValueError("its variables differ")
            whole = [{name: int(value) for name, value in one.items()} for one in (count, missing)]
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}", "write the statistics first") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(f"{path} holds no statistics ({error})", "write them again") from None
        return cls(mean, std, *whole)


PieceReader = Callable[[], np.ndarray]
Box = tuple[tuple[int, ...], tuple[int, ...]]
Moments = tuple[int, float, float, int]  # values, their mean, sum of squared deviations, missing


def boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Box]:
    """Cut a variable into boxes of whole chunks, each with about PIECE_VALUES values.

    Args:
        shape: lengths of the variable's axes.
        chunk: lengths of a chunk's axes; ones for a variable without chunks.

    Yields:
        The first index along each axis, and the lengths.
    """
    block = [min(*pair) for pair in zip(chunk, shape, strict=True)]
    for axis in reversed(range(len(shape))):
        times = max(1, PIECE_VALUES // max(1, math.prod(block)))
        block[axis] = min(shape[axis], chunk[axis] * times)
    if not all(block):
        return
    for begin in product(*(range(0, n, step) for n, step in zip(shape, block, strict=True))):
        lengths = zip(begin, block, shape, strict=True)
        yield begin, tuple(min(step, n - first) for first, step, n in lengths)


def moments_of(values: np.ndarray) -> Moments:
    """The moments of float32 values, in float64. NaNs are counted and left out."""
    wide = values.astype(np.float64).reshape(-1)
    there = ~np.isnan(wide)
    if not there.all():
        wide = wide[there]
    if not len(wide):
        return 0, 0.0, 0.0, values.size
    if (wide == wide[0]).all():  # rounding would give a small deviation
        return len(wide), float(wide[0]), 0.0, values.size - len(wide)
    mean = float(wide.sum()) / len(wide)
    wide -= mean
    return len(wide), mean, float(np.square(wide, out=wide).sum()), values.size - len(wide)


def together(parts: Iterable[Moments]) -> Moments:
    """The moments of all values of several parts. The order of the parts decides the last bits."""
    count, mean, squares, missing = 0, 0.0, 0.0, 0
    for others, their_mean, their_squares, nans in parts:
        missing += nans
        if others:
            both = count + others
            difference = their_mean - mean
            squares += their_squares + difference * difference * (count * others / both)
            mean += difference * (others / both)
            count = both
    return count, mean, squares, missing


def shared_moments(
    names: Iterable[str],
    read: Callable[[str], Iterator[PieceReader]],
    ranks: RankGroup,
) -> ArrayStatistics:
    """The statistics of variables, whose pieces the ranks read in turn. Collective.

    Args:
        names: the variables.
        read: gives the pieces of a variable, each as a function that reads it.
        ranks: the ranks that share the work.

    Raises:
        HpcTrainError: a rank has failed, or a variable has infinite values; on all ranks.
    """
    failed: HpcTrainError | None = None
    mine: dict[str, dict[int, Moments]] = {}
    try:
        for name in names:
            # Two variables need not begin at the same rank, but their pieces are always the same.
            with np.errstate(over="ignore", invalid="ignore"):  # it is told below, by all ranks
                mine[name] = {
                    number: moments_of(piece())
                    for number, piece in enumerate(read(name))
                    if number % ranks.size == ranks.rank
                }
    except HpcTrainError as error:
        failed = error
    except Exception as error:  # noqa: BLE001  # the other ranks must hear of any error
        failed = RankError(f"rank {ranks.rank}: {type(error).__name__}: {error}")
    every = agreed_values(ranks, mine, failed, "the moments of the variables")
    found: dict[str, Any] = {"mean": {}, "std": {}, "count": {}, "missing": {}}
    for name in mine if failed is None else ():
        parts = {number: one for some in every for number, one in some[name].items()}
        count, mean, squares, missing = together(parts[number] for number in sorted(parts))
        if not count:
            raise DataError(
                f"variable {name} has no values that are not missing", "leave the variable out"
            )
        if not math.isfinite(mean) or not math.isfinite(squares):
            raise DataError(
                f"variable {name} has infinite values, or some too large for a standard deviation",
                "write NaN or the variable's missing_value in their place",
            )
        found["mean"][name], found["std"][name] = mean, math.sqrt(squares / count)
        found["count"][name], found["missing"][name] = count, missing
    return ArrayStatistics(**found)


def agreed_values(ranks: RankGroup, value: V, failed: HpcTrainError | None, what: str) -> list[V]:
    """The values of all ranks, or the error of the first one that has failed. Collective.

    Raises:
        HpcTrainError: a rank has failed; on all ranks.
    """
    values, errors = [], []
    for theirs, error in ranks.gathered((value, failed), what):
        values.append(theirs)
        errors += [error] if error is not None else []
    if errors:
        errors[0].agreed = ranks.size > 1
        raise errors[0]
    return values
