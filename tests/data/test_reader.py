"""Random numbers that data sets draw, and data sets that do not return, or leave the program."""

from __future__ import annotations

import copy
import pickle
import random
import re
import threading
import time
import weakref
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from hpc_train.data.generators import seed_process
from hpc_train.data.loader import GivenUp, Loader, cut
from hpc_train.data.mixture import Mixture
from hpc_train.data.order import SampleOrder
from hpc_train.data.reader import Reader
from hpc_train.errors import UserError

STEPS, BATCH = 9, 12


class Noise:
    """Sample i is (i, random numbers of all the generators that there are)."""

    def __init__(self, since=0):
        self.since = since
        self.of_torch = torch.Generator()
        self.parts = {"more": [np.random.default_rng(), np.random.RandomState(), random.Random()]}

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index < self.since:
            return torch.tensor([float(index)], dtype=torch.float64)
        numpy, legacy, python = self.parts["more"]
        drawn = [torch.randn(()), torch.rand((), generator=self.of_torch), np.random.rand()]
        drawn += [random.random(), numpy.random(), legacy.randn(), python.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class OnlyTorch(Noise):
    """As many data sets do, whose library draws from torch."""

    def __getitem__(self, index):
        drawn = float(torch.rand(())) if index >= self.since else 0.0
        return torch.tensor([float(index), drawn], dtype=torch.float64)


def loader(dataset, *, rank=0, ranks=1, micro_batch=None, first=1, last=STEPS, prefetch=2):
    order = SampleOrder(len(dataset), BATCH, seed=3)
    parts = cut(BATCH, ranks, rank, micro_batch)
    return Loader(dataset, order, parts, first_step=first, last_step=last, prefetch=prefetch)


def batches(dataset, **how):
    """The rank's samples of each step; between two steps others draw, too."""
    made = loader(dataset, **how)
    seen = []
    for step in made:
        seen.append(torch.cat([micro.data for micro in step.micro_batches]))
        torch.rand(3), np.random.rand(3), random.random()
    made.close()
    return seen


@pytest.fixture(scope="module", params=[Noise, OnlyTorch])
def drawing(request):
    """A data set, and its samples of each step on one rank."""
    return request.param, batches(request.param())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (2, 3), (3, None), (4, 1)])
def test_samples_draw_the_same_on_any_number_of_ranks(drawing, ranks, micro_batch, prefetch):
    make, expected = drawing
    shares = []
    for rank in range(ranks):
        torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
        how = {"ranks": ranks, "micro_batch": micro_batch, "prefetch": prefetch}
        shares.append(batches(make(), rank=rank, **how))
    for step, whole in enumerate(expected):
        assert torch.equal(torch.cat([share[step] for share in shares]), whole)


@pytest.mark.parametrize("first", [2, 5, 9])
def test_samples_draw_the_same_after_a_resume(drawing, first):
    make, expected = drawing
    rest = batches(make(), first=first)
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[first - 1 :], strict=True))


def test_samples_of_other_places_steps_and_generators_draw_other_numbers():
    numbers = torch.cat(batches(Noise(), last=8))[:, 1:].flatten()  # within an epoch
    assert len(set(numbers.tolist())) == len(numbers)


def states():
    return (
        torch.get_rng_state().tolist(),
        pickle.dumps(np.random.get_state(legacy=False)),
        random.getstate(),
    )


@pytest.mark.parametrize("dataset", [Noise(), OnlyTorch(), OnlyTorch(since=50)])
def test_reading_leaves_the_programs_random_generators_as_they_were(dataset):
    steps = iter(loader(dataset, prefetch=0))
    for _ in range(STEPS):
        before = states()
        next(steps)
        assert states() == before


class Transform:
    def __init__(self):
        self.rng = np.random.default_rng()

    def __call__(self, x):
        return x + self.rng.random()


class Images:
    """Its generator lies behind many other attributes, or is made by the first sample."""

    def __init__(self, transform=None):
        self.paths = [f"{n}.png" for n in range(3000)]
        self.records = [{"boxes": [n, [n]]} for n in range(3000)]
        self.transform = transform

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if self.transform is None:
            self.transform = Transform()
        return torch.tensor(self.transform(float(index)))


class OfItsClass(Images):
    transform = Transform()

    def __init__(self):
        pass


class Slotted(Transform):
    __slots__ = ("rng",)


def closed():
    rng = random.Random()
    return lambda x: x + rng.random()


@pytest.mark.parametrize(
    "make",
    [
        Images,
        OfItsClass,
        lambda: Subset(ConcatDataset([Images(partial(Transform().__call__))]), range(99)),
        lambda: Images(Slotted()),
        lambda: Images(closed()),
        lambda: Images(lambda x: x + MODULES.random()),
    ],
)
def test_generators_are_found_wherever_a_data_set_has_them(make, caplog):
    expected = batches(make())
    rest = batches(make(), first=4)
    assert all(map(torch.equal, rest, expected[3:]))
    assert "two reads of the same samples" not in caplog.text


def test_generators_that_data_sets_make_in_later_batches_are_found():
    """The second of three gives few samples, and so makes its generator late on some ranks."""

    def batch(rank, ranks, first):
        parts = [(Images(), weight) for weight in (10, 1, 10)]
        return batches(Mixture(parts), rank=rank, ranks=ranks, first=first)

    expected = batch(0, 1, 1)
    assert all(map(torch.equal, batch(0, 1, 4), expected[3:]))
    shares = [batch(rank, 4, 1) for rank in range(4)]
    for step, whole in enumerate(expected):
        assert torch.equal(torch.cat([share[step] for share in shares]), whole)


MODULES = np.random.default_rng()


def test_draws_from_a_generator_that_is_not_found_are_told_once(caplog):
    class Hidden(Images):
        def __getitem__(self, index):
            return torch.tensor(random.SystemRandom().random())

    made = [batches(Hidden(), rank=rank, ranks=2, last=3) for rank in range(2)]
    assert len(made) == 2
    assert caplog.text.count("two reads of the same samples gave different values") == 1


class Strange(OnlyTorch):
    """Copies functions that seed, and has an attribute that no longer refers to anything."""

    def __init__(self):
        super().__init__(since=0)
        self.gone = weakref.proxy(Transform())

    def __getitem__(self, index):
        copied = copy.deepcopy(np.random.seed), pickle.dumps(torch.manual_seed)
        assert all(copied)
        return torch.randperm(9, generator=torch.random.default_generator)


def test_a_data_set_may_hold_and_copy_strange_things():
    assert all(map(torch.equal, batches(Strange(), first=4), batches(Strange())[3:]))


class OwnSeed(OnlyTorch):
    """It seeds a generator of the process, and restores it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __getitem__(self, index):
        if self.kind == "torch":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                return torch.randn(3)
        if self.kind == "numpy":
            state = np.random.get_state()
            np.random.seed(index)
            drawn = np.random.rand()
            np.random.set_state(state)
        else:
            state = random.getstate()
            random.seed(index)
            drawn = random.random()
            random.setstate(state)
        return torch.tensor(drawn)


class FetchingOwnSeed(OwnSeed):
    def fetch(self, indices):
        return torch.stack([self[int(index)] for index in indices])


@pytest.mark.parametrize("make", [OwnSeed, FetchingOwnSeed])
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_data_set_that_seeds_and_restores_is_not_read_ahead(make, kind, caplog):
    caplog.set_level("INFO", "hpc_train")
    functions = torch.random.default_generator, np.random.seed, random.setstate
    batches(make(kind))
    assert "no batch is read ahead" in caplog.text
    assert functions == (torch.random.default_generator, np.random.seed, random.setstate)


def test_a_data_set_that_draws_is_not_read_ahead(caplog):
    caplog.set_level("INFO", "hpc_train")
    before = {*threading.enumerate()}
    steps = iter(loader(OnlyTorch()))
    next(steps)
    assert {*threading.enumerate()} <= before
    assert "draws random numbers (torch's): no batch is read ahead" in caplog.text


def test_a_data_set_that_draws_only_later_is_refused_when_read_ahead():
    late = OnlyTorch(since=50)
    indices = [*range(24), *range(50, 98)]  # without shuffling: none in the first two steps
    order = SampleOrder(len(indices), BATCH, shuffle=False)
    made = Loader(Subset(late, indices), order, cut(BATCH, 1, 0), first_step=1, last_step=6)
    with pytest.raises(UserError, match=r"draws random numbers \(torch's\) in step 3.*prefetch"):
        list(made)
    made.close()
    one = Loader(
        Subset(late, indices), order, cut(BATCH, 1, 0), first_step=1, last_step=6, prefetch=0
    )
    many = [
        Loader(
            Subset(late, indices), order, cut(BATCH, 3, rank), first_step=1, last_step=6, prefetch=0
        )
        for rank in range(3)
    ]
    # Read by the thread that computes, it is as any other.
    for whole, *shares in zip(one, *many, strict=True):
        data = [share.micro_batches[0].data for share in shares]
        assert torch.equal(torch.cat(data), whole.micro_batches[0].data)


def test_a_model_that_draws_is_not_taken_for_the_data_set():
    class Slow(OnlyTorch):
        def __getitem__(self, index):
            time.sleep(1e-4)
            return super().__getitem__(index)

    made = loader(Slow(since=100), last=30)
    seen = []
    for step in made:
        seen.append(step.number)
        for _ in range(100):
            torch.rand(100), np.random.rand()
    made.close()
    assert seen == list(range(1, 31))


class Fetching(OnlyTorch):
    def fetch(self, indices):
        return torch.stack([self[int(index)] for index in indices])


def test_a_fetch_that_draws_is_refused():
    with pytest.raises(UserError, match=r"`fetch` of the data set draws .*`__getitem__`"):
        next(iter(loader(Fetching())))
    next(iter(loader(Fetching(since=100), prefetch=0)))


def test_a_draw_by_another_thread_is_not_blamed_on_the_data_set():
    class Disturbed(Fetching):
        drawn = 0

        def fetch(self, indices):
            if not self.drawn:
                np.random.rand()  # as a thread that happens to draw at this moment
            self.drawn += 1
            return torch.tensor(indices)

    dataset = Disturbed()
    assert next(iter(loader(dataset, prefetch=0))).number == 1
    assert dataset.drawn == 3  # the last time to compare the first batch


class Leaving(Noise):
    """Leaves the program at a sample."""

    def __init__(self, error, at):
        super().__init__()
        self.error, self.left = error, at

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return torch.tensor(index)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), StopIteration(0)], ids=repr)
@pytest.mark.parametrize("at", [3, 3 * BATCH])
def test_a_data_set_that_leaves_the_program_is_an_error(error, at, prefetch):
    made = loader(Leaving(error, at), prefetch=prefetch)
    with pytest.raises(RuntimeError, match=f"the data set raised {re.escape(repr(error))}"):
        list(made)
    made.close()


class Interrupt(BaseException):
    pass


def test_base_exceptions_of_the_reading_thread_are_raised_too():
    made = loader(Leaving(Interrupt(), 3 * BATCH))
    with pytest.raises(Interrupt):
        list(made)
    made.close()


def test_a_thread_that_has_died_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(Loader, "_read_ahead", lambda self, numbers, read: None)
    steps = iter(loader(Subset(OnlyTorch(since=100), range(100))))
    next(steps)
    with pytest.raises(RuntimeError, match="the thread that reads ahead has died"):
        next(steps)


class Stuck(Noise):
    """Does not return from a sample until it is let go."""

    def __init__(self, at):
        super().__init__()
        self.left, self.go, self.here = at, threading.Event(), threading.Event()

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            self.here.set()
            self.go.wait()
        return torch.tensor(index)


@pytest.fixture
def stuck(monkeypatch):
    monkeypatch.setattr("hpc_train.data.loader.DATA_SET_PATIENCE", 0.05)
    dataset = Stuck(
        at=4 * BATCH
    )  # the fourth step, which the thread reads; the first is read twice
    yield dataset
    dataset.go.set()


def test_closing_does_not_wait_for_a_data_set_that_does_not_return(stuck, caplog):
    made = loader(stuck)
    for step in made:
        if step.number == 3:
            stuck.here.wait()
            break
    made.close()
    assert "is still reading a sample" in caplog.text


def test_waiting_for_a_data_set_can_be_given_up(stuck):
    made = loader(stuck)
    steps = iter(made)
    assert [next(steps).number for _ in range(3)] == [1, 2, 3]
    made.give_up = stuck.here.is_set
    with pytest.raises(GivenUp):
        next(steps)
    made.close()


def test_two_readers_with_one_lock_do_not_read_at_once():
    lock, inside, most = threading.RLock(), [], []

    class Watched(Noise):
        def __getitem__(self, index):
            inside.append(index)
            most.append(len(inside))
            threading.Event().wait(1e-3)
            inside.pop()
            return torch.tensor(index)

    readers = [Reader(Watched(), lock) for _ in range(2)]
    threads = [
        threading.Thread(target=reader.read, args=(range(10), lambda place: place))
        for reader in readers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


def test_reading_a_tensor_data_set_at_once_changes_no_batch():
    x, y = torch.randn(20, 4, 3, 2), torch.arange(20)
    plain = TensorDataset(x, y, x.bool(), x[:, 0].requires_grad_())
    strided = TensorDataset(x.contiguous(memory_format=torch.channels_last), x.transpose(1, 2))
    for dataset in (plain, strided):
        indices = [3, 19, 0, 3]
        (expected,) = DataLoader(dataset, batch_sampler=[indices])
        read = Reader(dataset).read_of_step(np.array(indices), 0, 1, range(4))
        assert type(read) is type(expected)
        for mine, theirs in zip(read, expected, strict=True):
            assert torch.equal(mine, theirs)
            assert (mine.stride(), mine.requires_grad) == (theirs.stride(), theirs.requires_grad)


class Several(Noise):
    """It gives several samples at once, as the data sets of Hugging Face do."""

    def __init__(self, since=0, broken=None):
        super().__init__(since)
        self.asked, self.broken = [], broken

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("cannot be read")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_a_data_set_that_gives_several_samples_at_once_is_asked_for_them():
    dataset = Several(since=100)
    assert all(map(torch.equal, batches(dataset), batches(Noise(since=100))))
    assert {*map(len, dataset.asked)} == {BATCH}
    assert {type(index) for asked in dataset.asked for index in asked} == {int}


class Changed(Several):
    """It changes single samples, and knows nothing of several at once."""

    def __getitem__(self, index):
        return -super().__getitem__(index)


class Wrapped:
    """It changes the samples of a data set, whose attributes it has all."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return -self.dataset[index]

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Whole(Noise):
    """It gives whole batches."""

    def fetch(self, indices):
        return torch.stack([super(Whole, self).__getitem__(int(index)) for index in indices])


class ChangedWhole(Whole):
    """It changes single samples, and knows nothing of batches."""

    def __getitem__(self, index):
        return -super().__getitem__(index)


@pytest.mark.parametrize(
    "dataset",
    [
        Changed(since=100),
        Wrapped(Several(since=100)),
        ChangedWhole(since=100),
        Wrapped(Whole(since=100)),
        Mixture([(ChangedWhole(since=100), 1)]),
    ],
)
def test_single_samples_that_a_class_changes_are_not_passed_over(dataset):
    expected = [-batch for batch in batches(Noise(since=100))]
    assert all(map(torch.equal, batches(dataset), expected))


def test_a_class_that_has_fetch_beside_torchs_own_getitem_gives_batches():
    class Mixed(Dataset, Whole):
        pass

    assert all(map(torch.equal, batches(Mixed(since=100)), batches(Noise(since=100))))


def test_samples_that_are_given_at_once_draw_as_single_ones_do():
    assert all(map(torch.equal, batches(Several()), batches(Noise())))


def test_the_sample_that_cannot_be_read_is_named_among_several():
    reader = Reader(Several(since=100, broken=7))
    with pytest.raises(OSError, match="cannot be read"):
        reader.read_of_step(np.array([5, 7, 9]), 0, 1, range(3))
    assert reader.place == "sample 7"


class OnlySeveral(Dataset):
    """It has no single samples."""

    def __init__(self, several):
        self.several = several

    def __len__(self):
        return 8

    def __getitems__(self, indices):
        return self.several(indices)


def broken(indices):
    raise ValueError("the real cause")


def test_an_error_of_several_samples_is_told_if_there_are_no_single_ones():
    with pytest.raises(ValueError, match="the real cause"):
        Reader(OnlySeveral(broken)).read_beside([1, 2])


def test_several_samples_that_fail_are_told_once_and_left_after_three_failures_in_a_row(caplog):
    class Both(OnlySeveral):
        def __getitem__(self, index):
            return index

    Both.__getitems__ = OnlySeveral.__getitems__
    asked = []

    def flaky(indices):
        asked.append(indices)
        if len(asked) in (1, 2, 4, 5, 6):
            raise ValueError("the real cause")
        return indices

    reader = Reader(Both(flaky))
    assert [reader.read_beside([n, 1]).tolist() for n in range(8)] == [[n, 1] for n in range(8)]
    assert len(asked) == 6
    assert caplog.text.count("`__getitems__` of the data set fails (ValueError: the real") == 1


def test_several_samples_must_be_as_many_as_were_asked_for():
    with pytest.raises(UserError, match="gave 2 samples for 3 numbers: let it give one for each"):
        Reader(OnlySeveral(lambda indices: [torch.ones(2)] * 2)).read_beside([1, 2, 3])


def test_several_samples_may_come_as_a_batch_if_a_collate_fn_takes_it():
    dataset = OnlySeveral(lambda indices: (torch.tensor(indices), torch.tensor(indices) * 2))
    x, y = Reader(dataset, collate_fn=lambda batch: batch).read_beside([1, 2, 3])
    assert (x.tolist(), y.tolist()) == ([1, 2, 3], [2, 4, 6])


def test_seeding_the_process_seeds_torch_as_torch_does():
    torch.manual_seed(2**40 + 7)
    expected = torch.rand(3)
    seed_process(2**40 + 7)
    assert torch.equal(torch.rand(3), expected)
    drawn = np.random.rand(), random.random()
    seed_process(2**40 + 7)
    assert drawn == (np.random.rand(), random.random())


class Irreproducible:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.from_numpy(np.random.default_rng().random(3))


def mapped(samples):
    return UserDict(x=UserDict(y=torch.stack(samples)))


def test_samples_that_do_not_repeat_are_told_in_a_batch_of_any_mapping(caplog):
    order = SampleOrder(100, BATCH)
    parts = cut(BATCH, 1, 0)
    next(iter(Loader(Irreproducible(), order, parts, first_step=1, last_step=1, collate_fn=mapped)))
    assert "two reads of the same samples gave different values" in caplog.text


def test_data_sets_by_name_are_not_one():
    with pytest.raises(UserError, match="a mapping of several by their names: pick .* 'train'"):
        Reader(UserDict(train=[1, 2], test=[3]))
    assert Reader({0: 1.0, 1: 2.0}).read_beside([1]).tolist() == [2.0]


@pytest.mark.parametrize("samples", [[[1, 2], [3]], [torch.zeros(2), torch.zeros(3)]])
def test_samples_of_unequal_sizes_need_a_collate_fn(samples):
    with pytest.raises(
        UserError, match="unequal sizes .*equal size.*: give a collate_fn that pads"
    ):
        Reader(samples).read_beside([0, 1])
