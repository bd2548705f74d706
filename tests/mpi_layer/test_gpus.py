"""GPUs are counted by their drivers' files, and found in the order of the drivers' numbers."""

from __future__ import annotations

import os

import pytest

from hpc_train.mpi.gpus import AMD, INTEL, NVIDIA, Gpu, Gpus, count_gpus
from tests.mpi_layer import machines
from tests.mpi_layer.machines import card


@pytest.fixture
def node(tmp_path):
    """Makes a node of the files of its drivers."""
    return lambda *parts: machines.make(tmp_path, *parts)


def test_a_node_without_gpus_has_none(node):
    assert count_gpus(node({}), {}).count == 0


def test_amd_gpus_are_counted_without_their_driver(node):
    kfd = "sys/class/kfd/kfd/topology/nodes"
    ids = ["0", "51212", "51213", "unreadable"]
    root = node({f"{kfd}/{number}/gpu_id": f"{gpu}\n" for number, gpu in enumerate(ids)})
    assert count_gpus(root, {}) == Gpus(2, AMD)


def test_nvidia_gpus_are_counted_without_their_driver(node):
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    root = node({f"dev/{name}": "" for name in names})
    assert count_gpus(root, {}) == Gpus(3, NVIDIA)


def test_a_gpu_that_the_scheduler_has_closed_is_not_counted(node, monkeypatch):
    """SLURM's cgroup refuses to open the GPUs of other jobs, and their files stay."""
    root = node({f"dev/nvidia{number}": "" for number in range(4)})
    closed = {str(root / "dev/nvidia0"), str(root / "dev/nvidia3")}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed)
    assert count_gpus(root, {}) == Gpus(2, NVIDIA)


@pytest.mark.parametrize("driver", ["i915", "xe"])
@pytest.mark.parametrize(
    ("hierarchy", "count"), [({}, 4), ("FLAT", 4), ("COMBINED", 4), ("COMPOSITE", 2)]
)
def test_intel_gpus_are_counted_by_the_tile_or_the_card(node, driver, hierarchy, count):
    root = node(
        card(0, "0000:18:00.0", driver=driver)
        | card(1, "0000:42:00.0", driver=driver)
        | card(2, "0000:02:00.0", vendor="0x1a03", tiles=0)  # the board's console
        | card(3, "0000:00:02.0", driver=driver)  # inside a processor
        | {"sys/class/drm/card0-HDMI-A-1/status": ""}
    )
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy} if hierarchy else {}
    assert count_gpus(root, environ) == Gpus(count, INTEL)


def test_an_intel_gpu_of_one_tile_is_one(node):
    assert count_gpus(node(card(0, "0000:18:00.0", tiles=0)), {}) == Gpus(1, INTEL)


def orders(root, environ=None):
    return [gpu.numa for gpu in count_gpus(root, environ or {}).each]


def test_nvidia_gpus_are_in_the_order_of_their_addresses_and_not_of_their_files(node):
    root = node(
        machines.nvidia("0000:c1:00.0", 0, minor=0, uuid="GPU-c1"),
        machines.nvidia("0000:41:00.0", 1, minor=2, uuid="GPU-41"),
        machines.nvidia("10000:01:00.0", 3, minor=1, uuid="GPU-vmd"),
    )
    expected = (Gpu(1, "GPU-41"), Gpu(0, "GPU-c1"), Gpu(3, "GPU-vmd"))
    assert count_gpus(root, {}) == Gpus(3, NVIDIA, expected)
    (root / "dev/nvidia0").unlink()
    assert count_gpus(root, {}) == Gpus(2, NVIDIA, expected[::2])


def test_the_order_of_gpus_that_cuda_sorts_by_their_speed_is_not_known(node):
    root = node(
        machines.nvidia("0000:01:00.0", 0, minor=0, model="T400"),
        machines.nvidia("0000:41:00.0", 1, minor=1, model="H100"),
    )
    assert orders(root) == []
    assert orders(root, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [0, 1]
    (root / "proc/driver/nvidia/gpus/0000:01:00.0/information").write_text(
        "Model: H100\nDevice Minor: 0\n"
    )
    assert orders(root) == [0, 1]
    assert orders(root, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == []


def test_amd_gpus_are_in_the_order_of_their_driver(node):
    root = node(
        machines.processor(0),
        machines.amd(10, "0000:c1:00.0", 3),
        machines.amd(4, "0001:d1:00.0", 1, unique=0x2F0B),
        machines.amd(5, "0001:d1:00.0", 1, part=1),
    )
    assert orders(root) == [1, 1, 3]
    assert count_gpus(root, {}).each[0].uuid == "GPU-0000000000002f0b"


def test_intel_gpus_are_in_the_order_of_their_addresses(node):
    root = node(
        card(0, "0001:18:00.0"),
        machines.pci("0001:18:00.0", 1),
        card(1, "0000:42:00.0"),
        machines.pci("0000:42:00.0", 0),
    )
    assert orders(root) == [0, 0, 1, 1]
    assert orders(root, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}) == [0, 1]
    assert orders(root, {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "0"}) == []


@pytest.mark.parametrize("node_told", ["-1\n", ""])
def test_gpus_of_no_known_numa_node_are_counted(node, node_told):
    root = node(
        machines.amd(1, "0000:c1:00.0", 0),
        machines.amd(2, "0000:c9:00.0", 0),
        {"sys/bus/pci/devices/0000:c9:00.0/numa_node": node_told},
    )
    assert count_gpus(root, {}) == Gpus(2, AMD)
