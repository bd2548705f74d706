from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.monitoring.energy import COUNTER_SECONDS, MOST_WATTS, EnergyMeter, EnergyThread
from hpc_train.monitoring.energy_sources import EnergySource


class Machine:
    """A node whose power in watts follows a curve with a known integral.

    An idle floor, a slow wave, and steps of 0.73 s in whose second half the power is higher.
    """

    period, low, high = 0.73, 90.0, 260.0

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def power(self):
        busy = self.now % self.period >= self.period / 2
        return (self.high if busy else self.low) + 40 * math.sin(self.now / 50)

    def joules(self):
        """The integral of the power from 0 until now."""
        whole, rest = divmod(self.now, self.period)
        half = self.period / 2
        steps = whole * half * (self.low + self.high)
        steps += min(rest, half) * self.low + max(0.0, rest - half) * self.high
        return steps + 40 * 50 * (1 - math.cos(self.now / 50))


def run(machine, meter, seconds):
    """Let a machine's time pass as the thread does, with reads in between as records make them."""
    end, record = machine.now + seconds, machine.now + 11.0
    while machine.now < end:
        wake = machine.now + meter.pause()
        while record < wake:
            machine.now, record = record, record + 11.0
            meter.update()
        machine.now = wake
        meter.update()


@pytest.mark.parametrize("period", [0.73, 0.5, 0.25, 2.0, 0.0625])
def test_the_integral_of_power_is_within_one_percent(period):
    machine = Machine()
    machine.period = period
    meter = EnergyMeter([EnergySource("hwmon", "gpu", machine.power, is_power=True)], machine.clock)
    run(machine, meter, 600)
    assert meter.joules == pytest.approx(machine.joules(), rel=0.01)
    assert meter.seconds == pytest.approx(machine.now)


def test_the_integral_of_a_counter_that_wraps_is_exact():
    machine = Machine()
    wrap = 65712.999613  # joules: at the machine's power it wraps every six minutes
    counter = EnergySource("rapl", "package", lambda: (9e4 + machine.joules()) % wrap, wrap)
    meter = EnergyMeter([counter], machine.clock)
    assert meter.pause() <= wrap / MOST_WATTS / 2
    run(machine, meter, 3600)
    assert machine.joules() > 8 * wrap
    assert meter.joules == pytest.approx(machine.joules(), rel=1e-9)


def test_a_counter_without_wraps_is_read_rarely():
    assert (
        EnergyMeter([EnergySource("pm_counters", "energy", lambda: 1.0)]).pause() == COUNTER_SECONDS
    )


@given(st.lists(st.floats(0.1, 200), min_size=1, max_size=30), st.floats(0, 999))
def test_what_may_have_wrapped_unseen_is_neither_energy_nor_time(gaps, watts):
    wrap, machine = 65e3, Machine()
    source = EnergySource("rapl", "package", lambda: machine.now * watts % wrap, wrap)
    meter = EnergyMeter([source], machine.clock)
    for gap in gaps:  # such as those of a process that was suspended
        machine.now += gap
        meter.update()
    seen = sum(gap for gap in gaps if gap <= wrap / MOST_WATTS)
    assert meter.seconds == pytest.approx(seen, abs=1e-6)
    assert meter.joules == pytest.approx(seen * watts, rel=1e-6, abs=1e-3)


def test_what_lies_in_a_gap_between_reads_of_power_is_neither_energy_nor_time():
    machine = Machine()
    meter = EnergyMeter([EnergySource("hwmon", "gpu", lambda: 300.0, is_power=True)], machine.clock)
    for gap in (1.0, 3600.0, 2.0):
        machine.now += gap
        meter.update()
    assert (meter.joules, meter.seconds) == (3 * 300.0, 3.0)


def test_a_counter_that_was_set_back_goes_on_from_zero():
    values, machine = [900.0, 950.0, 20.0, 30.0], Machine()
    meter = EnergyMeter([EnergySource("nvml", "gpu", lambda: values.pop(0))], machine.clock)
    for _ in range(3):
        machine.now += 1
        meter.update()
    assert meter.joules == 50 + 20 + 10


def test_a_read_that_fails_for_a_while_costs_one_warning_and_no_energy(caplog):
    machine, broken = Machine(), [False]

    def read():
        if broken[0]:
            raise OSError(5, "Input/output error")
        return machine.joules()

    meter = EnergyMeter([EnergySource("nvml", "GPU-1", read)], machine.clock)
    for state in (False, True, True, False):
        broken[0] = state
        machine.now += 30
        meter.update()
    assert meter.joules == pytest.approx(machine.joules())
    assert caplog.text.count("the energy of GPU-1 cannot be read now") == 1


def test_the_thread_reads_until_it_is_closed():
    values = iter(range(10**6))
    source = EnergySource("hwmon", "gpu", lambda: float(next(values)), is_power=True)
    meter = EnergyMeter([source])
    meter.pause = lambda: 0.001
    thread = EnergyThread(meter)
    while next(values) < 10:
        pass
    thread.close()
    seen = next(values)
    assert next(values) == seen + 1  # nobody reads any more
