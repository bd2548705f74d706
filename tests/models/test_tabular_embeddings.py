"""Features of a table as vectors, against plain loops."""

from __future__ import annotations

import math
from bisect import bisect_right

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hpc_train.models.initial import InitialValues
from hpc_train.models.tabular.embeddings import (
    CategoricalEmbedding,
    FeatureEmbedding,
    LinearEmbedding,
    NumericEmbedding,
    PeriodicEmbedding,
    PiecewiseLinearEmbedding,
)
from hpc_train.models.tabular.sizes import TableSizes

EDGES = ((-2.0, -0.5, 0.25, 3.0), (0.0, 1.0), (-1.0, 0.0, 5.0))
WIDTH = 5


@pytest.fixture(autouse=True)
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(module: nn.Module) -> nn.Module:
    """The module with random values in all parameters, also in those that begin at 0."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def numeric_kinds() -> list[NumericEmbedding]:
    made = [
        PiecewiseLinearEmbedding(EDGES, WIDTH),
        PeriodicEmbedding(len(EDGES), WIDTH),
        LinearEmbedding(len(EDGES), WIDTH),
    ]
    return [drawn(one) for one in made]


def way_in_bins(value: float, edges: tuple[float, ...]) -> list[float]:
    """How far a value has come in each bin, by the definition of Gorishniy et al. 2022."""
    value = min(max(value, edges[0]), edges[-1])
    at = min(bisect_right(edges, value) - 1, len(edges) - 2)
    share = (value - edges[at]) / (edges[at + 1] - edges[at])
    return [1.0] * at + [share] + [0.0] * (len(edges) - 2 - at)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=4))
def test_bins_are_those_of_a_plain_loop(values):
    module = PiecewiseLinearEmbedding(EDGES, WIDTH)
    found = module.encode(torch.tensor(values).unsqueeze(1).expand(-1, len(EDGES)))
    for row, value in zip(found, values, strict=True):
        for bins, edges in zip(row, EDGES, strict=True):
            wanted = way_in_bins(value, edges)
            assert bins[: len(wanted)].tolist() == pytest.approx(wanted, abs=1e-12)
            assert not bins[len(wanted) :].any(), "bins that the feature does not have"


def test_a_piecewise_linear_vector_is_a_slope_and_a_weight_for_each_bin():
    module = drawn(PiecewiseLinearEmbedding(EDGES, WIDTH))
    x = torch.tensor([[-1.0, 0.3, 9.0], [0.0, -4.0, 2.0]])
    found = module(x)
    for row in range(2):
        for feature, edges in enumerate(EDGES):
            way = torch.tensor(way_in_bins(float(x[row, feature]), edges))
            bins = len(edges) - 1
            line = math.sqrt(12) * (way.sum() / bins - 0.5) * module.slope[feature]
            wanted = line + module.bias[feature] + way @ module.weight[feature, :bins]
            torch.testing.assert_close(found[row, feature], wanted)


def test_periodic_and_linear_vectors_are_those_of_a_plain_loop():
    x = torch.tensor([[-1.0, 0.3, 9.0], [0.0, -4.0, 2.0]])
    _, periodic, linear = numeric_kinds()
    for row in range(2):
        for feature in range(3):
            value, angles = x[row, feature], periodic.frequency[feature] * 2 * math.pi
            waves = torch.cat(((angles * value).sin(), (angles * value).cos()))
            wanted = (periodic.bias[feature] + waves @ periodic.weight[feature]).relu()
            torch.testing.assert_close(periodic(x)[row, feature], wanted)
            wanted = linear.bias[feature] + value * linear.weight[feature]
            torch.testing.assert_close(linear(x)[row, feature], wanted)


@pytest.mark.parametrize("kind", range(3))
def test_a_missing_number_is_the_centre_and_a_trained_vector(kind):
    module = numeric_kinds()[kind]
    x = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan, 0.5, torch.nan]])
    missing = x.isnan().unsqueeze(2)
    found = module(x)
    torch.testing.assert_close(found, module(x.nan_to_num(0.0)) + missing * module.missing)
    found.square().sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


def test_categories_of_all_features_are_looked_up_in_one_table():
    module = drawn(CategoricalEmbedding((3, 2, 4), WIDTH))
    codes = torch.tensor([[0, 1, 3], [2, 0, 0]], dtype=torch.int32)
    rows = torch.tensor([[0, 4, 8], [2, 3, 5]])
    assert torch.equal(module(codes), module.table.weight[rows])


def test_unknown_categories_begin_as_zeros_in_any_part_of_the_table():
    class Model(nn.Module):
        initial_seed = 3

        def __init__(self):
            super().__init__()
            self.categories = CategoricalEmbedding((3, 2, 4), WIDTH)

        def initial(self, name):
            return self.categories.initials()[name.removeprefix("categories.")]

    model = Model()
    table = model.categories.table.weight
    values = InitialValues(model)
    values.fill(table, table.data)
    assert [row for row in range(9) if not table[row].any()] == [0, 3, 5]
    for first in range(9):
        part = torch.full((min(4, 9 - first), WIDTH), torch.nan)
        values.fill(table, part, first)
        assert torch.equal(part, table[first : first + 4])


@pytest.mark.parametrize(("edges", "codes"), [(EDGES, ()), ((), (3, 2)), (EDGES, (3, 2))])
def test_numbers_come_before_categories_and_either_may_be_absent(edges, codes):
    sizes = TableSizes(edges=edges, codes=codes, outputs=1)
    module = drawn(FeatureEmbedding(sizes, WIDTH, "linear"))
    numeric, categorical = torch.randn(4, len(edges)), torch.ones(4, len(codes)).long()
    found = module(numeric, categorical)
    assert found.shape == (4, sizes.features, WIDTH)
    if edges:
        assert torch.equal(found[:, : len(edges)], module.numeric(numeric))
    if codes:
        assert torch.equal(found[:, len(edges) :], module.categorical(categorical))
