"""The models of tables on one rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hpc_train.models.dropout import SampleDropout
from hpc_train.models.kinds import SHAPES
from hpc_train.models.tabular.members import MemberScale
from hpc_train.models.tabular.module import TabularMlp
from hpc_train.models.tabular.sizes import TableSizes

TABLE = TableSizes(edges=((-1.0, 0.0, 2.0), (-2.0, 2.0)), codes=(4, 3), outputs=3)
KINDS = {
    "tabular": {"heads": 2},
    "tabular_mlp": {"members": 4},
    "tabular_resnet": {},
    "plain mlp": {"members": 1},
}
NUMERIC = ["piecewise_linear", "periodic", "linear"]


def shape_of_kind(kind, **changes):
    make = SHAPES["tabular_mlp" if kind == "plain mlp" else kind]
    return make(**{"sizes": TABLE, "layers": 2, "hidden": 16, **KINDS[kind], **changes})


def built(kind, **changes):
    torch.manual_seed(0)
    return shape_of_kind(kind, **changes).build().double()


def rows(count):
    generator = torch.Generator().manual_seed(1)
    numeric = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    numeric[::3, 0] = torch.nan
    codes = [torch.randint(some, (count,), generator=generator) for some in TABLE.codes]
    return numeric, torch.stack(codes, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numeric", NUMERIC)
def test_a_rows_predictions_do_not_depend_on_other_rows(kind, numeric):
    model = built(kind, numeric=numeric, dropout=0.3)
    numbers, codes = rows(6)
    model.seed_samples(range(6))
    whole = model(numbers, codes)
    assert whole.shape == (6, KINDS[kind].get("members", 1), 3)
    for row in (0, 5):
        model.seed_samples([row])
        alone = model(numbers[row : row + 1], codes[row : row + 1])
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numeric", NUMERIC)
def test_every_parameter_is_trained_and_no_missing_number_spoils_it(kind, numeric):
    model = built(kind, numeric=numeric)
    numbers, codes = rows(40)
    numbers[::4, 1] = torch.nan
    for _ in range(2):  # some begin at 0, so that others have no gradient in the first step
        model.zero_grad()
        model(numbers, codes).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad.isfinite().all()
                parameter -= 1e-3 * parameter.grad
    still = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert not still


def test_a_member_is_an_mlp_of_its_own():
    """The members at once, against each of them computed by itself from its factors."""
    model = built("tabular_mlp", layers=1)
    torch.manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    numbers, codes = rows(5)
    found = model(numbers, codes)
    row, block = model.embedding.row, model.blocks[0]
    for member in range(4):
        factors = row.factors.weight[member].unsqueeze(1)
        x = (row.features(numbers, codes) * factors).flatten(1) @ row.project.weight.T
        x = scaled(model.embedding.layer.scale, x, member)
        x = scaled(block.after_up.scale, x @ block.up.weight.T, member)
        x = scaled(block.after_down.scale, x @ block.down.weight.T, member)
        wanted = x @ model.head.weight[member] + model.head.bias[member]
        torch.testing.assert_close(found[:, member], wanted)


def scaled(scale, x, member):
    return (x * scale.weight[member] + scale.bias[member]).relu()


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_gradients_of_a_members_layer_are_those_of_its_steps(share):
    torch.manual_seed(0)
    scale, dropout = MemberScale(3, 5).double(), SampleDropout(share, place=1)
    dropout.seeds = range(7)
    for parameter in scale.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)
    inputs, towards = [x, *scale.parameters()], torch.randn(7, 3, 5, dtype=torch.float64)
    found, wanted = scale(x, dropout), dropout((x * scale.weight + scale.bias).relu())
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, towards), torch.autograd.grad(wanted, inputs, towards)
    )


def test_members_differ_from_the_beginning():
    predictions = built("tabular_mlp")(*rows(5))
    for member in range(1, 4):
        assert not torch.allclose(predictions[:, member], predictions[:, 0], rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_begin_neither_large_nor_tiny(kind):
    sizes = TableSizes(edges=((-2.0, -1.0, 0.0, 1.0, 2.0),) * 20, codes=(9,) * 10, outputs=3)
    torch.manual_seed(0)
    model = shape_of_kind(kind, sizes=sizes, hidden=64).build()
    codes = torch.randint(1, 9, (200, 10))
    spread = model(torch.randn(200, 20).clamp(-2, 2), codes).std().item()
    assert 0.02 < spread < 2


def test_attention_sees_tokens_behind_it():
    """Each feature can change what the others' tokens become, whatever their order is."""
    model = built("tabular", layers=1)
    numbers, codes = rows(3)
    x = model.embedding(numbers, codes)
    changed = x.clone()
    changed[:, -1] += torch.arange(16.0)
    before, after = model.blocks[0](x), model.blocks[0](changed)
    assert (before - after).abs().amax((0, 2)).min() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_table_is_learned(kind):
    model = built(kind, dropout=0.0)
    numbers, codes = rows(60)
    target = (numbers[:, 1] > 0).long() + (codes[:, 0] == 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(80):
        predictions = model(numbers, codes)
        classes = target.unsqueeze(1).expand(predictions.shape[:2])
        loss = F.cross_entropy(predictions.flatten(0, 1), classes.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * math.log(3)


def test_float32_rows_and_32_bit_codes_are_taken_by_any_model():
    numbers, codes = rows(3)
    model = built("tabular_mlp")
    assert model(numbers.float(), codes.int()).dtype == torch.float64
    assert TabularMlp(sizes=TABLE, layers=1, hidden=4)(numbers, codes).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_followed(kind):
    model = built(kind).float()
    numbers, codes = rows(7)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(numbers, codes)
    low.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(low.float(), model(numbers, codes), rtol=0.1, atol=0.05)
