"""Models that are built without values: what their code writes is repeated later, the same."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hpc_train.checkpoint.checks import check_savable
from hpc_train.checkpoint.state import TrainingState
from hpc_train.errors import UserError
from hpc_train.models.deferred import deferred, is_unfilled, recipes_of
from hpc_train.models.initial import RecordedValues
from hpc_train.sharding import SliceSpec
from tests.models.memory import memory_of_its_own


def values(model):
    """All values of a model, made late."""
    made = RecordedValues(model)
    for parameter in model.parameters():
        made.fill(parameter, parameter.data)
    return model


def built(build, dtype=torch.float32, seed=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return deferred(build, dtype, seed)


class Custom(nn.Module):
    """Initial values as people write them: by `apply`, in place, by views, and tied."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("mask", torch.empty(4, 4).fill_(1).tril_())
        self.apply(self._start)
        nn.init.constant_(self.scale, 2.5)
        with torch.no_grad():
            self.layers[0].weight[:2] = 7
            self.layers[1].weight.mul_(1 / math.sqrt(6))
        self.layers[2].weight.data.uniform_(-1, 1)

    def _start(self, module):
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.weight, 0.0, 0.02)
            nn.init.zeros_(module.bias)


def test_what_the_models_code_writes_is_written_later():
    model, told = built(Custom)
    assert told == ""
    assert is_unfilled(model)
    assert torch.equal(model.mask, torch.ones(4, 4).tril())
    assert torch.equal(model.norm.running_var, torch.ones(8))
    values(model)
    first, second, third = (layer.weight for layer in model.layers)
    assert torch.equal(first[:2], torch.full((2, 8), 7.0))
    assert 0 < first[2:].std() < 0.04
    assert 0 < second.std() < 0.02
    assert 0.3 < third.std() < 0.8
    assert model.scale == 2.5
    assert torch.equal(model.embedding.weight[2], torch.zeros(8))
    assert model.embedding.weight[3:].std() > 0.7
    assert model.head.weight is model.embedding.weight
    assert not torch.equal(first[2:], second[2:])


def test_values_do_not_depend_on_when_they_are_made():
    one, other = values(built(Custom)[0]), built(Custom)[0]
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    made = RecordedValues(other)
    for parameter in reversed(list(other.parameters())):
        made.fill(parameter, parameter.data)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert not torch.equal(one.scale.new_tensor(0), one.head.weight[0, 0])


@pytest.mark.parametrize("spec", [SliceSpec((8, 8), 0, 4, 8), SliceSpec((8, 8), 1, 2, 4)])
def test_a_slice_is_that_of_the_whole(spec):
    whole = values(built(Custom)[0]).layers[1].weight.detach()
    wanted = whole.narrow(spec.dim, spec.start, spec.stop - spec.start)
    model, _ = built(Custom)
    model.layers[1].weight = nn.Parameter(torch.empty_like(wanted))
    made = RecordedValues(model, {}, {"layers.1.weight": spec})
    into = torch.empty(2, wanted.shape[1])
    made.fill(model.layers[1].weight, into, 1)
    assert torch.equal(into, wanted[1:3])


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


KNOWN = [
    transformer,
    lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.LSTM(4, 4)),
    lambda: nn.MultiheadAttention(8, 2),
    lambda: nn.Bilinear(3, 4, 5),
    lambda: copy.deepcopy(nn.Sequential(nn.Linear(3, 3), nn.PReLU(3))),
]


@pytest.mark.parametrize("build", KNOWN)
def test_torchs_own_modules_need_no_values(build):
    model, told = built(build, torch.float64)
    assert told == ""
    values(model)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        usual = build()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in usual.named_parameters():
        mine = model.get_parameter(name)
        assert mine.dtype == torch.float64
        if parameter.numel() > 5 and parameter.std() > 0:
            assert 0.4 < mine.std() / parameter.std() < 2.5, name
        elif not parameter.std():
            assert torch.equal(mine, parameter), name


def test_copies_of_a_layer_have_its_values():
    model, _ = built(transformer)
    one, other = values(model).layers
    assert torch.equal(one.linear1.weight, other.linear1.weight)


class Reading(nn.Module):
    """Initial values that depend on others."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        nn.init.orthogonal_(self.one.weight)
        with torch.no_grad():
            self.two.weight.copy_(self.one.weight * 2)
        self.made = nn.Parameter(torch.randn(5))


def test_what_is_read_gets_its_values_at_once_and_is_named():
    model, told = built(Reading)
    assert set(recipes_of(model)) == {"one.bias", "two.bias"}
    assert "whole, because" in told
    values(model)
    weight = model.one.weight.detach()
    assert torch.allclose(weight @ weight.T, torch.eye(6), atol=1e-5)
    assert torch.equal(model.two.weight, weight * 2)
    again, _ = built(Reading)
    assert torch.equal(values(again).one.bias, model.one.bias)
    assert torch.equal(again.made, model.made)


class Forgotten(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


@pytest.mark.parametrize(
    "build",
    [
        Forgotten,
        lambda: nn.utils.skip_init(nn.Linear, 3, 3, bias=False),
        lambda: nn.Linear(3, 3, bias=False).to_empty(device="cpu"),
    ],
)
def test_a_parameter_that_is_never_filled_is_named(build):
    with pytest.raises(UserError, match="parameter weight of the model is never given values"):
        built(build)


def test_a_layer_that_is_filled_after_its_making_is_filled_later():
    def build():
        layer = nn.utils.skip_init(nn.Linear, 3, 3, bias=False)
        nn.init.constant_(layer.weight, 4.0)
        return layer

    model, told = built(build)
    assert told == ""
    assert torch.equal(values(model).weight, torch.full((3, 3), 4.0))


class Blank(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = nn.LazyLinear(2) if kind == "lazy" else nn.Linear(2, 2)
        if kind == "meta":
            self.layer.bias = nn.Parameter(torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("lazy", r"layer\.weight of the model has no shape yet: call the model with a batch"),
        ("meta", r"layer\.bias of the model is on the device meta"),
    ],
)
def test_what_has_no_values_is_named(kind, told):
    with pytest.raises(UserError, match=told):
        built(lambda: Blank(kind))
    model = Blank(kind)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UserError, match=told):
        check_savable(state)


def test_a_function_that_builds_no_module_is_named():
    with pytest.raises(UserError, match="returns a int"):
        deferred(lambda: 3, torch.float32)


class Shadow:
    """A plain object that keeps copies of a model's parameters."""

    def __init__(self, module):
        self.kept = {name: one.detach().clone() for name, one in module.named_parameters()}


class Elsewhere(nn.Module):
    """Tensors that are neither parameters nor buffers, and parameters in one memory."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        nn.init.constant_(self.one.weight, 4.0)
        self.alias = self.one.weight.data
        self.plain = torch.empty(200).fill_(3)
        self.shadow = Shadow(self.one)
        closed = torch.empty(200).fill_(8)
        self.closure = lambda: closed
        self.hidden = [nn.Linear(2, 2)]
        nn.init.constant_(self.hidden[0].weight, 5.0)
        flat = torch.empty(8).fill_(6)
        self.left, self.right = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
        self.register_buffer("scratch", torch.empty(3), persistent=False)
        self.copied = nn.Parameter(torch.clone(input=self.one.bias.data))
        state = {"weight": torch.full((3, 3), 7.0), "bias": torch.zeros(3)}
        self.loaded = nn.Linear(3, 3)
        self.loaded.load_state_dict(state)


class Unasked(torch.Tensor):
    """Of another part of the program. It must not be asked for its memory."""

    def untyped_storage(self):
        raise AssertionError


@pytest.mark.parametrize("counted", [True, False], ids=["by torch", "by Python"])
def test_tensors_elsewhere_in_the_model_have_their_values(monkeypatch, counted):
    with FakeTensorMode():  # as torch.compile has them
        fake = torch.zeros(3)
    others = torch.zeros(3).as_subclass(Unasked), fake
    if not counted:  # as in older builds of torch for CPUs
        monkeypatch.delattr(torch._C, "_storage_Use_Count", raising=False)
    model, told = built(Elsewhere)
    del others
    assert "of parameters whole, because" in told
    values(model)
    assert torch.equal(model.one.weight, torch.full((3, 3), 4.0))
    assert torch.equal(model.alias, torch.full((3, 3), 4.0))
    assert torch.equal(model.plain, torch.full((200,), 3.0))
    assert torch.equal(model.shadow.kept["weight"], torch.full((3, 3), 4.0))
    assert torch.equal(model.closure(), torch.full((200,), 8.0))
    assert torch.equal(model.hidden[0].weight, torch.full((2, 2), 5.0))
    assert torch.equal(model.left, torch.full((4,), 6.0))
    assert torch.equal(model.right, torch.full((4,), 6.0))
    assert torch.equal(model.copied, model.one.bias)
    assert torch.equal(model.loaded.weight, torch.full((3, 3), 7.0))


def test_indices_that_change_later_do_not_change_the_values():
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4).fill_(1))
            rows = [0, 1]
            with torch.no_grad():
                self.weight[rows] = 5
            rows[0] = 3

    assert values(built(Indexed)[0]).weight.tolist() == [5, 5, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [lambda p: nn.init.kaiming_uniform_(p), lambda p: p.__setitem__(99, 1.0)],
)
def test_mistakes_of_the_models_code_are_errors_when_it_is_built(wrong):
    def build():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(5), requires_grad=False)
        wrong(model.weight)
        return model

    with pytest.raises((ValueError, IndexError)):
        built(build)


def test_a_large_model_takes_no_memory():
    before = memory_of_its_own()
    model, _ = built(lambda: nn.Sequential(*(nn.Linear(4000, 4000) for _ in range(5))))
    assert memory_of_its_own() - before < 0.05 * sum(p.nbytes for p in model.parameters())
