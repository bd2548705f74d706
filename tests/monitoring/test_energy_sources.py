"""Sources of energy on trees of files as Linux has them, and a library that stands in for NVML."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from hpc_train.monitoring.energy import EnergyMeter
from hpc_train.monitoring.energy_sources import find_energy

NONE = "libno-such-nvml.so"
POWERCAP = "sys/class/powercap"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def zone(path, name, microjoules, wrap=262143328850):
    values = {"name": name, "energy_uj": microjoules, "max_energy_range_uj": wrap, "enabled": 1}
    return {f"{POWERCAP}/{path}/{file}": value for file, value in values.items()}


# Two sockets of a server with their memory, and what must not be counted beside them.
TWO_SOCKETS = {
    **zone("intel-rapl:0", "package-0", 262143000000),
    **zone("intel-rapl:0/intel-rapl:0:0", "dram", 1000000, 65712999613),
    **zone("intel-rapl:1", "package-1", 5000000),
    **zone("intel-rapl:1/intel-rapl:1:0", "dram", 2000000, 65712999613),
    # In /sys/class/powercap a part of a zone is a folder of its own, too.
    **zone("intel-rapl:0:0", "dram", 1000000, 65712999613),
    **zone("intel-rapl:1:0", "dram", 2000000, 65712999613),
}
DESKTOP = {
    **zone("intel-rapl:0", "package-0", 1000000),
    **zone("intel-rapl:0/intel-rapl:0:0", "core", 600000),
    **zone("intel-rapl:0/intel-rapl:0:1", "uncore", 100000),
    **zone("intel-rapl:1", "psys", 7000000),
    **zone("intel-rapl-mmio:0", "package-0", 1000000),
}
CRAY = {
    "sys/cray/pm_counters/energy": "43266361 J 1608574112321342 us",
    "sys/cray/pm_counters/accel_energy": "20000000 J 1608574112321342 us",
    "sys/cray/pm_counters/cpu_energy": "10000000 J 1608574112321342 us",
    "sys/cray/pm_counters/freshness": "712345",
    "sys/cray/pm_counters/startup": "1607000000000000",
}
# A connector of a card leads to the same device, and the processor's sensors are none of a GPU.
GPUS = {
    "sys/class/drm/card0/device/hwmon/hwmon3/name": "amdgpu",
    "sys/class/drm/card0/device/hwmon/hwmon3/power1_average": "35000000",
    "sys/class/drm/card0-DP-1/device/hwmon/hwmon3/name": "amdgpu",
    "sys/class/drm/card0-DP-1/device/hwmon/hwmon3/power1_average": "35000000",
    "sys/class/drm/card1/device/hwmon/hwmon4/name": "xe",
    "sys/class/drm/card1/device/hwmon/hwmon4/energy1_input": "123000000",
    "sys/class/drm/card1/device/hwmon/hwmon4/power1_average": "99000000",
    "sys/class/drm/card2/device/hwmon/hwmon5/name": "i915_gt0",
    "sys/class/drm/card2/device/hwmon/hwmon5/energy1_input": "5000000",
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_packages_and_memory_are_counted_once_and_across_a_wrap(tmp_path):
    write(tmp_path, TWO_SOCKETS)
    found = find_energy(tmp_path, NONE)
    assert [source.name.removeprefix(f"{POWERCAP}/") for source in found.sources] == [
        "intel-rapl:0/energy_uj",
        "intel-rapl:0/intel-rapl:0:0/energy_uj",
        "intel-rapl:1/energy_uj",
        "intel-rapl:1/intel-rapl:1:0/energy_uj",
    ]
    clock = Clock()
    meter = EnergyMeter(found.sources, clock)
    clock.now = 10.0
    write(tmp_path, zone("intel-rapl:0", "package-0", 671150))  # 0.32885 J before the wrap
    write(tmp_path, zone("intel-rapl:1/intel-rapl:1:0", "dram", 9000000, 65712999613))
    meter.update()
    assert meter.joules == pytest.approx(0.32885 + 0.67115 + 7.0)
    assert meter.seconds == pytest.approx(10.0)


def test_a_package_has_its_cores_in_it_and_the_platform_has_the_package(tmp_path):
    write(tmp_path, DESKTOP)
    assert [one.name for one in find_energy(tmp_path, NONE).sources] == [
        f"{POWERCAP}/intel-rapl:0/energy_uj"
    ]


def test_a_counter_that_only_root_may_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, TWO_SOCKETS | GPUS)
    paths = [*(tmp_path / POWERCAP).rglob("energy_uj")]
    if os.geteuid():
        for path in paths:
            path.chmod(0)
    else:  # root may read anything, so the reading itself is refused

        def refused(self, *arguments, **options):
            if self.name == "energy_uj":
                raise PermissionError(13, "Permission denied", str(self))
            return original(self, *arguments, **options)

        original = type(paths[0]).read_text
        monkeypatch.setattr(type(paths[0]), "read_text", refused)
    found = find_energy(tmp_path, NONE)
    assert {source.reader for source in found.sources} == {"hwmon"}
    assert found.refused[0] == f"{POWERCAP}/intel-rapl:0/energy_uj (Permission denied)"
    assert len(found.refused) == 4


def test_the_energy_of_a_cray_node_has_everything_in_it(tmp_path):
    write(tmp_path, CRAY | TWO_SOCKETS | GPUS)
    clock = Clock()
    found = find_energy(tmp_path, NONE, clock)
    assert [source.reader for source in found.sources] == ["pm_counters"]
    meter = EnergyMeter(found.sources, clock)
    clock.now = 30.0
    write(tmp_path, {"sys/cray/pm_counters/energy": "43281361 J 1608574142321342 us"})
    write(tmp_path, {"sys/cray/pm_counters/freshness": "712645"})
    meter.update()
    assert (meter.joules, meter.seconds) == (15000.0, 30.0)


def test_a_cray_counter_that_has_stopped_is_not_counted(tmp_path, caplog):
    write(tmp_path, CRAY)
    clock = Clock()
    meter = EnergyMeter(find_energy(tmp_path, NONE, clock).sources, clock)
    clock.now = 0.05  # too early for the next number
    meter.update()
    clock.now = 30.0
    meter.update()
    assert "its freshness does not rise any more" in caplog.text
    assert meter.seconds == pytest.approx(0.05)
    clock.now = 60.0  # it goes on, and has counted meanwhile
    write(tmp_path, {"sys/cray/pm_counters/energy": "43266461 J"})
    write(tmp_path, {"sys/cray/pm_counters/freshness": "712346"})
    meter.update()
    assert (meter.joules, meter.seconds) == (100.0, 60.0)


def test_gpus_tell_their_energy_or_else_their_power(tmp_path):
    write(tmp_path, GPUS)
    first, second = find_energy(tmp_path, NONE).sources
    assert (first.read(), first.is_power) == (35.0, True)
    assert (second.read(), second.is_power) == (123.0, False)


def test_a_machine_without_counters_has_no_sources(tmp_path):
    found = find_energy(tmp_path, NONE)
    assert (found.sources, found.refused) == ([], [])


STAND_IN = r"""
#include <stdio.h>
#include <string.h>
/* Two GPUs: an old one that tells its power only, and one that tells its energy. A third one may
   not be used. */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(0x7f0000000000UL + index);
    return index == 2 ? 4 : 0;
}
static int number(void *device) { return (int)((unsigned long)device - 0x7f0000000000UL); }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-%d", number(device));
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
    static unsigned long long spent = 5000000000000ULL;
    if (number(device) == 0) return 3;
    spent += 250000;
    *energy = spent;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *power) { *power = 72500; return 0; }
"""


def build(folder, text):
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_nvidias_gpus_are_read_by_their_library(tmp_path):
    found = find_energy(tmp_path, build(tmp_path, STAND_IN))
    old, new = found.sources
    assert [one.name for one in found.sources] == ["GPU-0", "GPU-1"]
    assert (old.read(), old.is_power) == (72.5, True)
    before = new.read()
    assert before > 5e9  # 64 bits arrive whole
    assert new.read() - before == pytest.approx(250.0)
    meter = EnergyMeter([new])
    meter.update()
    assert meter.joules == pytest.approx(250.0)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("before", "after"),
    [("return 0; }\nint nvmlDeviceGetCount", "return 9; }\nint nvmlDeviceGetCount"),
     ("nvmlDeviceGetTotalEnergyConsumption", "nvmlOther")],
    ids=["no driver", "an old library"],
)  # fmt: skip
def test_a_library_that_does_not_work_is_no_source(tmp_path, before, after):
    library = build(tmp_path, STAND_IN.replace(before, after))
    assert find_energy(tmp_path, library).sources == []
