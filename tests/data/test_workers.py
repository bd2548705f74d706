"""Workers give the same batches as no workers, and end with the rank, whichever way it ends."""

from __future__ import annotations

import copy
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import connection

import numpy as np
import psutil
import pytest
import torch

from hpc_train.data import fork_server, manifest
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder
from hpc_train.data.shards import TokenDataset
from hpc_train.errors import RankError, UserError, error_in_words

SAMPLES, BATCH, STEPS = 60, 12, 11


class Drawing:
    """Samples of different lengths, with numbers from every kind of generator."""

    def __init__(self):
        self.own = np.random.default_rng(5)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), torch.rand(()).item(), self.own.random()]
        return torch.tensor([index] * (1 + index % 3) + noise, dtype=torch.float64)


class Plain:
    """Samples of different lengths; one of them may be read in an unusual way."""

    def __init__(self, at=-1, do=None):
        self.at, self.do, self.busy = at, do, False

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        assert not self.busy, "two threads read from one data set"
        self.busy = True
        if index == self.at:
            self.do()
        self.busy = False
        return torch.full((1 + index % 3,), index, dtype=torch.float64)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def drawing_collate(samples):
    return padded(samples) + torch.rand(())


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a bad sample")


class Interrupt(BaseException):
    pass


def leave():
    raise Interrupt("gone")


def leave_few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 4, 4096))


def read_for_ever():
    time.sleep(1000)


@pytest.fixture(scope="module")
def started():
    """A fork server, as a script has it that calls start_workers() first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "mpi_runs", lambda: False)
        fork_server.start_workers()


def loader(dataset, *, ranks=1, rank=0, micro_batch=None, first=1, **options):
    order = SampleOrder(SAMPLES, BATCH, seed=3)
    parts = cut(BATCH, ranks, rank, micro_batch)
    options = {"prefetch": 0, "collate_fn": padded, **options}
    return Loader(dataset, order, parts, first_step=first, last_step=STEPS, **options)


def batches(dataset, **options):
    made = loader(dataset, **options)
    try:
        return [[micro.data for micro in step.micro_batches] for step in made]
    finally:
        made.close()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("ranks", "dataset", "prefetch"), [(1, Plain(), 0), (1, Drawing(), 2), (4, Drawing(), 0)]
)
def test_processes_give_the_same_batches(started, ranks, dataset, prefetch):
    cutting = {"ranks": ranks, "rank": ranks - 1, "micro_batch": 3}
    expected = batches(copy.deepcopy(dataset), **cutting)
    assert_same(batches(dataset, workers=2, prefetch=prefetch, **cutting), expected)
    assert_same(batches(dataset, workers=2, first=6, **cutting), expected[5:])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dataset", [Plain(), Drawing()], ids=["plain", "drawing"])
def test_threads_give_the_same_batches(monkeypatch, dataset, prefetch, count):
    monkeypatch.setattr(fork_server, "_state", None)
    expected = batches(copy.deepcopy(dataset), micro_batch=2)
    assert_same(batches(dataset, workers=count, prefetch=prefetch, micro_batch=2), expected)


def test_a_data_set_that_draws_is_the_same_on_any_number_of_ranks(started):
    one = batches(Drawing(), micro_batch=1, workers=2)
    two = [batches(Drawing(), ranks=2, rank=rank, micro_batch=1, workers=2) for rank in (0, 1)]
    assert_same([a + b for a, b in zip(*two, strict=True)], one)


def test_the_training_process_neither_forks_nor_has_new_children(started):
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    before = {child.pid for child in psutil.Process().children()}
    made = loader(Plain(), workers=2)
    steps = iter(made)
    next(steps)
    assert {child.pid for child in psutil.Process().children()} == before
    made.close()
    assert not forks


def test_the_generators_of_the_model_are_left_alone(started):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches(Drawing(), workers=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (fail, "sample 7 of step .*: ValueError: a bad sample"),
        (leave, "sample 7 of step .*: Interrupt: gone"),
        (kill_this_process, "a worker .* of step .* ended with SIGKILL: if memory was short"),
        (leave_few_files, "(Too many open files|did not send).*: .*raise `ulimit -n`"),
    ],
)
def test_a_worker_that_fails_is_one_clear_error(started, do, message):
    with pytest.raises(RankError, match=message):
        batches(Plain(at=7, do=do), workers=2, collate_fn=list)


def test_a_rank_that_may_open_too_few_files_for_batches_says_so(started):
    made = loader(Plain(), workers=2, collate_fn=list)
    kept = [next(steps := iter(made))]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = psutil.Process().num_fds()
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + BATCH * 3, before[1]))
    try:
        with pytest.raises(RankError, match=r"raise `ulimit -n`, or let a collate_fn"):
            kept += steps
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        made.close()


class Scratch:
    """It makes each sample in a tensor that it keeps; another one it shares by itself."""

    def __init__(self):
        self.rows = [*torch.zeros(SAMPLES, 1000).unbind(), torch.zeros(1).share_memory_()]

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.rows[-1][0] = 1.0
        whole = torch.as_strided(self.rows[0], (SAMPLES, 1000), (1000, 1))
        whole.fill_(index)
        time.sleep(1e-3)
        assert self.rows[9][0] == index, "the rows no longer lie in one memory"
        return whole[0].clone()


def test_workers_have_copies_of_tensors_and_share_those_that_are_shared(started):
    dataset = Scratch()
    found = [batch.tolist() for [batch] in batches(dataset, workers=2, collate_fn=None)]
    order = SampleOrder(SAMPLES, BATCH, seed=3)
    expected = [order.indices(step, 0, BATCH) for step in range(1, STEPS + 1)]
    assert found == [[[index] * 1000 for index in step] for step in expected]
    assert not dataset.rows[0].any()
    assert dataset.rows[-1] == 1.0


class Large:
    """A tensor and an array. Its samples are the most memory that its process has had, in kB."""

    def __init__(self, kilobytes):
        self.rows = torch.full((kilobytes, 128), 3.0)
        self.later = self.rows[1:]
        self.array = np.full((kilobytes, 128), 4.0, np.float32)
        self.room = torch.zeros(50_000)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.room.resize_(100_000)
        self.later[0, 0] = self.array[0, 0] = 5.0
        assert self.rows[1, 0] == 5.0, "the tensors no longer lie in one memory"
        assert self.rows[-1, -1] + self.array[-1, -1] == 7.0
        return torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def test_a_worker_has_one_copy_of_a_data_set_at_its_start_too(started):
    size, peaks = 60_000, []
    for dataset in (Large(1_000), Large(size)):
        found = batches(dataset, workers=2, collate_fn=None)
        peaks.append(max(int(batch.max()) for [batch] in found))
        assert float(dataset.later[0, 0] + dataset.array[0, 0]) == 7.0
        dataset.room.resize_(100_000)  # torch forbids it for what has been a NumPy array
    assert 0.9 * size < peaks[1] - peaks[0] < 1.5 * size


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"workers": 2}])
def test_without_workers_the_message_names_the_sample_too(monkeypatch, options):
    monkeypatch.setattr(fork_server, "_state", None)
    sample = SampleOrder(SAMPLES, BATCH, seed=3).indices(4, 0, 1)[0]
    with pytest.raises(ValueError, match="a bad sample") as caught:
        batches(Plain(at=sample, do=fail), **options)
    assert error_in_words(caught.value) == f"sample {sample} of step 4: ValueError: a bad sample"


def test_closing_ends_workers_that_still_read(started, monkeypatch):
    monkeypatch.setattr("hpc_train.data.loader.DATA_SET_PATIENCE", 0.2)
    made = loader(
        Plain(at=SampleOrder(SAMPLES, BATCH, seed=3).indices(3, 0, 1)[0], do=read_for_ever),
        workers=2,
    )
    next(iter(made))
    running = list(made._processes._workers)
    assert len(running) == 2
    made.close()
    for one in running:
        one.join(10)
        assert not one.is_alive()


def test_a_stop_request_does_not_end_workers(started):
    made = loader(Plain(), workers=2)
    steps = iter(made)
    next(steps)
    for one in made._processes._workers:
        os.kill(one.pid, signal.SIGTERM)
        os.kill(one.pid, signal.SIGUSR1)
    assert len(list(steps)) == STEPS - 1
    made.close()


def test_a_data_set_that_cannot_be_pickled_is_read_by_threads(started, caplog):
    caplog.set_level("INFO")
    expected = batches(Plain())
    dataset = Plain()
    dataset.transform = lambda sample: sample
    assert_same(batches(dataset, workers=2), expected)
    assert (
        "read by 2 threads, and not by worker processes: the data set cannot be sent" in caplog.text
    )


def test_a_data_set_that_cannot_be_copied_is_read_by_one_thread(monkeypatch, caplog, tmp_path):
    caplog.set_level("INFO")
    monkeypatch.setattr(fork_server, "_state", None)
    dataset = Plain()
    with (tmp_path / "open").open("w") as dataset.file:
        assert_same(batches(dataset, workers=3), batches(Plain()))
    assert "start_workers() was not called before MPI started" in caplog.text
    assert "samples are read by one thread" in caplog.text


def test_a_batch_that_cannot_be_sent_is_an_error(started):
    with pytest.raises(RankError, match="pickle"):
        batches(Plain(), workers=1, collate_fn=unpicklable)


def unpicklable(samples):
    return lambda: samples


class LazyCollate:
    """As collators of Hugging Face do, it makes a generator of its own in its first call."""

    rng = None

    def __call__(self, samples):
        self.rng = self.rng or torch.Generator().manual_seed(3)
        return padded(samples) + torch.rand((), generator=self.rng)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("make", [lambda: drawing_collate, LazyCollate])
def test_a_collate_that_draws_is_refused(started, count, make):
    with pytest.raises(UserError, match="collate_fn draws random numbers"):
        batches(Plain(), workers=count, collate_fn=make())


class Fetching(Plain):
    def fetch(self, indices):
        return torch.tensor(indices)


def test_fetch_and_a_collate_are_refused():
    with pytest.raises(UserError, match="leave one of them out"):
        loader(Fetching())


def test_it_is_refused_when_mpi_runs(monkeypatch):
    monkeypatch.setattr(fork_server, "_state", None)
    monkeypatch.setattr(fork_server, "mpi_runs", lambda: True)
    with pytest.raises(UserError, match="MPI runs already"):
        fork_server.start_workers()


def test_a_tmpdir_that_is_too_long_for_a_socket_is_refused(monkeypatch):
    monkeypatch.setattr(fork_server, "_state", None)
    monkeypatch.setattr(fork_server, "mpi_runs", lambda: False)
    monkeypatch.setattr(connection, "arbitrary_address", lambda family: f"/{'a' * 130}/socket")
    with pytest.raises(UserError, match="is too long for a socket: set it to a shorter one"):
        fork_server.start_workers()


SCRIPT = """
import os, sys, time
import hpc_train
from hpc_train.data.loader import Loader, cut
from hpc_train.data.order import SampleOrder

class Mine:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

def main():
    hpc_train.start_workers()
    order, parts = SampleOrder(1000, 2), cut(2, 1, 0)
    loader = Loader(Mine(), order, parts, first_step=1, last_step=400, workers=2)
    next(iter(loader))
    print(os.getpid(), *(one.pid for one in loader._processes._workers), flush=True)
    time.sleep(1000)

GUARD
"""


def test_nothing_is_left_of_a_rank_that_was_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", 'if __name__ == "__main__":\n    main()'))
    rank = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in rank.stdout.readline().split()]
    below = psutil.Process(rank.pid).children(recursive=True)
    assert {one.pid for one in below} >= {*pids[1:]}
    rank.kill()
    rank.wait()
    rank.stdout.close()
    _, left = psutil.wait_procs(below, timeout=20)
    assert not left


def test_a_script_without_a_guard_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("GUARD", "main()"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "it has no line `if __name__" in done.stderr


def test_prepared_text_is_read_by_processes(started, text_data, caplog):
    caplog.set_level("INFO")
    dataset = TokenDataset(text_data, manifest.read_manifest(text_data), "train", 8)
    options = {"collate_fn": None, "micro_batch": 4}
    expected = batches(dataset, **options)
    for one, other in zip(batches(dataset, workers=2, **options), expected, strict=True):
        for (tokens, targets), (tokens_too, targets_too) in zip(one, other, strict=True):
            assert torch.equal(tokens, tokens_too)
            assert torch.equal(targets, targets_too)
    assert "threads" not in caplog.text


def test_processes_substitute_the_same_samples_and_the_rank_tells_it(
    started, text_data, tmp_path, caplog
):
    folder = tmp_path / "data"
    shutil.copytree(text_data, folder)
    found = manifest.read_manifest(folder)
    shard = found.splits["train"][0]
    with (folder / shard.name).open("r+b") as file:
        file.seek(shard.offset)
        file.write(bytes(100))
    read = {}
    for workers in (0, 2):
        caplog.clear()
        dataset = TokenDataset(folder, found, "train", 8, damaged="substitute")
        read[workers] = batches(dataset, workers=workers, collate_fn=None, micro_batch=4)
        assert caplog.text.count(f"{shard.name} is damaged: block 0 of its dataset tokens") == 1
    for one, other in zip(read[0], read[2], strict=True):
        for batch, batch_too in zip(one, other, strict=True):
            assert len(batch.pairs) == 4
            assert batch.pairs == batch_too.pairs
            assert torch.equal(batch[0], batch_too[0])
