"""One way to multiply matrices on all ranks, whatever their processors are."""

from __future__ import annotations

import pytest
import torch

from hpc_train.errors import ConfigError
from hpc_train.models import linear
from hpc_train.models.linear import MatmulChoice
from hpc_train.mpi.group import Group
from hpc_train.training import device
from hpc_train.training.device import choose_device, choose_matmul

several = pytest.mark.mpi(min_size=2)
CPU = torch.device("cpu")
FAST = MatmulChoice("onednn", "AMD with AVX-512, measured 2026-11-21")
SLOW = MatmulChoice("torch", "AMD with AVX2, measured 2026-11-22")
UNKNOWN = MatmulChoice("torch", "Intel with AVX2, which nobody has measured")


@pytest.fixture
def table(monkeypatch):
    """Sets what this rank's table says, on a host of that name; oneDNN works."""
    monkeypatch.setattr(linear, "_used", None)
    monkeypatch.setattr(linear, "onednn_works", lambda: True)

    def says(choice: MatmulChoice, host: str = "a") -> None:
        monkeypatch.setattr(linear, "of_table", lambda: choice)
        monkeypatch.setattr(Group, "host", host)

    return says


def chosen(caplog, group, wanted="auto", on=CPU):
    """The way that this rank takes, and what it logs."""
    with caplog.at_level("INFO", logger="hpc_train"):
        choose_matmul(group, wanted, on)
    return linear.used(), [record.getMessage() for record in caplog.records]


@several
def test_equal_machines_take_the_tables_way_and_one_line_says_why(job, table, caplog):
    table(FAST, f"host{job.world.rank}")
    way, lines = chosen(caplog, job.world)
    assert way == "onednn"
    said = [f"float32 matrix products: onednn ({FAST.why})"]
    assert lines == (said if job.world.rank == 0 else [])


@several
def test_machines_that_differ_all_take_torchs_and_are_named(job, table, caplog):
    last = job.world.rank == job.world.size - 1
    table(SLOW if last else FAST, "b" if last else "a")
    way, lines = chosen(caplog, job.world)
    assert way == "torch"
    said = "float32 matrix products: torch, as the hosts differ "
    said += f"(a: {FAST.why}; b: {SLOW.why})"
    assert lines == ([said] if job.world.rank == 0 else [])


@several
def test_processors_that_want_the_same_way_are_all_named(job, table, caplog):
    table(UNKNOWN if job.world.rank else SLOW, f"host{job.world.rank}")
    way, lines = chosen(caplog, job.world)
    assert way == "torch"
    if job.world.rank == 0:
        (line,) = lines
        assert f"host0: {SLOW.why}; host1" in line
        assert line.endswith(f": {UNKNOWN.why})")


@several
def test_the_key_wins_on_machines_that_differ(job, table, caplog):
    table(FAST if job.world.rank else SLOW)
    way, lines = chosen(caplog, job.world, "onednn")
    assert way == "onednn"
    said = ["float32 matrix products: onednn (precision.matmul is onednn)"]
    assert lines == (said if job.world.rank == 0 else [])


@several
def test_onednn_that_fails_on_one_rank_is_an_error_on_all(job, table, monkeypatch):
    table(FAST)
    last = job.world.size - 1
    if job.world.rank == last:
        monkeypatch.setattr(linear, "onednn_works", lambda: False)
    with pytest.raises(ConfigError, match=rf"rank {last} .*oneDNN's matrix product does not work"):
        choose_matmul(job.world, "onednn", CPU)


def test_on_a_gpu_onednn_is_refused_and_auto_logs_nothing(table, caplog):
    table(FAST)
    with pytest.raises(ConfigError, match="training is on a GPU"):
        choose_matmul(Group(), "onednn", torch.device("cuda"))
    assert chosen(caplog, Group(), on=torch.device("cuda"))[1] == []


def test_many_hosts_of_a_kind_are_counted():
    given = [(FAST.why, f"n{number}") for number in range(4)] + [(SLOW.why, "old")]
    assert device._reasons(given) == f"n0 and 3 more: {FAST.why}; old: {SLOW.why}"


@pytest.mark.parametrize(
    ("cuda", "xpu", "local_rank", "expected"),
    [
        (0, 0, 0, "cpu"),
        (1, 0, 3, "cuda:0"),  # what `start_runtime` left visible
        (4, 0, 2, "cuda:2"),  # nothing was dealt out, because no driver's file was found
        (4, 0, 5, "cuda:1"),
        (0, 1, 3, "xpu:0"),
        (0, 12, 7, "xpu:7"),
    ],
)
def test_each_rank_has_a_device_of_its_own(monkeypatch, cuda, xpu, local_rank, expected):
    used = []
    for name, count in (("cuda", cuda), ("xpu", xpu)):
        module = getattr(torch, name)
        monkeypatch.setattr(module, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(module, "device_count", lambda count=count: count)
        monkeypatch.setattr(module, "set_device", used.append)
    device = choose_device(local_rank)
    assert str(device) == expected
    assert used == ([] if device.index in (None, 0) else [device])


@pytest.mark.parametrize(
    ("versions", "build"),
    [
        ({"cuda": "12.8"}, "CUDA"),
        ({"cuda": None, "hip": "6.4.4"}, "ROCm"),
        ({"xpu": "20250101"}, "XPU"),
        ({}, "processors"),
    ],
)
def test_the_build_of_torch_is_told_and_why_it_finds_no_gpu(monkeypatch, versions, build):
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, versions.get(name), raising=False)
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "device_count", lambda: 0)

        def fail():
            raise RuntimeError("no\n driver")

        monkeypatch.setattr(module, "init", fail)
    assert device.built_for() == (build, "" if build == "processors" else "no driver")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert build == "XPU" or device.built_for() == (build, "")


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_says_what_torch_may_use_on_a_gpu(monkeypatch, caplog, rank, lines):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "ABC 100")
    caplog.set_level("INFO")
    device.tell_gpu(Group(rank, 2), torch.device("cuda"))
    device.tell_gpu(Group(rank, 2), torch.device("cpu"))
    assert len(caplog.messages) == lines
    for message in caplog.messages:
        assert message.startswith("GPU: ABC 100; attention by flash, mem_efficient, cudnn, math; ")
