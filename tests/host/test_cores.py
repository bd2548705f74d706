"""Physical cores, from what Linux says of each hardware thread."""

from __future__ import annotations

import math

import pytest

from hpc_train.host.cores import cpu_quota, physical_cores


@pytest.fixture
def hyperthreaded(tmp_path):
    """A node of 8 cores with two hardware threads each, numbered as Linux does."""
    for cpu in range(16):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "cores"),
    [
        (range(16), 8),
        (range(8), 8),  # SLURM's --threads-per-core=1: one hardware thread of each core
        ([0, 8, 1, 9], 2),  # SLURM's --cpus-per-task=4 without it
        ([0, 1, 8], 2),
        ([3], 1),
    ],
)
def test_hardware_threads_of_a_core_count_once(hyperthreaded, cpus, cores):
    assert len(physical_cores(cpus, hyperthreaded)) == cores


def test_two_ranks_on_one_core_are_seen_to_share_it(hyperthreaded):
    assert physical_cores([1], hyperthreaded) & physical_cores([9], hyperthreaded)
    assert not physical_cores([1], hyperthreaded) & physical_cores([2], hyperthreaded)


def test_where_linux_does_not_tell_each_number_is_a_core(tmp_path):
    assert len(physical_cores([0, 1, 5], tmp_path)) == 3


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/job/pod\n", {"job/cpu.max": "150000 100000", "job/pod/cpu.max": "max 100000"}, 1.5),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),  # a container sees its own as the root
        (
            "9:memory:/x\n4:cpu,cpuacct:/pod\n",
            {"cpu/pod/cpu.cfs_quota_us": "200000", "cpu/pod/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "4:cpu:/pod\n",
            {"cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("0::/\n", {}, math.inf),
    ],
)
def test_cgroups_limit_the_time_of_cpus(tmp_path, groups, files, cpus):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert cpu_quota(root, own) == cpus
