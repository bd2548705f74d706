"""Machines of made-up files: what Linux and three vendors' drivers show of NUMA nodes and GPUs.

A file is a path below the root and its text; a text of "->folder" is a link to that folder.
"""

from __future__ import annotations

from pathlib import Path


def make(root: Path, *parts: dict[str, str]) -> Path:
    """Write the files of all parts below a folder, and return it."""
    for part in parts:
        for name, text in part.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                target = root / text[2:]
                target.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
            else:
                path.write_text(text)
    return root


def numa(cpus: list[str], per_socket: int = 1) -> dict[str, str]:
    """NUMA nodes of these CPUs: 12 to another one of the same socket, else 32."""
    files = {}
    for node, its in enumerate(cpus):
        folder = f"sys/devices/system/node/node{node}"
        distances = [
            10 if other == node else 12 if other // per_socket == node // per_socket else 32
            for other in range(len(cpus))
        ]
        files[f"{folder}/cpulist"] = f"{its}\n"
        files[f"{folder}/distance"] = " ".join(map(str, distances)) + "\n"
    return files


def pci(address: str, node: int) -> dict[str, str]:
    return {f"sys/bus/pci/devices/{address}/numa_node": f"{node}\n"}


def nvidia(
    address: str, node: int, minor: int, uuid: str = "GPU-????", model: str = "A100"
) -> dict[str, str]:
    """An NVIDIA GPU: the files of its driver, and /dev/nvidiaN."""
    told = {"Model": model, "IRQ": "63", "GPU UUID": uuid, "Device Minor": str(minor)}
    lines = "".join(f"{name}: \t {value}\n" for name, value in told.items())
    return {
        f"proc/driver/nvidia/gpus/{address}/information": lines,
        f"dev/nvidia{minor}": "",
        **pci(address, node),
    }


def amd(number: int, address: str, node: int, unique: int = 0, part: int = 0) -> dict[str, str]:
    """An AMD GPU, or a part of one: node `number` of the driver's topology."""
    domain, bus, device = (int(word, 16) for word in address.split(".")[0].split(":"))
    folder = f"sys/class/kfd/kfd/topology/nodes/{number}"
    told = {
        "simd_count": 440,
        "location_id": part << 28 | bus << 8 | device << 3,
        "domain": domain,
        "unique_id": unique,
    }
    lines = "".join(f"{name} {value}\n" for name, value in told.items())
    return {
        f"{folder}/gpu_id": f"{51212 + number}\n",
        f"{folder}/properties": lines,
        **pci(address, node),
    }


def processor(number: int) -> dict[str, str]:
    """A processor in the topology of AMD's driver."""
    folder = f"sys/class/kfd/kfd/topology/nodes/{number}"
    return {f"{folder}/gpu_id": "0\n", f"{folder}/properties": "cpu_cores_count 64\n"}


def card(
    number: int, address: str, vendor: str = "0x8086", tiles: int = 2, driver: str = "i915"
) -> dict[str, str]:
    """A graphics card: sysfs of the drivers i915 and xe."""
    folder = f"sys/class/drm/card{number}"
    files = {f"{folder}/device": f"->sys/devices/{address}"}
    files[f"sys/devices/{address}/vendor"] = f"{vendor}\n"
    for tile in range(tiles):
        inside = f"{folder}/gt/gt{tile}" if driver == "i915" else f"{folder}/device/tile{tile}"
        files[f"{inside}/id"] = ""
    return files
