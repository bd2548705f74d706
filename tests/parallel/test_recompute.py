"""Recomputation of activations gives the loss, gradients and buffers of a model without it."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.config import MemorySection
from hpc_train.errors import ConfigError, UserError
from hpc_train.models import GPT
from hpc_train.parallel.recompute import block_names, recompute

WAYS = ["selective", "full", 1, 2]


def gpt(**changes):
    torch.manual_seed(0)
    sizes = {"vocab": 11, "sequence": 8, "layers": 3, "hidden": 16, "heads": 2, "dropout": 0.3}
    return GPT(**{**sizes, **changes}).double()


class Block(nn.Module):
    """A block with everything that a careless repetition would do twice, or otherwise."""

    def __init__(self, *, in_place=False):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.relu = nn.ReLU(inplace=in_place)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x, scale=1.0):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        y = self.first(x - self.mean)
        y = self.relu(y) if self.relu.inplace else self.relu(self.norm(y))
        return x + scale * self.second(self.drop(y))


class Own(nn.Module):
    memory_blocks = ("blocks.*",)

    def __init__(self, kind=Block, **options):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(kind(**options) for _ in range(3))
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().sum()


def inputs(rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(2)).double()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model, other):
    ours, theirs = gradients(model), gradients(other)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-13, atol=1e-15), name
    for (name, one), (_, two) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("how", WAYS)
def test_a_gpt_with_two_micro_batches_under_way(how):
    plain, other = gpt(), gpt()
    recompute(other, how)
    for model in (plain, other):
        text = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(1))
        losses = []
        for first in (0, 2):  # the seeds of the second forward pass must not reach the first
            model.seed_samples([first, first + 1])
            some = text[first : first + 2]
            losses.append(model(some[:, :-1], some[:, 1:]))
        model.seed_samples([7, 8])
        losses[0].backward()
        losses[1].backward()
    assert_alike(plain, other)


def check_alike(how, use, kind=Block):
    """Use a user's model with and without recomputation, and compare."""
    plain, other = Own(kind), Own(kind)
    recompute(other, how)
    for model in (plain, other):
        torch.manual_seed(3)
        use(model)
    assert_alike(plain, other)
    return other


@pytest.mark.parametrize("how", WAYS)
def test_a_users_blocks_draw_the_same_numbers_and_write_buffers_once(how):
    def use(model):
        losses = [model(inputs()), model(2 * inputs())]
        torch.manual_seed(4)
        for loss in reversed(losses):
            loss.backward()

    check_alike(how, use)


@pytest.mark.parametrize("how", WAYS)
def test_a_graph_can_be_used_twice(how):
    def use(model):
        loss = model(inputs())
        loss.backward(retain_graph=True)
        loss.backward()

    check_alike(how, use)


@pytest.mark.parametrize("how", WAYS)
def test_frozen_layers_get_no_gradient(how):
    def use(model):
        model.blocks[0].requires_grad_(False)
        model.blocks[1].first.requires_grad_(False)
        model(inputs()).backward()

    assert "blocks.0.first.weight" not in gradients(check_alike(how, use))


@pytest.mark.parametrize("how", WAYS)
def test_autocast_is_repeated(how):
    plain, other = gpt().float(), gpt().float()
    recompute(other, how)
    for model in (plain, other):
        model.seed_samples([1, 2])
        text = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
    for name, gradient in gradients(other).items():
        assert torch.allclose(gradient, gradients(plain)[name], rtol=1e-2, atol=1e-4), name


def test_which_blocks_are_computed_again():
    def again(how):
        model, calls = Own(), []
        for number, block in enumerate(model.blocks):
            block.first.register_forward_hook(lambda *_, number=number: calls.append(number))
        recompute(model, how)
        model(inputs()).backward()
        return calls[3:]

    assert again("none") == []
    assert again("full") == [2, 1, 0]
    assert again(2) == [2, 0]


def test_nothing_is_kept_without_gradients():
    model = Own()
    recompute(model, "full")
    with torch.no_grad():
        assert model(inputs()).grad_fn is None


def test_a_model_can_be_copied_before_it_is_changed_only():
    model = Own()
    copied = copy.deepcopy(model)
    recompute(model, "full")
    model(inputs()).backward()
    assert not gradients(copied)


def test_selective_refuses_results_that_are_changed_in_place():
    model = Own(in_place=True)
    recompute(model, "selective")
    with pytest.raises(UserError, match=r"changes a Linear's result in place: give full"):
        model(inputs())
    plain, other = Own(in_place=True), Own(in_place=True)
    recompute(other, "full")
    for one in (plain, other):
        torch.manual_seed(3)
        one(inputs()).backward()
    assert_alike(plain, other)


def test_blocks_are_those_of_the_attribute_or_the_repeated_stages():
    assert block_names(gpt()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert block_names(Own()) == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(UserError, match="Linear names none: name its repeated modules"):
        recompute(nn.Linear(2, 2), "full")
    model = Own()
    model.memory_blocks = ("blocks.*", "blocks.*.first")
    with pytest.raises(UserError, match=r"blocks\.0\.first is part of blocks\.0"):
        recompute(model, "full")


@pytest.mark.parametrize("wrong", ["some", 0, -1, True, 1.5])
def test_other_values_are_refused(wrong):
    with pytest.raises(
        ConfigError, match=r"memory\.recompute is .*: give .*one of none, selective"
    ):
        MemorySection(recompute=wrong)


def test_results_that_the_model_changes_after_the_block_are_refused():
    class Both(nn.Module):
        memory_blocks = ("block",)

        def __init__(self):
            super().__init__()
            self.block = Returning()

        def forward(self, x):
            hidden, y = self.block(x)
            return (hidden.mul_(-3.0) + y).sum()

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.one(x)
            return hidden, self.two(torch.relu(hidden - 0.1))

    model = Both()
    recompute(model, "selective")
    with pytest.raises(UserError, match="the model changes a Linear's result in place"):
        model(torch.randn(3, 4)).backward()


class WithGradient(Block):
    def forward(self, x, scale=1.0):
        with torch.enable_grad():
            hidden = self.norm(self.first(x))
            (slope,) = torch.autograd.grad(hidden.tanh().sum(), x, create_graph=True)
        return x - scale * self.second(self.drop(hidden)) * slope


@pytest.mark.parametrize("how", WAYS)
def test_a_block_may_compute_gradients_in_its_forward_pass_unless_selective(how):
    def use(model):
        model(inputs().requires_grad_()).backward()

    if how != "selective":
        check_alike(how, use, WithGradient)
        return
    with pytest.raises(UserError, match=r"a block computes gradients in its .* pass: give full"):
        check_alike(how, use, WithGradient)


def test_a_later_call_takes_the_place_of_an_earlier_one():
    model, calls = Own(), []
    model.blocks[0].first.register_forward_hook(lambda *_: calls.append(0))
    for how, passes in (("full", 2), ("selective", 2), ("none", 1)):
        recompute(model, how)
        calls.clear()
        model(inputs()).backward()
        assert len(calls) == passes, how


@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_block_may_get_nothing(how):
    model = gpt(dropout=0.0)
    recompute(model, how)
    model(torch.zeros(0, 8, dtype=torch.long)).sum().backward()


class Copies(TorchDispatchMode):
    """Counts the copies of matrices in bfloat16 that are there."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.made.append((weakref.ref(result), tuple(result.shape)))
        return result

    def alive(self, shape):
        found = [one() is not None for one, of in self.made if of == shape]
        assert found
        return sum(found)


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("grad", [True, False])
def test_autocast_keeps_no_copy_of_a_weight_behind_its_block(how, grad):
    model = Own().float()
    recompute(model, how)
    with Copies() as copies, torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        loss = model(inputs().float())
        assert copies.alive((8, 6)) == 0
        assert torch.is_autocast_cache_enabled()
    if grad:
        loss.backward()
