"""Linear layers by either library, and which one a machine takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpc_train.errors import ConfigError
from hpc_train.host import processor
from hpc_train.host.processor import Processor
from hpc_train.models import linear as linears
from hpc_train.models import trial
from hpc_train.models.linear import Linear, linear

needs_onednn = pytest.mark.skipif(not linears.onednn_works(), reason="this torch has no oneDNN")
FASTER_WITH_ONEDNN = Processor("AMD", ("AVX-512", "AVX2"), "26", "2")


@pytest.fixture(autouse=True)
def _as_it_starts(monkeypatch):
    """Each test begins as a process does; what it chooses is undone."""
    monkeypatch.setattr(linears, "_used", None)
    linears.of_table.cache_clear()
    yield
    linears.of_table.cache_clear()


@pytest.mark.parametrize("way", ["torch", pytest.param("onednn", marks=needs_onednn)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (0, 6)])
def test_linear_equals_torchs_with_either_library(way, bias, shape):
    linears.use(way)
    torch.manual_seed(0)
    mine, theirs = Linear(6, 5, bias=bias), nn.Linear(6, 5, bias=bias)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(shape).requires_grad_()
    results = []
    for layer in (mine, theirs):
        x.grad = None
        layer(input=x).square().sum().backward()
        results.append([x.grad.clone(), *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_linear_leaves_float64_to_torch():
    x, weight = torch.randn(2, 3).double(), torch.randn(4, 3).double()
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("way", ["torch", pytest.param("onednn", marks=needs_onednn)])
def test_the_table_decides_until_use_is_called(monkeypatch, way):
    assert linears.used() == linears.of_table().way
    linears.use(way)
    assert linears.used() == way


def test_a_processor_that_nobody_has_measured_takes_torchs_own(monkeypatch):
    intel = Processor("Intel", ("AVX2",), "6", "63")
    monkeypatch.setattr(processor, "here", lambda: intel)
    choice = linears.of_table()
    assert (choice.way, choice.why) == ("torch", "Intel with AVX2, which nobody has measured")


@pytest.mark.parametrize(
    ("mkl", "works", "way", "why"),
    [
        (True, True, "onednn", "AMD with AVX-512, measured 20"),
        (False, True, "torch", "without MKL in torch"),
        (True, False, "torch", "oneDNN does not work in torch"),
    ],
)
def test_the_table_needs_the_libraries_that_it_was_measured_with(monkeypatch, mkl, works, way, why):
    monkeypatch.setattr(processor, "here", lambda: FASTER_WITH_ONEDNN)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(linears, "onednn_works", lambda: works)
    choice = linears.of_table()
    assert choice.way == way
    assert why in choice.why


def test_onednn_where_it_does_not_work_is_refused(monkeypatch):
    monkeypatch.setattr(linears, "onednn_works", lambda: False)
    with pytest.raises(ConfigError, match="oneDNN's matrix product does not work in torch"):
        linears.use("onednn")


@needs_onednn
def test_a_trial_compares_both_ways_and_leaves_the_choice_as_it_was(monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.0)
    threads, way = torch.get_num_threads(), linears.used()
    speed = trial.onednn_speed()
    assert speed.keys() == {"light", "heavy"}
    assert all(value > 0 for value in speed.values())
    assert (torch.get_num_threads(), linears.used()) == (threads, way)
