"""Operations by the shape of a model against those that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.models.gpt.shape import GptShape
from hpc_train.models.lora import LoraAdapters, linear_layers
from hpc_train.models.tabular.shape import TabularMlpShape, TabularResnetShape, TabularShape
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.training.flops import counted_flops, sample_flops

SIZES = TableSizes(edges=((0.0, 1.0, 2.0),) * 5, codes=(4, 5), outputs=3)
TABLES = [
    TabularResnetShape(layers=3, hidden=64, sizes=SIZES),
    TabularMlpShape(layers=2, hidden=64, sizes=SIZES),
    TabularMlpShape(layers=2, hidden=64, sizes=SIZES, members=4),
    TabularShape(layers=2, hidden=64, heads=4, sizes=SIZES),
]
ROWS = torch.randn(8, 5), torch.randint(0, 4, (8, 2))


def summed(model, batch):
    return model(*batch).sum()


@pytest.mark.parametrize("shape", TABLES, ids=["resnet", "mlp", "members", "transformer"])
def test_models_of_tables_are_counted_as_torch_counts_them(shape):
    model = shape.build()
    found = sample_flops(shape, model)
    assert found == pytest.approx(counted_flops(summed, model, ROWS) / 8, rel=0.05)
    assert found == pytest.approx(3 * sum(part.flops for part in shape.parts()))
    # With a frozen body, only the head has a backward pass.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    frozen = sample_flops(shape, model)
    assert frozen == pytest.approx(counted_flops(summed, model, ROWS) / 8, rel=0.05)
    assert frozen < 0.4 * found


def test_adapters_save_the_gradients_of_frozen_matrices():
    shape = TABLES[0]
    model = shape.build()
    whole = sample_flops(shape, model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = [name for name in linear_layers(model) if name.startswith("blocks")]
    LoraAdapters(rank=3, alpha=3, layers=layers).add_to(model)
    found = sample_flops(shape, model)
    assert found == pytest.approx(counted_flops(summed, model, ROWS) / 8, rel=0.1)
    assert found < 0.75 * whole


def test_a_gpt_has_six_operations_for_each_weight_and_token():
    shape = GptShape(layers=3, hidden=64, heads=4, vocab=128, sequence=32)
    model = shape.build()
    T, C = shape.sequence, shape.hidden
    weights = sum(part.weights for part in shape.parts())
    attention = 3 * 3 * 2 * T * T * C  # layers, passes, two products of which half is computed
    assert sample_flops(shape, model) == 6 * T * weights + attention
    x = torch.randint(0, 128, (2, 32))
    counted = counted_flops(lambda gpt, batch: gpt(*batch), model, (x, x)) / 2
    assert sample_flops(shape, model) == pytest.approx(counted, rel=0.1)


def test_counting_changes_nothing_of_a_module():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    count = counted_flops(lambda one, batch: one(batch).sum(), model, torch.randn(4, 3, 8, 8))
    convolution, linear = 4 * 36 * 8 * 27, 4 * 288 * 5
    assert count == 2 * (2 * convolution + 3 * linear)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state()[:8], random[:8])
