from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hpc_train.job import preemption
from hpc_train.job.preemption import SOON, StopRequests, signals_kept
from hpc_train.mpi.group import Group
from tests.waiting import wait_until


@pytest.fixture
def requests():
    made = []

    def make(*limits, **named):
        made.append(StopRequests(*limits, **named))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_asks_to_stop_and_does_not_end_the_process(requests, number):
    stop = requests()
    assert stop.agree(Group()) is None
    os.kill(os.getpid(), number)
    assert stop.agree(Group()) == number.name


def test_the_time_limit_counts_from_the_start_of_the_process(requests):
    age = time.time() - psutil.Process().create_time()
    stop = requests(time_limit=age + 100)
    assert stop.agree(Group()) is None
    assert stop.agree(Group(), needed_seconds=90) is None
    assert "time_limit" in stop.agree(Group(), needed_seconds=110)


def test_a_checkpoint_is_tried_after_a_tenth_of_the_time(requests, monkeypatch):
    now = time.monotonic()
    stop = requests(time_limit=3600)
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    stop._limit = now + 100
    assert stop.pending(untried=True) == 0
    now += 5
    assert stop.pending(untried=True) == 0
    now += 6
    assert stop.pending(untried=True) == SOON
    assert stop.pending() == 0


def test_a_clock_that_is_set_forward_ends_no_run(requests, monkeypatch):
    stop = requests(time_limit=3600)
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    assert stop.agree(Group()) is None


def test_the_program_hears_of_a_continuation_as_before(requests):
    heard = []
    before = signal.signal(signal.SIGCONT, lambda *_: heard.append(1))
    own = signal.getsignal(signal.SIGCONT)
    try:
        stop = StopRequests()
        os.kill(os.getpid(), signal.SIGCONT)
        assert (stop.continued, heard) == (1, [1])
        stop.close()
        assert signal.getsignal(signal.SIGCONT) is own
    finally:
        signal.signal(signal.SIGCONT, before)


def test_the_end_of_the_job_is_a_limit_too(requests):
    stop = requests(end=time.time() + 100)
    assert stop.agree(Group(), needed_seconds=90) is None
    assert "the end of the job" in stop.agree(Group(), needed_seconds=110)


def test_a_file_asks_to_stop(requests, tmp_path):
    stop = requests(file=tmp_path / "STOP")
    assert stop.agree(Group()) is None
    (tmp_path / "STOP").touch()
    reasons = []
    wait_until(lambda: reasons.append(stop.agree(Group())) or reasons[-1])
    assert "STOP" in reasons[-1]


def test_a_disk_that_fails_for_a_moment_asks_for_nothing(requests, tmp_path, monkeypatch):
    stop = requests(file=tmp_path / "STOP")
    stat = os.stat

    def stale(path, *args, **named):
        if os.fspath(path).endswith("STOP"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", stale)
    assert stop.agree(Group()) is None


def test_former_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    StopRequests().close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def default():
    """The process has no handler for the signal that it returns."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_at_the_start_is_kept_until_the_program_can_answer(default):
    with signals_kept():
        os.kill(os.getpid(), default)
        stop = StopRequests()
        assert stop.agree(Group()) == default.name
        stop.close()


def test_kept_signals_leave_the_handlers_of_the_program(default):
    def own(*_):
        pass

    with signals_kept():
        signal.signal(default, own)
    assert signal.getsignal(default) is own
    with signals_kept():
        assert signal.getsignal(default) is own
        stop = StopRequests()
        stop.close()
    assert signal.getsignal(default) is own


def test_after_the_answer_a_signal_does_what_it_always_does(default):
    with signals_kept():
        StopRequests().close()
        assert signal.getsignal(default) is signal.SIG_DFL
    assert signal.getsignal(default) is signal.SIG_DFL


def test_a_signal_after_the_last_agreement_stops_the_next_training_of_the_program(default):
    with signals_kept():
        first = StopRequests()
        assert first.agree(Group()) is None
        os.kill(os.getpid(), default)
        first.close()
        StopRequests().close()  # it has nothing to do, so the ranks agree on nothing
        second = StopRequests()
        assert second.agree(Group()) == default.name
        second.close()
    with signals_kept():
        third = StopRequests()
        assert third.agree(Group()) is None, "it was answered"
        os.kill(os.getpid(), default)
        third.close()
    with signals_kept():
        assert StopRequests().pending() == 0, "another program"


def test_a_training_inside_of_another_passes_its_signal_on(default):
    with signals_kept():
        outer, inner = StopRequests(), StopRequests()
        os.kill(os.getpid(), default)
        inner.close()
        assert outer.pending() == default
        outer.close()
        third = StopRequests()
        assert third.pending() == default
        third.close()


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("os.kill(os.getpid(), 15)", ""),
        ("os.kill(os.getpid(), 15); time.sleep(30)", ""),
        ("os.fork() or [os.kill(os.getpid(), 15), time.sleep(30)]; print(os.wait()[1])", "15\n"),
    ],
    ids=["it-ends", "it-goes-on", "a-child"],
)
def test_who_never_answers_ends_by_the_signal(block, told):
    program = "import os, time; from hpc_train.job import preemption as p; p.KEPT_SECONDS = 0.1\n"
    program += f"with p.signals_kept(): {block}"
    how = {"timeout": 20, "stdout": subprocess.PIPE, "text": True}
    ended = subprocess.run([sys.executable, "-c", program], check=False, **how)
    assert ended.stdout == told
    assert ended.returncode == (0 if told else -signal.SIGTERM)


def test_what_a_rank_asks_for_is_heard_unless_there_is_more_to_say(requests):
    stop = requests(time_limit=1)
    assert stop.agree(Group(), asks=True)
    assert not stop.asked
    stop = requests()
    for asks in (False, True, False):
        assert stop.agree(Group(), asks=asks) is None
        assert stop.asked == asks


@pytest.mark.mpi
def test_one_ranks_signal_stops_all(job, requests):
    stop = requests()
    if job.world.rank == job.world.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.agree(job.world) == "SIGUSR1"
