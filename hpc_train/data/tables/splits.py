"""Which rows of a table are trained on, which are held out, and which are left out.

It depends on the table's values and on where a row lies in its file, never on the number of ranks
or the size of shards. A row is known by the path of its file below the folder of all files, the
place in it where its portion begins, and its number in the portion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.data.tables.features import Categories, RawColumns
from hpc_train.data.tables.schema import TableSchema
from hpc_train.seeds import GAMMA, scramble

TRAIN, HELD_OUT, LEFT_OUT = 0, 1, 2
NEEDED_ROLES = ("target", "group", "time", "weight")  # a row without one has LEFT_OUT + its place
SPLIT_SEED, SAMPLE_SEED, GROUP_SEED = (np.uint64(number) for number in (1, 2, 3))


def portion_key(path: str, begin: int) -> int:
    """A hash of the place of a portion, 64 bits.

    Args:
        path: path of its file below the folder of all files.
        begin: where it begins there.
    """
    return int(xxhash.xxh3_64_intdigest(f"{path}:{begin}".encode(errors="surrogateescape")))


def row_hashes(key: int, numbers: np.ndarray, seed: np.uint64) -> npt.NDArray[np.uint64]:
    """Hashes of rows.

    Args:
        key: the key of their portion.
        numbers: numbers of the rows in it, int64 (N,).
        seed: what the hashes are used for.

    Returns:
        uint64 (N,).
    """
    with np.errstate(over="ignore"):
        begin = scramble(np.array([key], np.uint64) + seed * np.uint64(GAMMA))
        return scramble(begin + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))


def as_shares(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Hashes as evenly distributed numbers from 0 to 1, float64 (N,)."""
    shares: npt.NDArray[np.float64] = (hashes >> np.uint64(11)) / float(1 << 53)
    return shares


def is_missing(values: np.ndarray | Categories) -> npt.NDArray[np.bool_]:
    """Which values of a column are missing, bool (N,). Infinite numbers are, too."""
    if isinstance(values, Categories):
        lost: npt.NDArray[np.bool_] = values.codes < 0
        return lost
    if values.dtype == object:
        return np.array([value is None for value in values.tolist()], np.bool_)
    return np.asarray(~np.isfinite(values))


@dataclass(frozen=True)
class RowSplit:
    """How the rows of a table are divided.

    A row is left out if its target, group, time or weight is missing.

    Args:
        schema: the table's schema.
        validation: share of the rows, or of the groups, to hold out.
        cut: rows of a later time are held out; None: the table has no time, or nothing is held out.
    """

    schema: TableSchema
    validation: float
    cut: float | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at."""
        return tuple(name for names in self._of_roles() for name in names)

    def of(self, key: int, numbers: np.ndarray, columns: RawColumns) -> npt.NDArray[np.int8]:
        """TRAIN, HELD_OUT, or for the first role that is missing LEFT_OUT + its place, int8 (N,).

        Args:
            key: the key of the rows' portion.
            numbers: numbers of the rows in it, int64 (N,).
            columns: their values; at least those of `columns`.
        """
        found = np.where(self._held_out(key, numbers, columns), HELD_OUT, TRAIN).astype(np.int8)
        for place, names in reversed([*enumerate(self._of_roles())]):
            for name in names:
                found[is_missing(columns[name])] = LEFT_OUT + place
        return found

    def _of_roles(self) -> tuple[tuple[str, ...], ...]:
        """The columns of each role."""
        of = self.schema
        return of.targets, *((n,) if n is not None else () for n in (of.group, of.time, of.weight))

    def _held_out(self, key: int, numbers: np.ndarray, columns: RawColumns) -> Any:
        if self.schema.time is not None:
            return np.zeros(len(numbers), bool) if self.cut is None else self._later(columns)
        if self.schema.group is not None:
            hashes = _group_hashes(columns[self.schema.group])
        else:
            hashes = row_hashes(key, numbers, SPLIT_SEED)
        return as_shares(hashes) < self.validation

    def _later(self, columns: RawColumns) -> Any:
        assert self.schema.time is not None
        with np.errstate(invalid="ignore"):
            return columns[self.schema.time] > self.cut


def _group_hashes(values: np.ndarray | Categories) -> npt.NDArray[np.uint64]:
    """Hashes of groups, equal for equal values, uint64 (N,)."""
    if isinstance(values, Categories):
        texts = (
            xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) for text in values.values
        )
        known = np.fromiter(texts, np.uint64, len(values.values))
        found = np.append(known, np.uint64(0))[values.codes]
    else:
        found = (np.asarray(values, np.float64) + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    with np.errstate(over="ignore"):
        return scramble(found + GROUP_SEED * np.uint64(GAMMA))
