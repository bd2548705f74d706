"""GPUs are counted by their drivers' files, and each local rank gets one of its own."""

from __future__ import annotations

import os

import pytest

from hpc_train.errors import SetupError
from hpc_train.mpi.environment import Launch, read_launch
from hpc_train.mpi.gpus import (
    AMD,
    INTEL,
    NVIDIA,
    Gpus,
    choices,
    count_gpus,
    offered,
    visible_device,
)


def nvidia(count):
    return Gpus(count, NVIDIA)


def amd(count):
    return Gpus(count, AMD)


def intel(count):
    return Gpus(count, INTEL)


@pytest.mark.parametrize(
    ("environ", "local_rank", "gpus", "expected"),
    [
        ({}, 2, nvidia(4), {"CUDA_VISIBLE_DEVICES": "2"}),
        ({}, 5, nvidia(4), {"CUDA_VISIBLE_DEVICES": "1"}),
        ({}, 1, nvidia(1), {}),
        ({}, 1, nvidia(0), {}),
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, 1, nvidia(8), {"CUDA_VISIBLE_DEVICES": "7"}),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, 1, nvidia(8), {"CUDA_VISIBLE_DEVICES": "7"}),
        ({"CUDA_VISIBLE_DEVICES": "4"}, 1, nvidia(8), {}),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, nvidia(8), {}),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 1, nvidia(8), {}),
        ({}, 2, amd(8), {"HIP_VISIBLE_DEVICES": "2"}),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 5, amd(8), {"ROCR_VISIBLE_DEVICES": "5"}),
        ({"ROCR_VISIBLE_DEVICES": "4,7"}, 1, amd(8), {"ROCR_VISIBLE_DEVICES": "7"}),
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, 1, amd(8), {"CUDA_VISIBLE_DEVICES": "7"}),
        (
            {"ROCR_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "1,0"},
            1,
            amd(8),
            {"HIP_VISIBLE_DEVICES": "0"},  # of the two that ROCr leaves
        ),
        ({"ROCR_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "1"}, 1, amd(8), {}),
        ({}, 11, intel(12), {"ZE_AFFINITY_MASK": "11"}),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, 2, intel(12), {"ZE_AFFINITY_MASK": "1.0"}),
        ({"ZE_AFFINITY_MASK": "3"}, 2, intel(12), {}),
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, 2, intel(12), {"ZE_AFFINITY_MASK": "2"}),
        # SYCL numbers what the mask leaves: a mask for a selector of one rank would leave nothing.
        ({"ONEAPI_DEVICE_SELECTOR": "level_zero:2"}, 2, intel(12), {}),
    ],
)
def test_local_ranks_share_out_the_devices(environ, local_rank, gpus, expected):
    launch = Launch("Slurm", local_rank, 16, local_rank, 16)
    assert visible_device(environ, launch, gpus) == expected


def test_ranks_never_take_the_first_gpu_because_nothing_tells_their_place():
    launch = read_launch({"PMI_RANK": "3", "PMI_SIZE": "4"})
    for gpus in (nvidia(4), amd(4), intel(4)):
        with pytest.raises(SetupError, match=r"^rank 3 of 4 sees 4 GPUs, and Hydra does not tell"):
            visible_device({}, launch, gpus)
    assert visible_device({}, launch, nvidia(1)) == {}
    assert visible_device({"CUDA_VISIBLE_DEVICES": "2"}, launch, nvidia(4)) == {}
    assert visible_device({"CUDA_VISIBLE_DEVICES": "0,1"}, launch, nvidia(0)) == {}


def test_what_a_job_may_use_is_what_its_scheduler_shows_it():
    assert choices({}, nvidia(2)) == ["0", "1"]
    assert choices({"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"}, nvidia(8)) == ["GPU-1f", "GPU-2e"]
    assert choices({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, nvidia(8)) == ["0"]
    assert choices({"CUDA_VISIBLE_DEVICES": ""}, nvidia(8)) == []


def test_a_job_is_offered_gpus_only_where_there_are_some():
    assert offered({"CUDA_VISIBLE_DEVICES": "4,7"}, nvidia(8)) == nvidia(2)
    assert offered({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, nvidia(0)) == nvidia(0)


@pytest.fixture
def node(tmp_path):
    """Files of a node's drivers, by their paths; a value is a text, or a folder it links to."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                target = tmp_path / text[2:]
                target.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
            else:
                path.write_text(text)
        return tmp_path

    return make


def test_a_node_without_gpus_has_none(node):
    assert count_gpus(node({}), {}).count == 0


def test_amd_gpus_are_counted_without_their_driver(node):
    kfd = "sys/class/kfd/kfd/topology/nodes"
    ids = ["0", "51212", "51213", "unreadable"]
    root = node({f"{kfd}/{number}/gpu_id": f"{gpu}\n" for number, gpu in enumerate(ids)})
    assert count_gpus(root, {}) == amd(2)


def test_nvidia_gpus_are_counted_without_their_driver(node):
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
    root = node({f"dev/{name}": "" for name in names})
    assert count_gpus(root, {}) == nvidia(3)


def test_a_gpu_that_the_scheduler_has_closed_is_not_counted(node, monkeypatch):
    """SLURM's cgroup refuses to open the GPUs of other jobs, and their files stay."""
    root = node({f"dev/nvidia{number}": "" for number in range(4)})
    closed = {str(root / "dev/nvidia0"), str(root / "dev/nvidia3")}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed)
    assert count_gpus(root, {}) == nvidia(2)


def card(number, address, vendor="0x8086", tiles=2, driver="i915"):
    """The files of a graphics card: sysfs of the drivers i915 and xe."""
    folder = f"sys/class/drm/card{number}"
    files = {f"{folder}/device": f"->sys/devices/{address}"}
    files[f"sys/devices/{address}/vendor"] = f"{vendor}\n"
    for tile in range(tiles):
        inside = f"{folder}/gt/gt{tile}" if driver == "i915" else f"{folder}/device/tile{tile}"
        files[f"{inside}/id"] = ""
    return files


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
    assert count_gpus(root, environ) == intel(count)


def test_an_intel_gpu_of_one_tile_is_one(node):
    assert count_gpus(node(card(0, "0000:18:00.0", tiles=0)), {}) == intel(1)


@pytest.mark.parametrize(
    "environ",
    [
        {"PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PMI_RANK": "6", "PMI_SIZE": "8"},
        {"PMI_RANK": "6", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"},
        {"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
        {"FLUX_TASK_RANK": "6", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "2"},
        {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2"},
        {  # jsrun of IBM's Spectrum MPI
            "OMPI_COMM_WORLD_RANK": "6",
            "OMPI_COMM_WORLD_SIZE": "8",
            "JSM_NAMESPACE_LOCAL_RANK": "2",
            "JSM_NAMESPACE_RANK": "6",
            "JSM_NAMESPACE_SIZE": "8",
        },
        {
            "MV2_COMM_WORLD_RANK": "6",
            "MV2_COMM_WORLD_SIZE": "8",
            "MV2_COMM_WORLD_LOCAL_RANK": "2",
        },
    ],
)
@pytest.mark.parametrize("gpus", [nvidia(4), amd(4), intel(4)])
def test_each_launcher_s_local_rank_chooses_the_gpu(environ, gpus):
    launch = read_launch(environ)
    assert visible_device(environ, launch, gpus) == {gpus.vendor.variables[0]: "2"}
