"""The phases of a step, which autograd's thread enters as well where there are GPUs."""

from __future__ import annotations

import threading
import time

from hpc_train.mpi.phases import WAIT, StepPhases


def computing(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_time_of_a_processor_is_that_of_one_thread():
    """Threads have clocks of their own, so a difference of two clocks is no time."""
    phases = StepPhases()

    def waits():
        computing(0.05)
        with phases(WAIT):
            time.sleep(0.01)

    computing(0.1)  # this thread's clock is far ahead of the other one's
    with phases("backward"):
        thread = threading.Thread(target=waits)
        thread.start()
        thread.join()
    assert phases.seconds[WAIT] >= 0.01
    assert phases.seconds["backward"] >= 0.05
    for phase, seconds in phases.processor.items():
        assert 0 <= seconds <= phases.seconds[phase], phase
