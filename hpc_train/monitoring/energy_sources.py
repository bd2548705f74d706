"""Finds what a node tells about its energy: the counters of Cray nodes, of processors and of GPUs.

What covers a whole node comes first, and then nothing else is read. Otherwise processors, memory
and GPUs are read, none of them twice. Everything is a file of Linux, or NVIDIA's library NVML.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CRAY = Path("sys/cray/pm_counters")
RAPL = Path("sys/class/powercap")
DRM = Path("sys/class/drm")
DRIVERS = ("amdgpu", "i915", "xe")  # of GPUs that tell their energy or power in files
NVML = "libnvidia-ml.so.1"
STALE = 2.0  # seconds without another freshness, after which Cray's counter counts as stopped
MICRO, MILLI = 1e-6, 1e-3
UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE of nvml.h


@dataclass(frozen=True)
class EnergySource:
    """A counter of energy, or a meter of power.

    Args:
        reader: what reads it: pm_counters, rapl, nvml or hwmon.
        name: tells it from all other sources of its node, by whichever rank it is found.
        read: returns joules since some moment, or watts. It raises OSError or ValueError if it
            cannot.
        wrap: joules at which the counter begins again from 0; 0: it does not.
        is_power: whether `read` returns watts.
    """

    reader: str
    name: str
    read: Callable[[], float]
    wrap: float = 0.0
    is_power: bool = False


@dataclass
class FoundEnergy:
    """The sources of a node that this process can read.

    Attributes:
        sources: these.
        refused: what is there and cannot be read, with the reason, in words.
    """

    sources: list[EnergySource] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def try_source(self, source: EnergySource) -> bool:
        """Add a source if it can be read, else note why not."""
        try:
            source.read()
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            self.refused.append(f"{source.name} ({why})")
            return False
        self.sources.append(source)
        return True


def find_energy(
    root: Path = Path("/"), library: str = NVML, clock: Callable[[], float] = time.monotonic
) -> FoundEnergy:
    """The sources that this process can read. None of them counts what another one counts.

    Args:
        root: takes the place of /.
        library: the file of NVML.
        clock: returns seconds.
    """
    found = FoundEnergy()
    for source in _cray(root, clock):
        if found.try_source(source):
            return found  # it has all of the node
    for sources in (_rapl(root), _hwmon(root), _nvml(library)):
        try:
            for source in sources:
                found.try_source(source)
        except OSError as error:  # a folder that may not be listed
            found.refused.append(f"{error.filename} ({error.strerror})")
    return found


def _number(path: Path, unit: float = 1.0) -> float:
    """The number at the beginning of a file, in joules or watts. A unit and a time may follow."""
    words = path.read_text(encoding="utf-8").split()
    if not words:
        raise ValueError(f"{path} is empty")
    return float(words[0]) * unit


def _of_file(path: Path, unit: float) -> Callable[[], float]:
    return lambda: _number(path, unit)


def _cray(root: Path, clock: Callable[[], float]) -> Iterator[EnergySource]:
    """The energy of a Cray node, GPUs and memory included.

    `freshness` rises about ten times a second. If it has stopped, so has the energy.
    """
    folder = root / CRAY
    if (folder / "energy").exists():
        yield EnergySource("pm_counters", str(CRAY / "energy"), _CrayEnergy(folder, clock))


class _CrayEnergy:
    """Reads the energy of a Cray node."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.folder, self._clock = folder, clock
        self._seen, self._since = -1.0, 0.0

    def __call__(self) -> float:
        fresh, now = _number(self.folder / "freshness"), self._clock()
        if fresh != self._seen:
            self._seen, self._since = fresh, now
        if now - self._since > STALE:
            raise ValueError("its freshness does not rise any more")
        return _number(self.folder / "energy")


def _rapl(root: Path) -> Iterator[EnergySource]:
    """The packages of processors, and the memory that is not part of them.

    The zones core and uncore are parts of a package. The zone psys has packages in it, on some
    machines with more than the processor. So neither of them is read.
    """
    for zone in sorted((root / RAPL).glob("intel-rapl:*")):
        if not re.fullmatch(r"intel-rapl:\d+", zone.name):
            continue  # part of another zone, which is looked into below
        if _name(zone).startswith("package"):
            yield _rapl_zone(root, zone)
            inside = sorted(zone.glob(f"{zone.name}:*"))
            yield from (_rapl_zone(root, part) for part in inside if _name(part) == "dram")
        elif _name(zone) == "dram":
            yield _rapl_zone(root, zone)


def _rapl_zone(root: Path, zone: Path) -> EnergySource:
    wrap = 0.0
    with suppress(OSError, ValueError):
        wrap = _number(zone / "max_energy_range_uj", MICRO)
    path = zone / "energy_uj"
    return EnergySource("rapl", str(path.relative_to(root)), _of_file(path, MICRO), wrap)


def _name(folder: Path) -> str:
    try:
        return (folder / "name").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _hwmon(root: Path) -> Iterator[EnergySource]:
    """The GPUs of AMD and Intel: their energy, or else their power."""
    for card in sorted((root / DRM).glob("card*")):
        if not re.fullmatch(r"card\d+", card.name):
            continue  # a connector of a card
        for sensors in sorted((card / "device/hwmon").glob("hwmon*")):
            if _name(sensors) not in DRIVERS:
                continue
            for file, is_power in (
                ("energy1_input", False),
                ("power1_average", True),
                ("power1_input", True),
            ):
                path = sensors / file
                if path.exists():
                    name = str(path.relative_to(root))
                    read = _of_file(path, MICRO)
                    yield EnergySource("hwmon", name, read, is_power=is_power)
                    break


def _nvml(library: str) -> Iterator[EnergySource]:
    """NVIDIA's GPUs: the energy since their driver was loaded, or else their power.

    The library stays loaded as long as the process lives. It makes no context on a GPU.
    """
    try:
        nvml: Any = ctypes.CDLL(library)
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        get_handle = nvml.nvmlDeviceGetHandleByIndex_v2
        energy, power = nvml.nvmlDeviceGetTotalEnergyConsumption, nvml.nvmlDeviceGetPowerUsage
        get_uuid = nvml.nvmlDeviceGetUUID
    except (OSError, AttributeError):  # there is none, or it is too old
        return
    for index in range(count.value):
        device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
        if get_handle(ctypes.c_uint(index), ctypes.byref(device)):
            continue  # not one that this job may use
        if get_uuid(device, uuid, ctypes.c_uint(UUID_BYTES)):
            uuid.value = f"GPU {index}".encode()
        name = uuid.value.decode(errors="replace")
        read = _of_nvml(energy, device, ctypes.c_ulonglong)
        with suppress(OSError):
            read()
            yield EnergySource("nvml", name, read)
            continue
        watts = _of_nvml(power, device, ctypes.c_uint)
        yield EnergySource("nvml", name, watts, is_power=True)


def _of_nvml(function: Any, device: ctypes.c_void_p, kind: Any) -> Callable[[], float]:
    """A reader of a number of NVML, which is in thousandths of a joule or a watt."""

    def read() -> float:
        value = kind()
        code = function(device, ctypes.byref(value))
        if code:
            raise OSError(0, f"NVML's error {code}")
        return float(value.value) * MILLI

    return read
