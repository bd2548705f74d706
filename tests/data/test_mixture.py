from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from hpc_train.data import Mixture
from hpc_train.data.by_length import PartsByLength
from hpc_train.data.loader import Loader, cut
from hpc_train.data.manifest import HASHED_BYTES, Manifest
from hpc_train.data.mixture import PERIOD_POSITIONS, deal, quotas, shares_drawn
from hpc_train.data.order import SampleOrder
from hpc_train.data.reader import Reader
from hpc_train.data.shards import TokenDataset
from hpc_train.data.substitutes import Substituted
from hpc_train.data.write import write_shard
from hpc_train.errors import ConfigError, UserError
from tests.damages import flip_bit

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=40)  # each enough for one position
FEW = settings(max_examples=12)  # each example makes whole tables
SHUFFLES = st.sampled_from([True, False, "full"])


class Rows:
    """A data set with `fetch`, in blocks: row n is (its name, n)."""

    def __init__(self, name, size, block=4, convert=torch.from_numpy):
        self.name, self.size, self.samples_per_block, self.convert = name, size, block, convert

    def __len__(self):
        return self.size

    def fetch(self, indices):
        rows = np.stack([np.full(len(indices), self.name), np.asarray(indices)], axis=1)
        return {"rows": self.convert(rows), "twice": (self.convert(2 * rows),)}


SIZED = st.tuples(st.integers(1, 60), st.floats(0.05, 20), st.integers(1, 9))


@st.composite
def mixtures(draw):
    parts = draw(st.lists(SIZED, min_size=1, max_size=8))
    return Mixture([(Rows(n, size, block), w) for n, (size, w, block) in enumerate(parts)])


def drawn(order, steps):
    return np.stack([order.indices(step, 0, order.batch) for step in steps])


@given(WEIGHTS)
@FEW
def test_every_prefix_has_the_shares_give_or_take_one(weights):
    dealt, before = deal(quotas(weights))
    for number, weight in enumerate(weights):
        mine = dealt == number
        counts = np.concatenate([[0], np.cumsum(mine)])
        assert (before[mine] == counts[:-1][mine]).all()
        exact = np.arange(PERIOD_POSITIONS + 1) * counts[-1] / PERIOD_POSITIONS
        assert abs(counts - exact).max() < 1
        assert abs(counts[-1] - PERIOD_POSITIONS * weight / sum(weights)) < 1


@given(mixtures(), st.integers(1, 20), st.integers(0, 2**40), SHUFFLES)
@FEW
def test_samples_of_a_data_set_are_used_once_before_one_is_used_twice(mixture, batch, seed, how):
    batch = min(batch, len(mixture))
    order = SampleOrder.of(mixture, batch, seed=seed, shuffle=how)
    assert order.steps_per_epoch == len(mixture) // batch
    seen = drawn(order, range(1, 3 * order.steps_per_epoch + 1)).ravel()
    assert seen.size <= PERIOD_POSITIONS
    used = Counter(seen.tolist())
    begins = [0, *mixture.ends]
    for number, (begin, end) in enumerate(itertools.pairwise(begins)):
        times = [used[sample] for sample in range(begin, end)]
        share = mixture.quotas[number] / PERIOD_POSITIONS
        assert abs(sum(times) - seen.size * share) < 1
        assert max(times) - min(times) <= 1


@given(mixtures(), st.lists(st.integers(1, 200), min_size=1, max_size=10), SHUFFLES)
@FEW
def test_any_step_is_the_one_that_comes_in_sequence(mixture, steps, how):
    batch = min(12, len(mixture))
    whole = SampleOrder.of(mixture, batch, seed=3, shuffle=how)
    expected = {step: whole.indices(step, 0, batch) for step in range(1, max(steps) + 1)}
    order = SampleOrder.of(mixture, batch, seed=3, shuffle=how)
    for step in steps:
        assert (order.indices(step, 0, batch) == expected[step]).all()


@given(mixtures(), st.integers(1, 300), st.lists(st.integers(0, 23), max_size=4), SHUFFLES)
@FEW
def test_a_batch_does_not_depend_on_how_it_is_cut(mixture, step, cuts, how):
    batch = min(24, len(mixture))
    order = SampleOrder.of(mixture, batch, seed=3, shuffle=how)
    borders = sorted({0, batch, *(place for place in cuts if place < batch)})
    pieces = [order.indices(step, a, b - a) for a, b in itertools.pairwise(borders)]
    again = SampleOrder.of(mixture, batch, seed=3, shuffle=how)
    assert (np.concatenate(pieces) == again.indices(step, 0, batch)).all()


def test_positions_behind_many_periods_are_found_at_once():
    mixture = Mixture([(Rows(0, 10**12, 128), 3), (Rows(1, 1000, 128), 1)])
    order = SampleOrder.of(mixture, 4096, seed=1)
    step = 10**11 // 4096
    found = order.indices(step, 0, 4096)
    assert (found >= 10**12).sum() == 1024
    # The small data set gives 4096 samples: at least three of its own epochs, and parts of others.
    small = drawn(order, range(step, step + 4))
    counts = Counter(small[small >= 10**12].tolist())
    assert set(counts.values()) <= {3, 4, 5}
    assert len(counts) == 1000


def test_epochs_and_data_sets_of_one_size_have_orders_of_their_own():
    mixture = Mixture([(Rows(0, 50, 1), 1), (Rows(1, 50, 1), 1)])
    seen = drawn(SampleOrder.of(mixture, 100, seed=2), range(1, 4))
    orders = [tuple(step[step // 50 == n] % 50) for step in seen for n in (0, 1)]
    assert len(set(orders)) == 6
    plain = drawn(SampleOrder.of(mixture, 100, shuffle=False), range(1, 3))
    assert (plain[0] == plain[1]).all()


def test_each_rank_has_all_data_sets_and_few_blocks_of_each():
    """The samples of a data set in a step are sorted, in the places that it has there."""
    ranks, batch, block, samples = 8, 512, 128, 1 << 18
    mixture = Mixture([(Rows(0, samples, block), 5), (Rows(1, samples, block), 3)])
    order = SampleOrder.of(mixture, batch, seed=5)
    share = batch // ranks
    needed = [set() for _ in range(ranks)]
    for step in range(1, 401):
        for rank, mine in enumerate(order.indices(step, 0, batch).reshape(ranks, share)):
            assert abs((mine < samples).sum() - share * 5 / 8) < 2
            for part in (mine[mine < samples], mine[mine >= samples]):
                assert (np.diff(part) >= 0).all()
            needed[rank] |= {*(mine // block).tolist()}
    assert max(map(len, needed)) < 3 * len(mixture) / block / ranks  # all of them without sorting


@pytest.mark.parametrize("step", [1, 7, 3276, 3277, 4000])  # 65536 positions are one period
def test_what_each_data_set_has_given_is_what_the_steps_have(step):
    mixture = Mixture([(Rows(0, 30_000), 5), (Rows(1, 20_000), 2), (Rows(2, 7000), 0.01)])
    order = SampleOrder.of(mixture, 20, shuffle=False)
    positions = np.arange(step * order.batch)
    numbers = np.searchsorted(mixture.ends, order.at(0, positions), side="right")
    assert order.drawn(step) == np.bincount(numbers, minlength=3).tolist()
    assert [*shares_drawn(order, step).values()] == [n / len(positions) for n in order.drawn(step)]
    assert SampleOrder(10, 2).drawn(3) == []


def test_a_mixture_may_be_in_a_mixture():
    inner = Mixture([(Rows(1, 10), 1), (Rows(2, 10), 1)])
    seen = drawn(SampleOrder.of(Mixture([(Rows(0, 20), 1), (inner, 1)]), 20), range(1, 3))
    assert Counter((seen.ravel() // 10).tolist()) == {0: 10, 1: 10, 2: 10, 3: 10}


@given(mixtures(), st.data(), st.sampled_from([torch.from_numpy, np.asarray]))
def test_a_batch_has_the_samples_in_the_order_in_which_they_are_wanted(mixture, data, convert):
    for dataset in mixture.datasets:
        dataset.convert = convert
    indices = data.draw(st.lists(st.integers(0, len(mixture) - 1), max_size=30))
    begins = [0, *mixture.ends]
    expected = []
    for index in indices:
        number = np.searchsorted(mixture.ends, index, side="right")
        expected.append([number, index - begins[number]])
    batch = mixture.fetch(indices)
    assert batch["rows"].tolist() == expected
    assert batch["twice"][0].tolist() == [[2 * a, 2 * b] for a, b in expected]
    assert type(batch["rows"]) is type(convert(np.zeros(1)))


@pytest.mark.parametrize("remade", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_for_a_worker_or_a_thread_reads_the_same(remade):
    mixture = Mixture([(Rows(0, 5), 1), (Rows(1, 5), 1)])
    assert remade(mixture).fetch([6, 1])["rows"].tolist() == [[1, 1], [0, 1]]


def test_samples_of_map_style_data_sets_are_put_together_by_torch():
    mixture = Mixture(
        [(TensorDataset(torch.arange(6)), 2), (TensorDataset(-torch.arange(1, 4)), 1)]
    )
    assert not hasattr(mixture, "fetch")
    assert [int(row[0]) for row in mixture] == [0, 1, 2, 3, 4, 5, -1, -2, -3]
    assert int(mixture[-1][0]) == -3
    order = SampleOrder.of(mixture, 3, seed=1)
    steps = [*Loader(mixture, order, cut(3, 1, 0), first_step=1, last_step=6)]
    seen = [step.micro_batches[0].data[0] for step in steps]
    assert [int((batch < 0).sum()) for batch in seen] == [1] * 6
    assert Counter(torch.cat(seen).tolist()) == dict.fromkeys([0, 1, 2, 3, 4, 5, -1, -2, -3], 2)


class Single(Rows):
    """It has single samples beside `fetch`."""

    def __getitem__(self, index):
        return self.fetch([index])["rows"][0]


class Turned(Single):
    """It changes single samples, and knows nothing of batches."""

    def __getitem__(self, index):
        return -super().__getitem__(index)


def test_single_samples_are_read_if_a_class_changes_those_of_one_data_set():
    mixture = Mixture([(Single(5, 3), 1), (Turned(7, 3), 1)])
    assert Reader(mixture).read_beside([2, 4]).tolist() == [[5, 2], [-7, -1]]


class Deep:
    """A data set that draws from a generator some levels below it."""

    def __init__(self):
        self.transform = {"then": {"generator": np.random.default_rng()}}

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.transform["then"]["generator"].random()


def test_generators_of_the_data_sets_are_seeded_by_sample():
    for dataset in (Deep(), Mixture([(Deep(), 1), (Mixture([(Deep(), 1)]), 1)])):
        read = [Reader(dataset).read_of_step([5, 7], 1, 1, range(2)).tolist() for _ in range(2)]
        assert read[0] == read[1]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(ConfigError, match=r"weight of data set 2 of a mixture is .*above 0"):
        Mixture([(Rows(0, 9), 1), (Rows(1, 9), weight)])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "has no data sets"),
        ([(Rows(0, 9), 1), (Rows(1, 0), 1)], "data set 2 of a mixture has no samples"),
        ([(Rows(0, 9), 1), (Rows(1, 9), 1e-6)], "data set 2 of a mixture, 1e-06, gives it less"),
        (
            [([1, 2], 1), (Rows(0, 9), 1)],
            "data set 2 of a mixture, of type Rows, has only `fetch`, and others do not have it",
        ),
        ([(iter([1]), 1)], "of type list_iterator, which has no samples by number"),
    ],
)
def test_data_sets_that_make_no_mixture_are_refused(parts, message):
    with pytest.raises((ConfigError, UserError)) as caught:
        Mixture(parts)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (
            lambda rows: torch.from_numpy(rows).float(),
            "torch.int64 [1, 2] and torch.float32 [1, 2]",
        ),
        (lambda rows: torch.from_numpy(rows[:, :1]), "torch.int64 [1, 2] and torch.int64 [1, 1]"),
        (lambda rows: rows, "Tensor and ndarray"),
        (lambda rows: torch.from_numpy(rows).sum(), "torch.int64 [1, 2] and torch.int64 []"),
        (lambda rows: rows.tolist(), "cannot be put together: {"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(convert, message):
    mixture = Mixture([(Rows(0, 5), 1), (Rows(1, 5, convert=convert), 1)])
    assert mixture.fetch([1, 2])["rows"].tolist() == [[0, 1], [0, 2]]
    with pytest.raises(UserError) as caught:
        mixture.fetch([1, 6])
    assert message in str(caught.value)


class Padded:
    """Samples of the lengths 1 to `longest`, padded to the longest of a batch."""

    def __init__(self, longest, convert):
        self.longest, self.convert = longest, convert

    def __len__(self):
        return self.longest

    def lengths(self, indices):
        return np.asarray(indices) + 1

    def fetch(self, indices):
        lengths = self.lengths(indices)
        there = np.arange(lengths.max()) < lengths[:, None]
        return self.convert(there.astype(np.int64)), self.convert(np.where(there, 2.0, -100))


@pytest.mark.parametrize("convert", [torch.from_numpy, np.asarray])
def test_samples_of_data_sets_that_pad_have_lengths_and_are_padded_to_the_longest(convert):
    inner = Mixture([(Padded(9, convert), 1)])
    mixture = Mixture([(Padded(5, convert), 1), (inner, 1)], padding=(0, -100))
    indices = [4, 11, 0, 6]
    assert mixture.lengths(indices).tolist() == [5, 7, 1, 2]
    here, values = mixture.fetch(indices)
    assert here.tolist() == [[1] * n + [0] * (7 - n) for n in (5, 7, 1, 2)]
    assert values.tolist() == [[2.0] * n + [-100.0] * (7 - n) for n in (5, 7, 1, 2)]
    order = SampleOrder.of(mixture, 7, seed=1)
    parts = [PartsByLength(mixture, order, 12, ranks=2, rank=rank) for rank in range(2)]
    cuts = [part for own in parts for part in own(1)]
    assert all(part.longest * part.count <= 12 or part.count == 1 for part in cuts)
    assert sorted(n for part in cuts if part.counted for n in part.places) == [*range(7)]
    with pytest.raises(UserError, match=r"give the mixture `padding`"):
        Mixture([(Padded(5, convert), 1), (inner, 1)]).fetch(indices)
    with pytest.raises(UserError, match=r"given 1 number as padding, and a batch has 2 tensors"):
        Mixture([(Padded(5, convert), 1), (inner, 1)], padding=[0]).fetch(indices)


def test_a_mixture_has_no_lengths_if_one_of_its_data_sets_has_none():
    assert not hasattr(Mixture([(Padded(5, np.asarray), 1), (Rows(0, 9), 1)]), "lengths")


def test_too_few_samples_for_a_batch_are_an_error():
    with pytest.raises(ConfigError, match=r"a batch has 11 samples, and the data set has 10"):
        SampleOrder.of(Mixture([(Rows(0, 4), 1), (Rows(1, 6), 1)]), 11)


def test_what_stands_in_for_damaged_samples_is_told_by_their_numbers_in_the_mixture(tmp_path):
    parts = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokens = np.random.default_rng(number).integers(0, 200, 3 * HASHED_BYTES, np.uint8)
        shard = write_shard(folder / "train-0.h5", tokens)
        manifest = Manifest(200, "uint8", "bytes", 1, {"train": (shard,)})
        parts.append((TokenDataset(folder, manifest, "train", 64, damaged="substitute"), 1.0))
    flip_bit(tmp_path / "1" / "train-0.h5", shard.offset + 5)
    mixture = Mixture(parts)
    count = len(parts[0][0])
    batch = mixture.fetch([count + 3, 1, count + HASHED_BYTES // 64 + 2])
    assert [damaged for damaged, _ in batch.pairs] == [count + 3]
    sound = mixture.fetch([batch.pairs[0][1], 1, count + HASHED_BYTES // 64 + 2])
    assert not isinstance(sound, Substituted)
    assert all((one == other).all() for one, other in zip(batch, sound, strict=True))
    assert mixture.substitutes is not None
