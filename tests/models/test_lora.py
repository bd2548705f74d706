"""Adapters beside linear layers: they begin as nothing, and can be merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.models import GPT
from hpc_train.models.initial import unfilled, values_of
from hpc_train.models.lora import LoraAdapters, LoraLinear, linear_layers
from hpc_train.parallel.recompute import recompute

SIZES = {"vocab": 12, "sequence": 8, "layers": 2, "hidden": 16, "heads": 4}
TEXT = torch.randint(12, (3, 8), generator=torch.Generator().manual_seed(1))


def gpt(*, tie: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(**SIZES, tie_embeddings=tie).double()


def adapted(model: nn.Module, *, random: bool = False, rank: int = 3) -> LoraAdapters:
    """Give all linear layers adapters; random ones change what the layers compute."""
    made = LoraAdapters(rank=rank, alpha=6, layers=list(linear_layers(model)))
    made.add_to(model)
    if random:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                nn.init.normal_(parameter)
    return made


def test_an_adapted_model_begins_as_the_model_itself():
    model = gpt()
    adapted(model)
    assert torch.equal(model(TEXT), gpt()(TEXT))
    layer = model.blocks[0].mlp.up
    assert layer.lora_a.std().item() == pytest.approx(16**-0.5, rel=0.3)
    assert not torch.equal(layer.lora_a, model.blocks[1].mlp.up.lora_a)


def test_a_merged_weight_computes_what_layer_and_adapter_do():
    model, plain = gpt(tie=False), gpt(tie=False)
    made = adapted(model, random=True)
    for name in made.layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLinear)
        weight = plain.get_submodule(name).weight
        weight.data = made.merged(layer.weight.detach(), layer.lora_a, layer.lora_b).detach()
    difference = (plain(TEXT) - gpt(tie=False)(TEXT)).abs().max()
    assert difference > 0.01
    torch.testing.assert_close(model(TEXT), plain(TEXT), rtol=1e-12, atol=1e-13)


def test_only_adapters_get_gradients_and_a_frozen_weights_input_is_not_kept():
    layer = nn.Linear(5, 7).double()
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    model = nn.Sequential(layer)
    made = adapted(model, random=True)
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    model[0](input=x).square().sum().backward()
    got = [x.grad, model[0].lora_a.grad, model[0].lora_b.grad]
    assert model[0].weight.grad is None
    inputs = [t.detach().requires_grad_() for t in (x, model[0].lora_a, model[0].lora_b)]
    product = inputs[0] @ (weight + made.scale * inputs[2] @ inputs[1]).T + bias
    product.square().sum().backward()
    for mine, theirs in zip(got, inputs, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_blocks_give_the_same_gradients(how):
    found = []
    for recomputed in (False, True):
        model = gpt()
        adapted(model, random=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
        if recomputed:
            recompute(model, how)
        model(TEXT, TEXT.roll(-1, 1)).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-15)


def test_a_model_without_values_gets_the_same_adapters():
    whole = gpt()
    adapted(whole)
    torch.manual_seed(0)
    model = unfilled(GPT, torch.float64, **SIZES)
    adapted(model)
    values = values_of(model, {}, {})
    for parameter in model.parameters():
        values.fill(parameter, parameter.data)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-7)


def test_what_a_checkpoint_tells_of_adapters_is_read_back():
    made = LoraAdapters(rank=2, alpha=8.0, layers=["blocks.0.mlp.up"])
    assert LoraAdapters.of(made.about | {"kind": "gpt"}) == made
    assert LoraAdapters.of({"kind": "gpt"}) is None
