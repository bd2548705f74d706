"""A mixture draws samples from several data sets, each with a share of its own.

A table deals PERIOD_POSITIONS positions of the order to the data sets, and repeats. In every prefix
each data set has its exact share of the positions, give or take less than one. The table is made
like a schedule of tasks with rates in Baruah, Cohen, Plaxton and Varvel, "Proportionate progress"
(Algorithmica 1996). If k positions before one are a data set's, and it has n samples, it gives
sample k mod n of its own epoch k div n. The table has these counts, so resuming costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpc_train.data.lengths import lengths_of
from hpc_train.data.methods import ahead_of, fetch_of, gives_single
from hpc_train.data.order import SampleOrder, number_of_samples, shuffles
from hpc_train.data.substitutes import Substituted, Substitutes
from hpc_train.errors import ConfigError, UserError, plural
from hpc_train.seeds import mix

PERIOD_POSITIONS = 1 << 16  # positions that the table deals; the smallest share is one of them


class Mixture:
    """Several data sets as one, which gives each of them a share of the samples of every step.

    Its samples are those of the first data set, then those of the second one, and so on. `Loop` and
    `Trainer` draw from it so that each data set has its share in every step, and in each rank's
    part of the step, give or take one or two samples. They use all samples of a data set before
    they use one of them again, in another order. An epoch has as many samples as all data sets
    together.

    Args:
        parts: pairs of a data set and its weight. The data set's share is its weight divided by the
            sum of all. The data sets are map-style, or all of them have `fetch`; their batches are
            then tensors or NumPy arrays with the samples along the first axis, or tuples, lists and
            dicts of those.
        padding: for data sets with `fetch` that pad their batches to the longest sample, the number
            that each tensor or array of a batch is padded with, in their order in the batch. So
            batches of two data sets get one width. None: all batches have the same shape.

    Raises:
        ConfigError: there are no data sets, one has no samples, or a weight is not above 0, or is
            too small for a share of 1 / 65536.
        UserError: some data sets have `fetch` alone, or one has no samples by number.
    """

    shares_told = True
    """Whether records of training have the share of each data set."""

    def __init__(
        self, parts: Sequence[tuple[Any, float]], *, padding: Sequence[float] | None = None
    ) -> None:
        if not parts:
            raise ConfigError("a mixture has no data sets", "give pairs of a data set and a weight")
        self.datasets = [dataset for dataset, _ in parts]
        self.weights = [float(weight) for _, weight in parts]
        self.padding = padding
        self.quotas = quotas(self.weights)
        self._batched = all(fetch_of(dataset) is not None for dataset in self.datasets)
        for number, dataset in enumerate(self.datasets, 1):
            by_number = self._batched or gives_single(dataset)
            if not by_number and fetch_of(dataset) is not None:
                raise UserError(
                    f"data set {number} of a mixture, of type {type(dataset).__name__}, has only "
                    "`fetch`, and others do not have it",
                    "give all of them `fetch`, or all of them `__getitem__`",
                )
            if not (by_number and hasattr(dataset, "__len__")):
                raise UserError(
                    f"data set {number} of a mixture is of type {type(dataset).__name__}, which "
                    "has no samples by number",
                    "give a map-style data set in its place",
                )
            if not number_of_samples(dataset):
                raise ConfigError(f"data set {number} of a mixture has no samples", "leave it out")
        self.ends = np.cumsum([len(dataset) for dataset in self.datasets], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Any:
        """A sample of a map-style data set, by its number among the samples of all of them."""
        number, within = self._located(range(len(self))[index])
        return self.datasets[int(number)][int(within)]

    @property
    def fetch(self) -> Callable[[Sequence[int] | np.ndarray], Any]:
        """Reads a batch of samples, in the order of their numbers. Only if the data sets do."""
        if not self._batched:
            raise AttributeError("the data sets of this mixture have no fetch")
        return self._fetch

    def sample_order(
        self, batch: int, *, seed: int = 0, shuffle: bool | Literal["full"] = True
    ) -> SampleOrder:
        """The order in which `Loop` and `Trainer` take the samples; see `SampleOrder.of`.

        Raises:
            ConfigError: the data sets have fewer samples than a batch.
        """
        return MixedOrder(self, batch, seed=seed, shuffle=shuffle)

    @property
    def ahead(self) -> Callable[[np.ndarray], None]:
        """Tells the data sets of samples that will be read later. Only if all take such hints."""
        if not all(map(ahead_of, self.datasets)):
            raise AttributeError("not all data sets of this mixture have a method ahead")
        return self._tell_ahead

    @property
    def samples_ahead(self) -> int:
        """How many samples in advance `ahead` is to be called."""
        least: int = min(dataset.samples_ahead for dataset in self.datasets)
        return least

    def _tell_ahead(self, indices: np.ndarray) -> None:
        numbers, within = self._located(indices)
        for number in set(numbers.tolist()):
            self.datasets[number].ahead(within[numbers == number])

    @property
    def lengths(self) -> Callable[[Sequence[int] | np.ndarray], np.ndarray]:
        """Gives the lengths of samples, int64, by their numbers. Only if all data sets do."""
        if not all(hasattr(dataset, "lengths") for dataset in self.datasets):
            raise AttributeError("not all data sets of this mixture have a method lengths")
        return self._lengths

    def _lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        numbers, within = self._located(np.asarray(indices, np.int64))
        found = np.empty(len(numbers), np.int64)
        for number in np.unique(numbers):
            mine = numbers == number
            found[mine] = lengths_of(self.datasets[number], within[mine])
        return found

    @property
    def substitutes(self) -> Substitutes | None:
        """The first data set's, which tells of damage, if all of them substitute samples."""
        own = [getattr(dataset, "substitutes", None) for dataset in self.datasets]
        return None if None in own else own[0]

    def _located(self, indices: Any) -> tuple[Any, Any]:
        """The numbers of the data sets that have some samples, and the samples' numbers there."""
        numbers = np.searchsorted(self.ends, indices, side="right")
        return numbers, indices - np.where(numbers > 0, self.ends[numbers - 1], 0)

    def _fetch(self, indices: Sequence[int] | np.ndarray) -> Any:
        numbers, within = self._located(np.asarray(indices, np.int64))
        used = np.unique(numbers).tolist() or [0]
        wanted = [within[numbers == number] for number in used]
        batches = [
            self.datasets[number].fetch(some) for number, some in zip(used, wanted, strict=True)
        ]
        pairs: list[tuple[int, int]] = []
        causes: list[str] = []
        for place, (number, batch) in enumerate(zip(used, batches, strict=True)):
            if isinstance(batch, Substituted):
                begin = int(self.ends[number]) - len(self.datasets[number])
                pairs += [(begin + one, begin + other) for one, other in batch.pairs]
                causes += batch.causes
                batches[place] = (*batch,)
        together = self._together(batches, numbers, [len(some) for some in wanted])
        return Substituted.of(together, pairs, causes) if pairs else together

    def _together(self, batches: list[Any], numbers: np.ndarray, counts: list[int]) -> Any:
        """The batches of several data sets as one, in the order of `numbers`."""
        if len(batches) == 1:
            return batches[0]
        places = np.argsort(np.argsort(numbers, kind="stable"))
        flat, structures = zip(*map(tree_flatten, batches), strict=True)
        if any(structure != structures[0] for structure in structures):
            raise _different(f"{batches[0]!r:.60} and {batches[1]!r:.60}")
        padding: Sequence[float | None] = self.padding or [None] * len(flat[0])
        if len(padding) != len(flat[0]):
            raise UserError(
                f"a mixture was given {plural(len(padding), 'number')} as padding, and a batch has "
                f"{plural(len(flat[0]), 'tensor')}",
                "give one number for each",
            )
        joined = [
            _joined(leaves, counts, places, fill)
            for *leaves, fill in zip(*flat, padding, strict=True)
        ]
        return tree_unflatten(joined, structures[0])


class MixedOrder(SampleOrder):
    """The order of a mixture's samples.

    An epoch continues where the one before ended: of each data set, too. If a data set is shuffled
    by blocks, the samples of each data set in a step are sorted, in the places that it has there. A
    rank's share of a step then comes from the same part of each data set.

    Args:
        mixture: the mixture.
        batch, seed, shuffle: as `SampleOrder.of` takes them.
    """

    def __init__(
        self, mixture: Mixture, batch: int, *, seed: int, shuffle: bool | Literal["full"]
    ) -> None:
        super().__init__(len(mixture), batch, seed=seed, shuffle=shuffles(shuffle))
        self.orders = [
            SampleOrder.of(dataset, 1, seed=mix(self.seed, number), shuffle=shuffle)
            for number, dataset in enumerate(mixture.datasets)
        ]
        self.at_once *= len(self.orders)  # each of them computes its own part
        self.weights, self.ends = mixture.weights, mixture.ends
        self.shares_told = mixture.shares_told
        self.quotas = np.array(mixture.quotas, np.int64)
        self.dealt, self.before = deal(mixture.quotas)

    @property
    def by_blocks(self) -> bool:
        """Whether blocks of some data set are shuffled."""
        return any(order.by_blocks for order in self.orders)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order besides seed, batch, shuffle, and number of samples."""
        own = [order.identity for order in self.orders]
        exact = [*map(Fraction, self.weights)]
        return {
            "shares of the mixture": [float(weight / sum(exact)) for weight in exact],
            "samples of each data set": [order.samples for order in self.orders],
            **({"order of each data set": own} if any(own) else {}),
        }

    def drawn(self, step: int) -> list[int]:
        """The samples that each data set has given up to a step, unless nobody is to be told."""
        if not self.shares_told:
            return []
        periods, rest = divmod(step * self.batch, PERIOD_POSITIONS)
        begun = np.bincount(self.dealt[:rest], minlength=len(self.quotas))
        found: list[int] = (periods * self.quotas + begun).tolist()
        return found

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The samples at some positions of an epoch, unsorted: int64, of the same shape."""
        begin = epoch * self.steps_per_epoch * self.batch
        periods, places = np.divmod(begin + positions, PERIOD_POSITIONS)
        numbers = self.dealt[places]
        drawn = periods * self.quotas[numbers] + self.before[places]
        found = np.empty_like(positions)
        for number in np.unique(numbers):
            order, mine = self.orders[number], numbers == number
            epochs, within = np.divmod(drawn[mine], order.samples)
            for own in np.unique(epochs):
                now = epochs == own
                within[now] = order.at(int(own), within[now])
            found[mine] = within + (self.ends[number] - order.samples)
        return found

    def _sorted(self, found: np.ndarray) -> np.ndarray:
        numbers = np.searchsorted(self.ends, found, side="right")
        places = np.argsort(numbers, axis=1, kind="stable")
        ordered = np.empty_like(found)
        np.put_along_axis(ordered, places, np.sort(found, axis=1), axis=1)
        return ordered


def shares_drawn(order: SampleOrder, step: int) -> dict[str, float]:
    """The share of each data set of a mixture in all samples up to a step, for a record of it."""
    drawn = order.drawn(step)
    return {
        f"mixture_share_{number}": count / (step * order.batch)
        for number, count in enumerate(drawn, 1)
    }


def describe_drawn(order: MixedOrder, step: int, names: Sequence[str]) -> str:
    """What each data set of a mixture has given up to a step, in a line.

    Args:
        order: the order of the samples.
        step: the number of the step.
        names: the names of the data sets.
    """
    return ", ".join(
        f"{name} {count / (step * order.batch):.2%} ({plural(count, 'sample')}, "
        f"{count / own.samples:.2f} of its epochs)"
        for name, count, own in zip(names, order.drawn(step), order.orders, strict=True)
    )


def quotas(weights: Sequence[float]) -> list[int]:
    """The positions of a period that each data set has, by the largest remainders.

    Raises:
        ConfigError: a weight is not a number above 0, or is too small for one position.
    """
    for number, weight in enumerate(weights, 1):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"the weight of data set {number} of a mixture is {weight:g}",
                "give a number above 0",
            )
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) / total * PERIOD_POSITIONS for weight in weights]
    whole = [math.floor(share) for share in exact]
    most = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in most[: PERIOD_POSITIONS - sum(whole)]:
        whole[number] += 1
    if 0 in whole:
        number = whole.index(0)
        raise ConfigError(
            f"the weight of data set {number + 1} of a mixture, {weights[number]:g}, gives it less "
            f"than one sample in {PERIOD_POSITIONS}",
            "give it a larger weight, or leave it out",
        )
    return whole


def deal(quotas: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Deal the positions of a period to data sets.

    With P positions, a data set of quota q gets its j-th one, counted from 0, not before
    floor(j P / q), and before ceil((j + 1) P / q). Of those that may have a position, the one whose
    time is over first gets it, which keeps all of these bounds.

    Args:
        quotas: the number of positions of each data set, PERIOD_POSITIONS together.

    Returns:
        The number of the data set that has each position, and the number of positions before it
        that this data set has: int64 (PERIOD_POSITIONS,) each.
    """
    turns = [
        (j * PERIOD_POSITIONS // quota, -(-(j + 1) * PERIOD_POSITIONS // quota), number, j)
        for number, quota in enumerate(quotas)
        for j in range(quota)
    ]
    turns.sort(reverse=True)
    waiting: list[tuple[int, int, int]] = []
    dealt = np.empty((PERIOD_POSITIONS, 2), np.int64)
    for position in range(PERIOD_POSITIONS):
        while turns and turns[-1][0] <= position:
            heapq.heappush(waiting, turns.pop()[1:])
        dealt[position] = heapq.heappop(waiting)[1:]
    return dealt[:, 0], dealt[:, 1]


def datasets_in(dataset: Any) -> list[Any]:
    """The data sets that a data set draws its samples from: itself, or those of a mixture."""
    if not isinstance(dataset, Mixture):
        return [dataset]
    return [found for one in dataset.datasets for found in datasets_in(one)]


def _joined(
    leaves: Sequence[Any], counts: Sequence[int], places: np.ndarray, fill: float | None
) -> Any:
    """Tensors or arrays of samples as one, in which sample `places[n]` of all comes n-th."""
    if fill is not None:
        leaves = _of_one_width(leaves, fill)
    for kind in (torch.Tensor, np.ndarray):
        if all(isinstance(leaf, kind) for leaf in leaves):
            shapes = {(leaf.dtype, *leaf.shape[1:]) for leaf in leaves}
            sizes = [leaf.shape[0] if leaf.ndim else 0 for leaf in leaves]
            if len(shapes) > 1 or sizes != [*counts]:
                raise _different(" and ".join(f"{leaf.dtype} {[*leaf.shape]}" for leaf in leaves))
            if kind is torch.Tensor:
                return torch.cat([*leaves])[torch.from_numpy(places)]
            return np.concatenate(leaves)[places]
    raise _different(" and ".join(type(leaf).__name__ for leaf in leaves))


def _of_one_width(leaves: Sequence[Any], fill: float) -> Sequence[Any]:
    """Tensors or arrays, padded at the end to the largest size of each dimension but the first."""
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    if len({len(shape) for shape in shapes}) > 1 or len({shape[1:] for shape in shapes}) == 1:
        return leaves
    width = tuple(map(max, zip(*(shape[1:] for shape in shapes), strict=True)))
    padded = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        whole: Any = (
            leaf.new_full((shape[0], *width), fill)
            if isinstance(leaf, torch.Tensor)
            else np.full((shape[0], *width), fill, leaf.dtype)
        )
        whole[tuple(map(slice, shape))] = leaf
        padded.append(whole)
    return padded


def _different(what: str) -> UserError:
    return UserError(
        f"the batches of a mixture's data sets cannot be put together: {what}",
        "let `fetch` return tensors or arrays of the same type and shape, one row for each sample, "
        "or give the mixture `padding`",
    )
