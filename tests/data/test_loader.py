from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from hpc_train.data.loader import Loader, Part, cut
from hpc_train.data.mixture import Mixture
from hpc_train.data.order import SampleOrder
from hpc_train.data.substitutes import Substituted
from hpc_train.errors import ConfigError


class Numbers:
    """Sample i is the number i."""

    def __init__(self, size=100, broken_at=None):
        self.size, self.broken_at, self.fetched = size, broken_at, 0

    def __len__(self):
        return self.size

    def fetch(self, indices):
        self.fetched += 1
        if self.fetched == self.broken_at:
            raise OSError("disk gone")
        return torch.tensor(indices)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_parts_of_all_ranks_make_up_the_batch(ranks, micro_batch, count):
    batch = ranks * micro_batch * count
    parts = [part for rank in range(ranks) for part in cut(batch, ranks, rank, micro_batch)]
    places = [place for part in parts for place in range(part.first, part.first + part.count)]
    assert places == list(range(batch))
    assert {part.count for part in parts} == {micro_batch}


def test_without_a_micro_batch_a_rank_computes_its_share_at_once():
    assert cut(12, 3, 1) == [Part(range(4, 8))]


@pytest.mark.parametrize(
    ("batch", "ranks", "micro_batch", "message"),
    [
        (30, 4, None, "data.batch 30 is not divisible by 4 ranks: nearest that are: 28, 32"),
        (30, 4, 2, "not divisible by 4 ranks x data.micro_batch 2: nearest that are: 24, 32"),
        (3, 4, None, "nearest that are: 4"),
        (8, 2, 10**18, "but of data.batch 8 a rank has 4: give a number that divides 4, or leave"),
    ],
)
def test_a_batch_that_cannot_be_cut_names_those_that_can(batch, ranks, micro_batch, message):
    with pytest.raises(ConfigError) as caught:
        cut(batch, ranks, 0, micro_batch)
    assert message in str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reading_error_comes_where_the_step_is_asked_for(prefetch):
    dataset = Numbers(broken_at=4)  # the first step is read twice
    loader = Loader(
        dataset, SampleOrder(100, 12), cut(12, 1, 0), first_step=1, last_step=9, prefetch=prefetch
    )
    steps = iter(loader)
    assert [next(steps).number, next(steps).number] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(steps)
    loader.close()


class ReadBy(Numbers):
    """It notes which threads read a step. Its class says that it draws no random numbers."""

    draws_random_numbers = False

    def __init__(self):
        super().__init__()
        self.threads = []

    def fetch(self, indices):
        self.threads.append(threading.current_thread())
        return super().fetch(indices)


class Derived(ReadBy):
    """It may draw, as its own class does not say that it does not."""


@pytest.mark.parametrize(
    ("dataset", "looked_at"),
    [
        (ReadBy(), [0]),
        (Derived(), [0, 1, 2, 3, 5, 9]),  # the first step is read twice
        (Mixture([(ReadBy(), 1), (ReadBy(), 1)]), [0]),
        (Mixture([(ReadBy(), 1), (Derived(), 1)]), [0, 1, 2, 3, 5, 9]),
    ],
)
def test_the_main_thread_reads_steps_of_data_sets_that_may_draw(dataset, looked_at):
    order = SampleOrder(100, 10, shuffle=False)
    loader = Loader(dataset, order, cut(10, 1, 0), first_step=1, last_step=10)
    steps = [*loader]
    loader.close()
    assert [step.number for step in steps] == [*range(1, 11)]
    noted = dataset if isinstance(dataset, ReadBy) else dataset.datasets[0]
    here = threading.current_thread()
    if noted is dataset:
        assert [n for n, thread in enumerate(noted.threads) if thread is here] == looked_at
    else:
        assert noted.threads.count(here) == len(looked_at)


def test_closing_ends_the_thread_though_nobody_took_its_steps():
    before = {*threading.enumerate()}
    loader = Loader(Numbers(), SampleOrder(100, 12), cut(12, 1, 0), first_step=1, last_step=500)
    next(iter(loader))
    assert len({*threading.enumerate()} - before) == 1
    loader.close()
    assert {*threading.enumerate()} <= before


def test_a_data_set_of_torch_is_put_together_by_torch():
    dataset = TensorDataset(torch.arange(100), torch.arange(100) * 2.0)
    order = SampleOrder(100, 4, shuffle=False)
    loader = Loader(dataset, order, cut(4, 1, 0), first_step=2, last_step=2)
    x, y = next(iter(loader)).micro_batches[0].data
    assert x.tolist() == [4, 5, 6, 7]
    assert y.tolist() == [8, 10, 12, 14]
    loader.close()


class Told(Numbers):
    """It is told of its samples ahead."""

    samples_ahead = 8

    def __init__(self):
        super().__init__()
        self.told = []

    def ahead(self, indices):
        self.told.append(indices.tolist())


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 0), (2, 0), (1, 3)])
def test_a_data_set_is_told_of_its_samples_some_steps_before(prefetch, workers):
    """Here a rank has 4 samples of a step in two parts."""
    dataset = Told()
    order = SampleOrder(100, 12, seed=3)
    parts = cut(12, 3, 1, 2)
    loader = Loader(
        dataset, order, parts, first_step=5, last_step=11, prefetch=prefetch, workers=workers
    )
    at = {step.number: len(dataset.told) for step in loader}
    loader.close()
    assert dataset.told == [order.indices(step, 4, 4).tolist() for step in range(6, 12)]
    assert at[5] >= prefetch + 2  # 8 samples are two steps
    if not prefetch:
        assert [at[step] for step in range(5, 12)] == [2, 3, 4, 5, 6, 6, 6]


@pytest.mark.parametrize("samples", [None, "8", -8])
def test_a_data_set_that_does_not_say_how_far_ahead_it_is_told_is_refused(samples):
    dataset = Told()
    dataset.samples_ahead = samples
    loader = Loader(dataset, SampleOrder(100, 4), cut(4, 1, 0), first_step=1, last_step=2)
    with pytest.raises(ConfigError, match="samples_ahead"):
        next(iter(loader))
    loader.close()


class Forecasts(Numbers):
    """Its attribute of the same name is something else."""

    ahead, samples_ahead = 3, 8


@pytest.mark.parametrize("dataset", [Forecasts(), Mixture([(Forecasts(), 1)])])
def test_an_attribute_ahead_that_is_no_method_is_left_alone(dataset):
    loader = Loader(dataset, SampleOrder(100, 4), cut(4, 1, 0), first_step=1, last_step=2)
    assert len([*loader]) == 2
    loader.close()


class Epochs(Numbers):
    def set_epoch(self, epoch):
        self.size = epoch


@pytest.mark.parametrize("dataset", [Epochs(), Mixture([(Epochs(), 1)])])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_reading_ahead_of_a_data_set_that_may_change_is_told(dataset, prefetch, caplog):
    order, parts = SampleOrder(100, 4), cut(4, 1, 0)
    loader = Loader(dataset, order, parts, first_step=1, last_step=9, prefetch=prefetch)
    next(iter(loader))
    loader.close()
    assert ("set workers and prefetch to 0 if" in caplog.text) == bool(prefetch)


@pytest.mark.parametrize(
    ("collate", "counted", "told"),
    [
        (lambda samples: torch.tensor(samples[1:]), None, True),
        (lambda samples: torch.tensor(samples[1:]), len, False),
        (lambda samples: torch.tensor([samples] * 3), None, False),  # time comes first
        (lambda samples: torch.tensor([[*samples, *samples]]), None, False),  # packed
        (lambda samples: (torch.zeros(2), torch.zeros(3)), None, False),  # nodes and edges
        (lambda samples: {"ids": torch.tensor([0, *samples])}, None, False),
        (lambda samples: (tuple(torch.zeros(3, 5) for _ in samples), None), None, False),  # images
        (lambda samples: ({"crops": [torch.zeros(3, 5)] * 7}, None), None, False),
        (lambda samples: {"crops": torch.zeros(3), "texts": [*map(str, samples)]}, None, False),
    ],
)
def test_a_collate_that_leaves_out_samples_is_told(collate, counted, told, caplog):
    order = SampleOrder(100, 4)
    loader = Loader(
        [*range(100)], order, cut(4, 1, 0), first_step=1, last_step=3, collate_fn=collate
    )
    loader.counted = counted
    assert len([*loader]) == 3
    loader.close()
    assert caplog.text.count("a batch of 4 samples has tensors of 3 rows each") == told


class Pairs:
    """Sample i is the number i, in a batch with a substitute for the first sample."""

    def __len__(self):
        return 20

    def fetch(self, indices):
        batch = (torch.tensor(indices), {"twice": [2 * torch.tensor(indices)]}, "a text")
        return Substituted.of(batch, [(int(indices[0]), 1)], ["damage"])


def test_batches_for_a_gpu_are_pinned_where_they_are_read_and_stay_what_they_are(monkeypatch):
    threads = []

    def pin_memory(tensor):
        threads.append(threading.current_thread().name)
        return tensor + 100  # so that the test can tell

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    order = SampleOrder(20, 4, shuffle=False)
    for pinned in (False, True):
        loader = Loader(Pairs(), order, cut(4, 1, 0), first_step=1, last_step=5)
        loader.pinned = pinned
        data = [step.micro_batches[0].data for step in loader]
        loader.close()
        more = 100 * pinned
        for number, (numbers, rest, text) in enumerate(data):
            own = [4 * number + place for place in range(4)]
            assert numbers.tolist() == [n + more for n in own]
            assert rest["twice"][0].tolist() == [2 * n + more for n in own]
            assert (text, data[number].pairs) == ("a text", ((own[0], 1),))
        assert len(threads) == 10 * pinned
    assert "loader" in threads
