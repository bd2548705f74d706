"""What the operating system counts, from files as Linux writes them."""

from __future__ import annotations

import math
import mmap
import os

import pytest

from hpc_train.host.counters import TICKS, ProcessCounters, frequency, temperature


def test_new_pages_are_counted():
    counters = ProcessCounters()
    before = counters.read()
    with mmap.mmap(-1, 1 << 20) as pages:
        for begin in range(0, 1 << 20, mmap.PAGESIZE):
            pages[begin] = 1
    assert counters.read().faults - before.faults >= (1 << 20) / mmap.PAGESIZE


def test_the_files_of_linux_are_read(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self/schedstat").write_text("500 2500000000 7\n")
    lines = [f"cpu{core} 1 2 3 4 5 6 7 {TICKS} 0 0" for core in cores]
    (tmp_path / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 99 0 0", *lines, "intr 1"]))
    found = ProcessCounters(tmp_path)
    found._reads_stat = True
    assert found.read().delayed == 2.5
    assert found.read().stolen == len(cores)


def test_what_cannot_be_read_is_nan(tmp_path):
    found = ProcessCounters(tmp_path).read()
    assert math.isnan(found.delayed)
    assert math.isnan(found.stolen)
    assert math.isnan(frequency(tmp_path))
    assert math.isnan(temperature(tmp_path))


def test_frequency_and_temperature_are_read(tmp_path):
    core = min(os.sched_getaffinity(0))
    (tmp_path / f"cpu{core}/cpufreq").mkdir(parents=True)
    (tmp_path / f"cpu{core}/cpufreq/scaling_cur_freq").write_text("2400000\n")
    for chip, (name, degrees) in enumerate([("k10temp", 71500), ("nvme", 99000)]):
        (tmp_path / f"hwmon{chip}").mkdir()
        (tmp_path / f"hwmon{chip}/name").write_text(f"{name}\n")
        (tmp_path / f"hwmon{chip}/temp1_input").write_text(f"{degrees}\n")
    assert frequency(tmp_path) == pytest.approx(2.4e9)
    assert temperature(tmp_path) == pytest.approx(71.5)
