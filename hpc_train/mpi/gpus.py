"""The GPUs of a node, by their drivers' files.

No driver is loaded, because a driver has to see the choice of a GPU before it starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Vendor:
    """A maker of GPUs.

    Args:
        name: NVIDIA, AMD or Intel.
        build: the build of torch that computes on its GPUs.
        variables: variables that choose the GPUs which a process sees. The first one numbers the
            GPUs that the others have left.
        driver: the file name of the library that reads these variables when it starts.
        by_pci: a variable and its value, with which the driver numbers GPUs in the order of their
            PCI addresses; nothing if it needs none.
    """

    name: str
    build: str
    variables: tuple[str, ...]
    driver: str
    by_pci: tuple[str, str] | None = None


class Gpu(NamedTuple):
    """A GPU of a node.

    Args:
        numa: the NUMA node that it hangs on; -1 if Linux does not tell.
        uuid: what variables may call it instead of its number; "" if its files do not tell.
    """

    numa: int
    uuid: str = ""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node.

    Args:
        count: number of GPUs.
        vendor: their maker.
        each: the GPUs in the order of their numbers; nothing if the files of their driver do not
            tell this order, or the NUMA node of one of them.
    """

    count: int
    vendor: Vendor
    each: tuple[Gpu, ...] = ()


# SLURM and nvidia-smi number GPUs by their PCI addresses. If CUDA is not told to, it takes the
# fastest first ("CUDA Environment Variables" in its programming guide).
NVIDIA = Vendor(
    "NVIDIA",
    "CUDA",
    ("CUDA_VISIBLE_DEVICES",),
    "libcuda.so",
    ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
)
# HIP numbers the GPUs that ROCr has left, and reads CUDA's variable if its own is not set. So only
# one of them may be changed: a second one would choose from the one GPU that the first has left.
AMD = Vendor(
    "AMD",
    "ROCm",
    ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "libhsa-runtime64.so",
)
# Level Zero's variables: oneapi-src.github.io/level-zero-spec, "Environment Variables".
INTEL = Vendor(
    "Intel",
    "XPU",
    ("ZE_AFFINITY_MASK",),
    "libze_loader.so",
    ("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1"),
)
NONE = Gpus(0, NVIDIA)
INTEL_PCI = 0x8086
OPEN = os.R_OK | os.W_OK


def count_gpus(root: Path, environ: Mapping[str, str]) -> Gpus:
    """The GPUs that this process may open on its node.

    Args:
        root: the root of the file system, "/".
        environ: the environment, which says whether Intel's GPUs are numbered by card or by tile.
    """
    files = (path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit())
    # A cgroup leaves the files of other jobs' GPUs there, and refuses to open them.
    if nvidia := sum(os.access(path, OPEN) for path in files):
        return Gpus(nvidia, NVIDIA, _in_order(_nvidia(root, environ), nvidia, NVIDIA, environ))
    if amd := list(_amd(root)):
        return Gpus(len(amd), AMD, _in_order(amd, len(amd), AMD, environ))
    if intel := list(_intel(root, environ)):
        return Gpus(len(intel), INTEL, _in_order(intel, len(intel), INTEL, environ))
    return NONE


def _in_order(
    found: Sequence[Gpu], count: int, vendor: Vendor, environ: Mapping[str, str]
) -> tuple[Gpu, ...]:
    """The GPUs that were found; nothing if one is missing, or the user wants another order."""
    name, value = vendor.by_pci or ("", "")
    known = len(found) == count and all(gpu.numa >= 0 for gpu in found)
    return tuple(found) if known and environ.get(name, value) == value else ()


def _nvidia(root: Path, environ: Mapping[str, str]) -> list[Gpu]:
    """NVIDIA's GPUs by their PCI addresses; nothing if CUDA would not number them so."""
    found, models = [], set()
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*"), key=_address):
        told = _lines(folder / "information", ":")
        # The number of the file in /dev need not be the place in this order.
        if os.access(root / f"dev/nvidia{told.get('Device Minor', '')}", OPEN):
            found.append(Gpu(_numa_node(root, folder.name), told.get("GPU UUID", "")))
            models.add(told.get("Model"))
    return found if len(models) == 1 or "CUDA_DEVICE_ORDER" in environ else []


def _amd(root: Path) -> Iterator[Gpu]:
    """AMD's GPUs in the order of ROCr's numbers."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda node: int(node.name)):
        if _number(node / "gpu_id", 10) == 0:  # a processor
            continue
        told = _lines(node / "properties", None)
        place, unique = int(told.get("location_id", "-1")), int(told.get("unique_id", "0"))
        # Eight bits for the bus, five for the device. The others tell parts of a GPU apart.
        address = f"{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.0" if place >= 0 else "unknown"
        domain = f"{int(told.get('domain', '0')):04x}"
        yield Gpu(_numa_node(root, f"{domain}:{address}"), f"GPU-{unique:016x}")


def _intel(root: Path, environ: Mapping[str, str]) -> Iterator[Gpu]:
    """Intel's GPUs in the order of their PCI addresses, by the card or the tile."""
    cards = [path for path in (root / "sys/class/drm").glob("card*") if path.name[4:].isdigit()]
    by_card = environ.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    devices = {card: (card / "device").resolve() for card in cards if _is_intel(card)}
    for card in sorted(devices, key=lambda card: _address(devices[card])):
        gpu = Gpu(_numa_node(root, devices[card].name))
        yield from [gpu] * (1 if by_card else _tiles(card))


def _address(device: Path) -> list[int]:
    """The numbers of a PCI address, such as 0000:18:00.0, by which addresses are sorted."""
    return [int(part, 16) for part in re.findall(r"[0-9a-f]+", device.name)]


def _numa_node(root: Path, address: str) -> int:
    try:
        return int(
            (root / "sys/bus/pci/devices" / address / "numa_node").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return -1


def _lines(path: Path, separator: str | None) -> dict[str, str]:
    """Names and values in a file that has a pair of them on each line."""
    try:
        pairs = [line.split(separator, 1) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _number(path: Path, base: int) -> int:
    """The number in a file; 0 if it cannot be read, as where a cgroup hides the GPU."""
    try:
        return int(path.read_text(encoding="utf-8"), base)
    except (OSError, ValueError):
        return 0


def _is_intel(card: Path) -> bool:
    """Whether a graphics card is a GPU of Intel's, and not the one inside a processor."""
    address = (card / "device").resolve().name
    inside = address.startswith("0000:00:02.")  # where all of Intel's processors have theirs
    return _number(card / "device/vendor", 16) == INTEL_PCI and not inside


def _tiles(card: Path) -> int:
    """Number of a card's tiles; the drivers i915 and xe list them in different folders."""
    return max(1, len(list(card.glob("gt/gt*"))), len(list(card.glob("device/tile*"))))
