"""Draws the rows of a table so that each class comes equally often.

The rows of each class are a data set, and a mixture with equal weights deals the positions of the
order to them. So the order is a pure function of seed and position, as all orders are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpc_train.data.mixture import Mixture
from hpc_train.errors import ConfigError

STRIDE = 256  # least number of rows between two that the index counts
ROWS_COUNTED_AT_ONCE = 1 << 20


class ClassIndex:
    """Finds the rows of each class of a table.

    It keeps the class of each row, and for every `stride` rows how many of each class come before.
    With up to 256 classes that takes at most 1.3 bytes for each row, with more at most 2.3.

    Args:
        numbers: the class of each row, integers (rows,) from 0 to `classes` - 1. They are kept
            without a copy if their type is the smallest that holds them, uint8 or uint16.
        classes: number of classes, at most 65536.
    """

    def __init__(self, numbers: np.ndarray, classes: int) -> None:
        self.classes, self.stride = classes, max(STRIDE, 16 * classes)
        self.numbers = numbers.astype(class_dtype(classes), copy=False)
        strides = -(-len(numbers) // self.stride)
        self._before = np.zeros((strides + 1, classes), np.int64 if len(numbers) >> 32 else "u4")
        unit = max(1, ROWS_COUNTED_AT_ONCE // self.stride) * self.stride
        for begin in range(0, len(numbers), unit):
            some = self.numbers[begin : begin + unit].astype(np.int64)
            first, count = begin // self.stride, -(-len(some) // self.stride)
            keys = np.arange(len(some)) // self.stride * classes + some
            found = np.bincount(keys, minlength=count * classes)
            self._before[first + 1 : first + 1 + count] = found.reshape(count, classes)
        np.cumsum(self._before, axis=0, out=self._before)

    def count(self, number: int) -> int:
        """The number of rows of a class."""
        return int(self._before[-1, number])

    def rows(self, number: int, places: np.ndarray) -> np.ndarray:
        """Row numbers, int64 (N,): of the class's rows in their order, those at some places.

        Args:
            number: the number of the class.
            places: int64 (N,), from 0 to the class's count - 1.
        """
        before = self._before[:, number]
        strides = np.searchsorted(before, places, side="right") - 1
        wanted = places - before[strides].astype(np.int64)
        found = np.empty(len(places), np.int64)
        whole = len(self.numbers) // self.stride
        windows = self.numbers[: whole * self.stride].reshape(whole, self.stride)
        inside = np.flatnonzero(strides < whole)
        at_once = max(1, ROWS_COUNTED_AT_ONCE // self.stride)
        for begin in range(0, len(inside), at_once):
            some = inside[begin : begin + at_once]
            seen = np.cumsum(windows[strides[some]] == number, axis=1, dtype=np.int32)
            found[some] = (seen > wanted[some, None]).argmax(axis=1)
        last = strides == whole
        if last.any():
            of_class = np.flatnonzero(self.numbers[whole * self.stride :] == number)
            found[last] = of_class[wanted[last]]
        return found + strides * self.stride


class RowsOfClass:
    """The rows of a data set that are of one class, in their order.

    Args:
        dataset: the data set, with `fetch`.
        index: the index of its rows.
        number: the number of the class.
    """

    def __init__(self, dataset: Any, index: ClassIndex, number: int) -> None:
        self.dataset, self.index, self.number = dataset, index, number

    def __len__(self) -> int:
        return self.index.count(self.number)

    def fetch(self, indices: Sequence[int] | np.ndarray) -> Any:
        """A batch of the class's rows."""
        return self.dataset.fetch(self.index.rows(self.number, np.asarray(indices, np.int64)))

    @property
    def samples_per_block(self) -> int:
        """The number of the class's rows that lie in one block, on average."""
        block = getattr(self.dataset, "samples_per_block", 1)
        return max(1, block * len(self) // len(self.dataset))

    @property
    def ahead(self) -> Callable[[np.ndarray], None]:
        """Tells the data set of rows that will be read later, if it takes such hints."""
        tell = self.dataset.ahead
        return lambda indices: tell(self.index.rows(self.number, indices))

    @property
    def samples_ahead(self) -> int:
        """How many samples in advance `ahead` is to be called."""
        samples: int = self.dataset.samples_ahead
        return samples


class BalancedClasses(Mixture):
    """The rows of a table, drawn so that each class comes equally often.

    Every prefix of the order has as many rows of each class, give or take two. All rows of a class
    are used before one of them is used again. So the rows of a rare class come often in an epoch,
    which has as many samples as the data set, and some of those of a frequent class do not come.

    Args:
        dataset: the rows, a data set with `fetch`.
        numbers: the class of each row, as `ClassIndex` takes them.
        classes: number of classes.

    Raises:
        ConfigError: fewer than two classes have rows.
    """

    shares_told = False  # there may be many classes, and all have the same share

    def __init__(self, dataset: Any, numbers: np.ndarray, classes: int) -> None:
        index = ClassIndex(numbers, classes)
        every = [RowsOfClass(dataset, index, number) for number in range(classes)]
        found = [(rows, 1.0) for rows in every if len(rows)]
        if len(found) < 2:
            raise ConfigError(
                "data.sampling is balanced, but the training rows are of one class",
                "leave data.sampling out",
            )
        super().__init__(found)
        self.dataset = dataset

    def _fetch(self, indices: Sequence[int] | np.ndarray) -> Any:
        """A batch, by one call of the data set."""
        numbers, within = self._located(np.asarray(indices, np.int64))
        rows = np.empty(len(numbers), np.int64)
        for number in np.unique(numbers):
            mine, of_class = numbers == number, self.datasets[number]
            rows[mine] = of_class.index.rows(of_class.number, within[mine])
        return self.dataset.fetch(rows)


def class_dtype(classes: int) -> np.dtype[Any]:
    """The smallest type of the numbers of classes.

    Raises:
        ConfigError: there are more than 65536.
    """
    if classes > 1 << 16:
        raise ConfigError(
            f"data.sampling is balanced, but the table has {classes} classes",
            "leave data.sampling out: it takes up to 65536 classes",
        )
    return np.dtype(np.uint8 if classes <= 1 << 8 else np.uint16)
