"""The GPUs of a node, counted by their drivers' files, and dealt out to its ranks before MPI_Init.

No driver is loaded, because a driver has to see the choice of a GPU before it starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import SetupError
from hpc_train.mpi.environment import Launch


@dataclass(frozen=True)
class Vendor:
    """A maker of GPUs.

    Args:
        name: NVIDIA, AMD or Intel.
        build: the build of torch that computes on its GPUs.
        variables: variables that choose the GPUs which a process sees. The first one numbers the
            GPUs that the others have left.
    """

    name: str
    build: str
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a node.

    Args:
        count: number of GPUs.
        vendor: their maker.
    """

    count: int
    vendor: Vendor


NVIDIA = Vendor("NVIDIA", "CUDA", ("CUDA_VISIBLE_DEVICES",))
# HIP numbers the GPUs that ROCr has left, and reads CUDA's variable if its own is not set. So only
# one of them may be changed: a second one would choose from the one GPU that the first has left.
AMD = Vendor("AMD", "ROCm", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
# Level Zero's variable: oneapi-src.github.io/level-zero-spec, "Environment Variables".
INTEL = Vendor("Intel", "XPU", ("ZE_AFFINITY_MASK",))
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
        return Gpus(nvidia, NVIDIA)
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    if amd := sum(_number(gpu_id, 10) != 0 for gpu_id in nodes):  # processors have the id 0
        return Gpus(amd, AMD)
    cards = [path for path in (root / "sys/class/drm").glob("card*") if path.name[4:].isdigit()]
    by_card = environ.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    intel = sum(1 if by_card else _tiles(path) for path in cards if _is_intel(path))
    return Gpus(intel, INTEL) if intel else NONE


def _number(path: Path, base: int) -> int:
    """The number in a file; 0 if it cannot be read, as where a cgroup hides the GPU."""
    try:
        return int(path.read_text(), base)
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


def choices(environ: Mapping[str, str], gpus: Gpus) -> list[str]:
    """The GPUs that a job may use, as its environment names them.

    They are what the scheduler or the user has put into a variable, else all GPUs of the node.
    """
    name = _variable(environ, gpus)
    if name not in environ:
        return [str(number) for number in range(gpus.count)]
    found = list[str]()
    for entry in environ[name].split(","):
        # CUDA stops at the first entry that is no GPU. Slurm writes NoDevFiles for none.
        if entry.strip() in ("", "-1", "NoDevFiles"):
            break
        found.append(entry.strip())
    return found


def offered(environ: Mapping[str, str], gpus: Gpus) -> Gpus:
    """The GPUs of a node that a job may use.

    A variable alone counts for nothing: a site's modules may set it on nodes without GPUs, too.
    """
    return Gpus(len(choices(environ, gpus)) if gpus.count else 0, gpus.vendor)


def _variable(environ: Mapping[str, str], gpus: Gpus) -> str:
    """The variable that chooses last among those that are set, else the vendor's own."""
    variables = gpus.vendor.variables
    return next((name for name in variables if name in environ), variables[0])


def visible_device(environ: Mapping[str, str], launch: Launch, gpus: Gpus) -> dict[str, str]:
    """The variable to set so that each local rank sees a GPU of its own.

    Args:
        environ: the environment. If it has the scheduler's choice of GPUs, these are dealt out.
        launch: this rank's place.
        gpus: the node's GPUs.

    Returns:
        The variable and its value; nothing if the rank sees no more than one GPU.

    Raises:
        SetupError: the rank sees several GPUs, and no launcher tells its local rank.
    """
    visible = choices(environ, gpus)
    # SYCL's variable numbers what Level Zero's has left, and may have been set for each rank.
    chosen = gpus.vendor == INTEL and re.search(r":\d", environ.get("ONEAPI_DEVICE_SELECTOR", ""))
    if len(visible) <= 1 or chosen:
        return {}
    if launch.local_rank is None:
        if not gpus.count:  # a site's modules may set the variable even on nodes without GPUs
            return {}
        raise SetupError(
            f"rank {launch.rank} of {launch.size} sees {len(visible)} GPUs, and {launch.launcher} "
            "does not tell its local rank on the node",
            "let the launcher show each rank one GPU, for instance by srun --gpus-per-task=1, or "
            "set MPI_LOCALRANKID",
        )
    return {_variable(environ, gpus): visible[launch.local_rank % len(visible)]}
