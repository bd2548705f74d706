"""What is said of the devices that ranks compute on."""

from __future__ import annotations

import pytest

from hpc_train.job.devices import RankDevice, judged_devices
from hpc_train.mpi.gpus import AMD, INTEL, NONE, NVIDIA, Gpus


def on_host(host, devices, gpus, kind="cuda"):
    """Ranks of a host, each on one of these devices."""
    return [
        RankDevice(rank, host, kind, device, gpus, -1, {}) for rank, device in enumerate(devices)
    ]


def test_two_ranks_of_a_node_on_one_device_are_named():
    ranks = on_host("n1", ["a", "b", "a", "b"], Gpus(2, AMD)) + on_host("n2", "ab", Gpus(2, AMD))
    text, fine = judged_devices(ranks)
    assert not fine
    assert "on n1 ranks 0 and 2 share a GPU, ranks 1 and 3 share a GPU" in text
    assert "n2" not in text, "its ranks have names of devices that n1 has, too"


def test_a_node_whose_gpus_idle_is_named():
    text, fine = judged_devices(on_host("n1", [""] * 12, Gpus(12, INTEL), kind="cpu"))
    assert not fine
    assert "on n1 12 Intel GPUs are idle" in text
    assert "torch for XPU" in text
    text, fine = judged_devices(on_host("n1", "ab", Gpus(4, NVIDIA)))
    assert not fine
    assert "on n1 2 of 4 NVIDIA GPUs are idle" in text


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (on_host("n1", ["", ""], NONE, kind="cpu"), "processors"),
        (on_host("n1", "ab", Gpus(2, NVIDIA)), "2 NVIDIA GPUs"),
        # The launcher showed each rank one GPU: of others nothing is known.
        (on_host("n1", "ab", Gpus(1, NVIDIA)) + on_host("n2", "ab", Gpus(1, AMD)), "GPUs"),
        # A GPU that does not tell which one it is counts for a GPU of its own.
        (on_host("n1", ["", ""], Gpus(2, AMD)), "2 AMD GPUs"),
    ],
)
def test_a_device_for_each_rank_is_no_warning(ranks, told):
    text, fine = judged_devices(ranks)
    assert fine
    assert told in text


def test_of_many_hosts_with_idle_gpus_a_few_are_named():
    ranks = [one for n in range(9) for one in on_host(f"n{n}", [""], Gpus(4, NVIDIA), kind="cpu")]
    assert "and 5 hosts more" in judged_devices(ranks)[0]


def far_apart(nodes, cores, kind="cuda"):
    """Ranks with GPUs on these NUMA nodes of two sockets, and with cores of these."""
    gpus = Gpus(len(nodes), NVIDIA)
    return [
        RankDevice(
            rank, "n1", kind, str(rank), gpus, node, {0: 10, 1: 32} if its == 0 else {0: 32, 1: 10}
        )
        for rank, (node, its) in enumerate(zip(nodes, cores, strict=True))
    ]


def test_a_gpu_that_hangs_far_from_its_rank_is_told_if_another_order_is_nearer():
    text, fine = judged_devices(far_apart([0, 1, 0, 1], [0, 0, 1, 1]))
    assert not fine
    assert "on n1 ranks 1 and 2 would be nearer to GPUs of other ranks" in text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize(
    ("nodes", "cores", "told"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], "4 NVIDIA GPUs, each on a NUMA node of its rank's cores"),
        ([0, 0], [0, 1], "1 of them on NUMA nodes of their ranks' cores, and no order is nearer"),
        ([-1, 0], [0, 1], "2 NVIDIA GPUs"),
    ],
)
def test_gpus_as_near_as_they_can_be_are_no_warning(nodes, cores, told):
    text, fine = judged_devices(far_apart(nodes, cores))
    assert fine
    assert text.endswith(told)


def test_where_ranks_compute_on_processors_no_gpu_is_far():
    text, _ = judged_devices(far_apart([0, 1], [1, 0], kind="cpu"))
    assert "nearer" not in text
