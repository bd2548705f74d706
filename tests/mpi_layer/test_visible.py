"""Each rank sees a GPU of its own: the nearest one, or the one of its local rank."""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpc_train.errors import SetupError
from hpc_train.host.numa import NumaNodes, read_numa
from hpc_train.mpi import runtime
from hpc_train.mpi.binding import expected_reach
from hpc_train.mpi.environment import Launch, read_launch
from hpc_train.mpi.gpus import AMD, INTEL, NVIDIA, Gpu, Gpus, count_gpus
from hpc_train.mpi.visible import choices, nearer_device, offered, own_numa, visible_device
from tests.mpi_layer import machines


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
        with pytest.raises(SetupError, match=r"^rank 3 sees 4 GPUs, and Hydra does not tell"):
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


# Machines of real sites, by what they say of them: a node's files, the cores of its ranks, and what
# its launcher sets.


def srun(masks=""):
    kind = "mask_cpu:" if masks else "none"
    return lambda rank, size: {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_CPU_BIND_TYPE": kind,
        "SLURM_CPU_BIND_LIST": masks,
    }


def pals(rank, size):
    return {
        "PALS_RANKID": str(rank),
        "PMI_SIZE": str(size),
        "PALS_LOCAL_RANKID": str(rank),
        "PALS_LOCAL_SIZE": str(size),
    }


def open_mpi(rank, size):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
    }


def mpirun_in_slurm(rank, size):
    """The ranks of a daemon that srun has started on this node, as the second of two."""
    inherited = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    masks = ",".join(["0xff"] * size)
    return {
        **inherited,
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_CPU_BIND_LIST": masks,
        **open_mpi(rank, size),
    }


def blocks(size, each, first=0):
    """Cores of ranks in their order, all the same number of them."""
    return [range(first + rank * each, first + (rank + 1) * each) for rank in range(size)]


def masked(cores):
    return ",".join(hex(sum(1 << core for core in its)) for its in cores)


POLARIS = [
    machines.numa(["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"], per_socket=4),
    machines.nvidia("0000:07:00.0", 3, minor=0),
    machines.nvidia("0000:46:00.0", 2, minor=1),
    machines.nvidia("0000:85:00.0", 1, minor=2),
    machines.nvidia("0000:c7:00.0", 0, minor=3),
]
PERLMUTTER = [machines.numa([f"{n}-{n + 15},{n + 64}-{n + 79}" for n in (0, 16, 32, 48)], 4)]
PERLMUTTER += POLARIS[1:]
GCDS = ["c1", "c6", "c9", "cc", "d1", "d6", "d9", "dc"]
LUMI = [
    machines.numa([f"{n}-{n + 15},{n + 64}-{n + 79}" for n in (0, 16, 32, 48)], per_socket=4),
    *(machines.processor(node) for node in range(4)),
    *(
        machines.amd(4 + n, f"0000:{bus}:00.0", node)
        for n, (bus, node) in enumerate(zip(GCDS, [3, 3, 1, 1, 0, 0, 2, 2], strict=True))
    ),
]
LUMI_CORES = [range(first, first + 7) for first in (49, 57, 17, 25, 1, 9, 33, 41)]
AURORA = [
    machines.numa(["0-51,104-155", "52-103,156-207", "", ""]),  # two nodes are fast memory
    *(
        machines.card(n, address) | machines.pci(address, n // 3)
        for n, address in enumerate(
            f"{domain}:{bus}:00.0" for domain in ("0000", "0001") for bus in ("18", "42", "6c")
        )
    ),
]
AURORA_CORES = blocks(6, 4, first=4) + blocks(6, 4, first=56)
JUWELS = [
    machines.numa([f"{6 * n}-{6 * n + 5}" for n in range(8)], per_socket=4),
    *(
        machines.nvidia(f"0000:{bus}:00.0", node, minor=n)
        for n, (bus, node) in enumerate([("03", 3), ("44", 1), ("84", 7), ("c4", 5)])
    ),
]
JUWELS_CORES = [range(first, first + 6) for first in (18, 6, 42, 30)]
DGX = [  # a DGX A100, by `nvidia-smi topo -m`
    machines.numa([f"{16 * n}-{16 * n + 15}" for n in range(8)], per_socket=4),
    *(
        machines.nvidia(f"0000:{bus}:00.0", node, minor)
        for bus, node, minor in [
            ("07", 3, 2),
            ("0f", 3, 3),
            ("47", 1, 0),
            ("4e", 1, 1),
            ("87", 7, 6),
            ("90", 7, 7),
            ("b7", 5, 4),
            ("bd", 5, 5),
        ]
    ),
]


def seen(root, launcher, cores, environ=None):
    """What the variable of each rank of a node says, if each rank alone decides."""
    found = []
    for rank, its in enumerate(cores):
        mine = {**(environ or {}), **launcher(rank, len(cores))}
        launch, gpus = read_launch(mine), count_gpus(root, mine)
        expected = expected_reach(mine, launch, read_numa(root / "sys/devices/system"), its)
        told = visible_device(mine, launch, gpus, expected)
        found.append(next((told[name] for name in gpus.vendor.variables if name in told), None))
    return found


@pytest.mark.parametrize(
    ("files", "launcher", "cores", "expected"),
    [
        (POLARIS, pals, blocks(4, 8), "3210"),
        (PERLMUTTER, srun(masked(blocks(4, 16))), blocks(4, 16), "3210"),
        (LUMI, srun(masked(LUMI_CORES)), LUMI_CORES, "01234567"),
        (LUMI, srun(masked(blocks(8, 8))), blocks(8, 8), "45236701"),  # the cores in order
        (AURORA, pals, AURORA_CORES, [*"0123456789", "10", "11"]),
        (JUWELS, srun(), JUWELS_CORES, "0123"),  # psid binds ranks to the cores near their GPUs
        (JUWELS, srun(masked(blocks(4, 12))), blocks(4, 12), "1032"),
        (DGX, open_mpi, blocks(8, 16), "02314675"),
        (DGX, open_mpi, [range(128)] * 8, "01234567"),  # not bound
        (POLARIS, mpirun_in_slurm, blocks(4, 8), "3210"),
        (POLARIS, pals, [range(64)] * 4, "0123"),
        (POLARIS, pals, blocks(8, 4), "33221100"),
    ],
)
def test_ranks_see_the_gpus_near_their_cores(tmp_path, files, launcher, cores, expected):
    root = machines.make(tmp_path, *files)
    assert seen(root, launcher, cores) == list(expected)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0,1,2,3", "3210"),  # as SLURM lists them in each step: no order is meant
        ("3,2,1,0", "3210"),
        ("1,0,3,2", "1032"),  # an order by hand
        ("0,2,1,3", "0213"),
        ("1,2", "1212"),
        ("2", None),  # one for each rank, chosen by the launcher
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-d", "GPU-c", "GPU-b", "GPU-a"]),  # as PBS lists them
        ("GPU-d,GPU-c", ["GPU-d", "GPU-c", "GPU-d", "GPU-c"]),
        ("MIG-1,MIG-2,MIG-3,MIG-4", ["MIG-1", "MIG-2", "MIG-3", "MIG-4"]),
        ("0,1,2,7", "0127"),  # of a GPU that is not there nothing is known
    ],
)
def test_an_order_that_somebody_has_chosen_stays(tmp_path, listed, expected):
    numbered = [POLARIS[0]]
    for minor, (uuid, node) in enumerate(zip("abcd", [3, 2, 1, 0], strict=True)):
        numbered.append(machines.nvidia(f"0000:{minor + 1}0:00.0", node, minor, f"GPU-{uuid}00"))
    root = machines.make(tmp_path, *numbered)
    found = seen(root, pals, blocks(4, 8), {"CUDA_VISIBLE_DEVICES": listed})
    assert found == (list(expected) if expected else [None] * 4)


def test_cuda_is_told_the_order_in_which_its_gpus_were_counted(tmp_path):
    root = machines.make(tmp_path, *POLARIS)
    gpus, numa = count_gpus(root, {}), read_numa(root / "sys/devices/system")
    launch = Launch("PALS", 1, 4, 1, 4)
    told = visible_device({}, launch, gpus, expected_reach({}, launch, numa, range(8, 16)))
    assert told == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}
    fastest = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert seen(root, pals, blocks(4, 8), fastest) == list("0123")


def test_hip_numbers_the_gpus_that_rocr_leaves(tmp_path):
    root = machines.make(tmp_path, *LUMI)
    both = {"ROCR_VISIBLE_DEVICES": "2,3,6,7", "HIP_VISIBLE_DEVICES": "0,1,2,3"}
    cores = [LUMI_CORES[gcd] for gcd in (6, 7, 2, 3)]
    assert seen(root, srun(masked(cores)), cores, both) == list("2301")
    by_hand = {**both, "ROCR_VISIBLE_DEVICES": "7,6,3,2"}
    assert seen(root, srun(masked(cores)), cores, by_hand) == list("0123")


@pytest.mark.parametrize("listed", ["", "0xffff", "f,f0,f00", "none,none,none,none"])
def test_where_srun_does_not_tell_the_cores_of_each_rank_local_ranks_decide(tmp_path, listed):
    root = machines.make(tmp_path, *PERLMUTTER)
    told = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": listed}

    def launcher(rank, size):
        return {**srun()(rank, size), **told}

    assert seen(root, launcher, blocks(4, 16)) == list("0123")


@st.composite
def bound_ranks(draw):
    """A machine, its GPUs and the cores of its ranks, in any arrangement."""
    nodes, each = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cpus = {node: set(range(node * each, (node + 1) * each)) for node in range(nodes)}
    distances = {a: {b: 10 if a == b else 12 + 20 * (a // 2 != b // 2) for b in cpus} for a in cpus}
    gpus = draw(st.lists(st.sampled_from(sorted(cpus)), min_size=2, max_size=6))
    core = st.integers(0, nodes * each - 1)
    ranks = draw(st.lists(st.sets(core, min_size=1), min_size=1, max_size=6))
    vendor = draw(st.sampled_from([NVIDIA, AMD, INTEL]))
    return NumaNodes(cpus, distances), Gpus(len(gpus), vendor, tuple(map(Gpu, gpus))), ranks


def alone(numa, gpus, ranks, launcher):
    """The number of the GPU that each rank chooses alone."""
    found = []
    for rank, cores in enumerate(ranks):
        mine = launcher(rank, len(ranks))
        launch = Launch("PALS", rank, len(ranks), rank, len(ranks))
        expected = expected_reach(mine, launch, numa, cores)
        told = visible_device(mine, launch, gpus, expected)
        found.append(int(told[gpus.vendor.variables[0]]))
    return found


@given(bound_ranks())
def test_ranks_that_srun_has_bound_choose_as_near_as_any_choice(machine):
    numa, gpus, ranks = machine
    found = alone(numa, gpus, ranks, srun(masked(ranks)))
    whole = max(1, len(ranks) // gpus.count)
    assert max(map(found.count, found)) <= whole + (len(ranks) % gpus.count > 0)
    distances = [[numa.reach(its)[gpu.numa] for gpu in gpus.each] for its in ranks]
    if len(ranks) <= gpus.count:
        assert len(set(found)) == len(ranks)
        ways = itertools.permutations(range(gpus.count), len(ranks))
        best = min(sum(row[gpu] for row, gpu in zip(distances, way, strict=True)) for way in ways)
        assert sum(row[gpu] for row, gpu in zip(distances, found, strict=True)) == best


@given(bound_ranks())
def test_ranks_that_another_launcher_has_bound_anyhow_choose_different_gpus(machine):
    numa, gpus, ranks = machine
    everywhere = [all(its & set(cores) for its in numa.cpus.values()) for cores in ranks]
    assume(all(everywhere) or not any(everywhere))
    found = alone(numa, gpus, ranks, pals)
    assert len(set(found)) == min(len(ranks), gpus.count)
    if all(everywhere):
        assert found == [rank % gpus.count for rank in range(len(ranks))]


@pytest.fixture
def reversed_node(job, monkeypatch):
    """A node with a NUMA node for each rank, GPUs against the order of the cores, and ranks that
    are bound in the order of the GPUs."""
    size, rank = job.node.size, job.node.rank
    cpus = {node: {node} for node in range(size)}
    far = {a: {b: 10 if a == b else 32 for b in cpus} for a in cpus}
    gpus = Gpus(size, NVIDIA, tuple(Gpu(node) for node in reversed(range(size))))
    monkeypatch.setattr(runtime, "read_numa", lambda: NumaNodes(cpus, far))
    monkeypatch.setattr(runtime, "count_gpus", lambda root, environ: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {size - 1 - rank})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is taken back afterwards
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return gpus


@pytest.mark.mpi(min_size=2)
def test_ranks_that_expected_other_cores_choose_again_when_mpi_runs(job, reversed_node):
    started = runtime.start_runtime()
    try:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == str(job.node.rank)
        assert started.gpu_numa == job.node.size - 1 - job.node.rank
    finally:
        started.close()


@pytest.mark.mpi(min_size=2)
def test_a_choice_that_mpi_has_given_to_the_driver_stays(job, reversed_node, monkeypatch):
    """An MPI that knows GPUs loads the driver, which reads the variables."""
    loaded = dataclasses.replace(NVIDIA, driver="libmpi")
    gpus = dataclasses.replace(reversed_node, vendor=loaded)
    reach = {node: 32 - 22 * (node == job.node.rank) for node in range(job.node.size)}
    assert nearer_device(job.node, os.environ, reversed_node, reach)
    assert not nearer_device(job.node, os.environ, gpus, reach)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_see_other_gpus_keep_theirs(job, reversed_node):
    listed = "0,1" if job.node.rank else "0"
    mine = {"CUDA_VISIBLE_DEVICES": listed}
    assert not nearer_device(job.node, mine, reversed_node, {0: 10, 1: 10})


def test_the_numa_node_of_the_gpu_that_a_launcher_shows_is_known(tmp_path):
    root = machines.make(tmp_path, *LUMI)
    gpus = count_gpus(root, {})
    assert own_numa({"ROCR_VISIBLE_DEVICES": "4"}, gpus) == 0
    assert own_numa({}, gpus) == -1
    assert own_numa({"ROCR_VISIBLE_DEVICES": "4"}, amd(8)) == -1
