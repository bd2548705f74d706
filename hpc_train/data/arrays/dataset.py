"""A data set of samples, windows and tiles of other people's HDF5 and NetCDF-4 files.

A helper process looks up once where the values lie (`indexing`). Then any number of threads and
ranks read them by file offset (`regions`), without the HDF5 library.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from hpc_train.data.arrays.indexing import FileIndex, look_up
from hpc_train.data.arrays.regions import BoxReader
from hpc_train.data.arrays.statistics import (
    ArrayStatistics,
    PieceReader,
    RankGroup,
    agreed_values,
    boxes,
    shared_moments,
)
from hpc_train.data.arrays.stored import Stored
from hpc_train.errors import DataError, HpcTrainError, UserError

LARGEST_SAMPLE = 1 << 28  # values of one variable in a sample, which a damaged shape could exceed


Index = tuple[int, ...]  # one number for each axis


@dataclass(frozen=True)
class Window:
    """Consecutive rows of the time axis that make a sample.

    Args:
        steps: rows of the past, the model's input.
        ahead: rows that follow them, the model's target. With 0 a sample has no target.
        stride: rows between the beginnings of two windows.
        continuous: whether each file begins where the one before it ends. Then windows cross from
            file to file; otherwise none does.
    """

    steps: int
    ahead: int = 0
    stride: int = 1
    continuous: bool = False


@dataclass(frozen=True)
class Tile:
    """A box of the last axes that makes a sample.

    Args:
        shape: lengths along the last axes, such as (64, 64).
        stride: distances between the beginnings of two tiles; by default the lengths. What is left
            at the end of an axis, and is less than a tile, is left out.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


class _Alone:
    rank, size = 0, 1

    def gathered(self, value: Any, what: str = "", /) -> list[Any]:
        return [value]


class Arrays:
    """Samples of variables of HDF5 and NetCDF-4 files, as float32 tensors.

    A sample is one row of the first axis, or a window of rows, or a tile of them. Files continue
    each other along that axis. Windows are counted first by time, then by tile. It is a map-style
    data set, and has `fetch`. It can be pickled, and several threads may read from it at once.

    Make it before MPI starts, or call `hpc_train.start_workers()` before MPI starts, or run
    `hpc-train data index FILE...` once: a rank that uses MPI cannot look into HDF5 files by itself.

    Args:
        files: a file, or several in the order of their time.
        variables: the path of a variable in the files; or several, which become a new axis
            (channels) before the axes of a row. They have the same lengths in all files, except
            along the first axis.
        window: makes windows of rows; by default a sample is one row.
        tile: makes tiles of the last axes; by default a sample has them whole.
        stack: whether several variables become one tensor. If not, a sample is a dict of tensors,
            by variable, which may have different shapes.
        missing: "nan": what stands for a missing value becomes NaN; or "refuse": reading a sample
            with a NaN is an error.
        normalise: subtract each variable's mean and divide by its standard deviation, if that is
            not 0.
        group: the ranks that share the look-up, such as `runtime.world`. Then rank 0 does it, and
            the call is collective. By default each rank does it for itself.

    Raises:
        DataError: a file or variable cannot be read, or they do not fit together.
        UserError: an argument is wrong; or MPI runs, and nothing has prepared the look-up.
    """

    draws_random_numbers: ClassVar[bool] = False  # see `Reader.may_draw`

    def __init__(
        self,
        files: Path | str | Sequence[Path | str],
        variables: str | Sequence[str],
        *,
        window: Window | None = None,
        tile: Tile | None = None,
        stack: bool = True,
        missing: Literal["nan", "refuse"] = "nan",
        normalise: ArrayStatistics | None = None,
        group: RankGroup | None = None,
    ) -> None:
        paths = [files] if isinstance(files, (str, Path)) else list(files)
        names = [variables] if isinstance(variables, str) else variables
        self.names = tuple(name.strip("/") for name in names)
        self.stack = None if isinstance(variables, str) else stack
        self.window, self.tile, self.missing = window, tile, missing
        _check_arguments(paths, self.names, missing, window)
        self._normal = _normal(normalise, self.names)
        indexes = _indexed([Path(path).absolute() for path in paths], self.names, group)
        self._boxes = BoxReader(indexes)
        rows = [_rows(index) for index in indexes]
        self._row_ends = [*accumulate(rows)]
        self._shapes = {name: _row_shape(indexes, name) for name in self.names}
        self._corners: list[tuple[int, ...]] = [()]
        if tile is not None:
            self._corners = _corners(tile, self._shapes)
            axes = len(tile.shape)
            self._shapes = {n: shape[:-axes] + tile.shape for n, shape in self._shapes.items()}
        if self.stack and len(set(self._shapes.values())) > 1:
            raise DataError(
                f"the variables have different shapes: {self._shapes}", "give stack=False"
            )
        window = window or Window(1)
        parts = [(0, window.steps), (window.steps, window.ahead)]
        self._parts = parts if window.ahead else parts[:1]
        length = window.steps + window.ahead
        for name, shape in self._shapes.items():
            if (count := length * math.prod(shape)) > LARGEST_SAMPLE:
                raise DataError(f"a sample takes {count} values of {name}", "make tiles of it")
        pieces = [sum(rows)] if window.continuous else rows
        counts = [max(0, (have - length) // window.stride + 1) for have in pieces]
        self._window_ends = [*accumulate(counts)]
        if not sum(rows):
            raise DataError(
                f"{paths[0]}: variable {self.names[0]} has no rows", "give files with some rows"
            )
        if not len(self):
            raise DataError(
                f"the files have {sum(rows)} rows in all: not one window of {length}"
                if window.continuous
                else f"no file has a window of {length} rows; they have up to {max(rows)}",
                "use a shorter window or more data",
            )

    def __len__(self) -> int:
        return self._window_ends[-1] * len(self._corners)

    def __deepcopy__(self, memo: Any) -> Arrays:
        return self  # several threads may read from it

    def __getitem__(self, index: int) -> Any:
        """Read a sample; as `fetch`, without the axis of samples."""
        if not -len(self) <= operator.index(index) < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return _first(self.fetch([index % len(self)]))

    def fetch(self, indices: Sequence[int] | np.ndarray) -> Any:
        """Read samples.

        Args:
            indices: N numbers of samples.

        Returns:
            A float32 tensor of shape (N, steps, channels, ...). The axis `steps` is there if the
            data set has windows, and the axis `channels` if several variables are stacked. With
            `stack=False` it is a dict of tensors. With windows that have rows ahead it is a pair of
            these, the past and what is ahead.

        Raises:
            DataError: a file cannot be read, has changed or is damaged, or a value is missing.
        """
        parts = tuple(self._fetched(indices, first, rows) for first, rows in self._parts)
        return parts if len(parts) > 1 else parts[0]

    def close(self) -> None:
        """Close the files. They are opened again if samples are read later."""
        self._boxes.close()

    def statistics(self, group: RankGroup | None = None) -> ArrayStatistics:
        """The mean and the standard deviation of each variable over all values of the files.

        NaNs are left out and counted. Collective if a group is given. Its ranks then share the
        reading, and the result has the same bits on any number of ranks. It does not depend on
        windows, tiles, and what `normalise` was.

        Args:
            group: the ranks that read together, such as `runtime.world`.

        Raises:
            DataError: a file cannot be read or is damaged, or a variable has infinite values or
                only missing ones; on all ranks.
        """
        return shared_moments(self.names, self._pieces, group or _Alone())

    def _pieces(self, name: str) -> Iterator[PieceReader]:
        for number, index in enumerate(self._boxes.indexes):
            stored = index.variables[name]
            chunk = stored.chunks.shape if stored.chunks else (1,) * len(stored.shape)
            for begin, lengths in boxes(stored.shape, chunk):
                yield partial(self._piece, number, name, begin, lengths)

    def _piece(self, number: int, name: str, begin: Index, lengths: Index) -> np.ndarray:
        stored = self._boxes.indexes[number].variables[name]
        same = stored.dtype == np.float32 and (stored.scale, stored.add) == (1.0, 0.0)
        out = np.empty(lengths, np.float32 if same else np.float64)  # float32 would round others
        self._read_box(number, name, begin, out, (0.0, 1.0))
        return out

    def _fetched(self, indices: Sequence[int] | np.ndarray, first: int, rows: int) -> Any:
        """Some rows of each window: a tensor, or a dict of them."""
        count = len(indices)
        if self.stack:
            shape = self._shapes[self.names[0]]
            both = np.empty((count, rows, len(self.names), *shape), np.float32)
            into = {name: both[:, :, n] for n, name in enumerate(self.names)}
            made: Any = both
        else:
            made = into = {
                name: np.empty((count, rows, *shape), np.float32)
                for name, shape in self._shapes.items()
            }
        for place, index in enumerate(indices):
            window, corner = divmod(operator.index(index), len(self._corners))
            row = self._first_row(window) + first
            for name in self.names:
                self._read_rows(name, row, self._corners[corner], into[name][place])
        if self.stack is None:
            made = made[self.names[0]]
        if isinstance(made, dict):
            return {name: self._tensor(values) for name, values in made.items()}
        return self._tensor(made)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values if self.window else values[:, 0])

    def _first_row(self, window: int) -> int:
        """The first row of a window, counted over all files."""
        spec = self.window or Window(1)
        if not 0 <= window < self._window_ends[-1]:
            raise IndexError(f"window {window} of {self._window_ends[-1]}")
        if spec.continuous:
            return window * spec.stride
        file = bisect_right(self._window_ends, window)
        within = window - (self._window_ends[file - 1] if file else 0)
        return (self._row_ends[file - 1] if file else 0) + within * spec.stride

    def _read_rows(self, name: str, row: int, corner: tuple[int, ...], out: np.ndarray) -> None:
        """Fill `out` with rows of a variable, which may lie in several files."""
        before = (0,) * (out.ndim - 1 - len(corner)) + corner
        done = 0
        while done < len(out):
            file = bisect_right(self._row_ends, row + done)
            within = row + done - (self._row_ends[file - 1] if file else 0)
            some = min(len(out) - done, self._row_ends[file] - row - done)
            part = out[done : done + some]
            self._read_box(file, name, (within, *before), part, self._normal[name])
            if self.missing == "refuse" and np.isnan(part).any():
                raise DataError(
                    f"{self._boxes.indexes[file].path}: variable {name} has missing values in rows "
                    f"{within} to {within + some - 1}",
                    'give missing="nan", or leave these rows out',
                )
            done += some

    def _read_box(
        self, number: int, name: str, begin: Index, out: np.ndarray, normal: tuple[float, float]
    ) -> None:
        """Fill `out` with values of a file, less a mean, by a deviation."""
        stored = self._boxes.indexes[number].variables[name]
        as_it_is = (stored.scale, stored.add, *normal) == (1.0, 0.0, 0.0, 1.0)
        if as_it_is and stored.dtype == np.float32 and not stored.missing:
            self._boxes.read(number, name, begin, out)
            return
        raw = np.empty(out.shape, stored.dtype)
        self._boxes.read(number, name, begin, raw)
        _convert(stored, raw, out, normal)


def _convert(stored: Stored, raw: np.ndarray, out: np.ndarray, normal: tuple[float, float]) -> None:
    """Fill `out` with what the stored values mean."""
    small = stored.dtype.kind == "f" and stored.dtype.itemsize <= 4
    plain = (stored.scale, stored.add) == (1.0, 0.0)
    mean, deviation = normal
    with np.errstate(all="ignore"):  # values may be too large for float32; then they are infinite
        wide: Any = raw.astype(np.float32 if small and plain else np.float64)
        if not plain:
            wide *= stored.scale
            wide += stored.add
        if normal != (0.0, 1.0):
            wide -= mean
            wide /= deviation
        out[...] = wide
    for value in stored.missing:
        out[raw == value] = np.nan


def _first(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(_first, found))
    if isinstance(found, dict):
        return {name: values[0] for name, values in found.items()}
    return found[0]


def _check_arguments(
    paths: Sequence[Any], names: tuple[str, ...], missing: str, window: Window | None
) -> None:
    if wrong := [path for path in paths if not isinstance(path, (str, Path))]:
        raise UserError(f"{wrong[0]!r} is given as a file", "give paths as str or Path")
    for what, given in (("file", paths), ("variable", names)):
        if not given:
            raise UserError(f"no {what} is given", f"give one {what} or more")
        if len(set(given)) < len(given):
            raise UserError(f"a {what} is given twice", f"give each {what} once")
    if missing not in ("nan", "refuse"):
        raise UserError(f"missing is {missing!r}", 'give "nan" or "refuse"')
    if window is not None and (min(window.steps, window.stride) < 1 or window.ahead < 0):
        raise UserError(f"{window} is not possible", "give steps and stride of 1 or more")


def _normal(
    statistics: ArrayStatistics | None, names: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """What to subtract from each variable, and what to divide it by."""
    if statistics is None:
        return dict.fromkeys(names, (0.0, 1.0))
    if lacking := [name for name in names if name not in statistics.mean]:
        raise UserError(
            f"the statistics have no variable {lacking[0]}", "compute them of the same variables"
        )
    return {name: (statistics.mean[name], statistics.std[name] or 1.0) for name in names}


def _indexed(paths: list[Path], names: tuple[str, ...], group: RankGroup | None) -> list[FileIndex]:
    if group is None:
        return look_up(paths, names)
    found: list[FileIndex] = []
    failed: HpcTrainError | None = None
    if group.rank == 0:
        try:
            found = look_up(paths, names)
        except HpcTrainError as error:
            failed = error
    return agreed_values(group, found, failed, "where the variables lie in their files")[0]


def _rows(index: FileIndex) -> int:
    """Number of rows of a file, which all its variables have."""
    rows = {name: stored.shape[0] for name, stored in index.variables.items()}
    if len(set(rows.values())) > 1:
        raise DataError(
            f"{index.path}: the variables have different numbers of rows: {rows}",
            "give variables with the same first axis",
        )
    return next(iter(rows.values()))


def _row_shape(indexes: list[FileIndex], name: str) -> tuple[int, ...]:
    """The shape of a row of a variable, which it has in all files."""
    shape = indexes[0].variables[name].shape[1:]
    for index in indexes:
        if index.variables[name].shape[1:] != shape:
            raise DataError(
                f"{index.path}: a row of {name} has the shape {index.variables[name].shape[1:]}, "
                f"and {shape} in {indexes[0].path}",
                "give files of the same grid",
            )
    return shape


def _corners(tile: Tile, shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first index of each tile along the last axes."""
    stride = tile.stride or tile.shape
    grids = {shape[-len(tile.shape) :] for shape in shapes.values()}
    axes = {len(stride), len(tile.shape), *map(len, grids)}
    if len(grids) > 1 or len(axes) > 1 or min(*tile.shape, *stride, *axes) < 1:
        raise UserError(
            f"{tile} is not possible for variables with rows of the shapes {shapes}",
            "give a length for each of the last axes, which are the same in all variables",
        )
    lengths = next(iter(grids))
    if any(have < wanted for have, wanted in zip(lengths, tile.shape, strict=True)):
        raise UserError(f"{tile} is larger than a row of shape {lengths}", "use a smaller one")
    ranges = [
        range(0, have - wanted + 1, step)
        for have, wanted, step in zip(lengths, tile.shape, stride, strict=True)
    ]
    return list(product(*ranges))
