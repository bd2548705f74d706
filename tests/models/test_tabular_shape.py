"""What the shapes of models of tables say, held against the modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpc_train.errors import ConfigError
from hpc_train.models.initial import InitialValues, unfilled
from hpc_train.models.linear import Linear
from hpc_train.models.shape import Division
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.parallel.runs import costs, stage_names
from tests.models.kept_bytes import kept_bytes
from tests.models.test_tabular_module import KINDS, NUMERIC, rows, shape_of_kind


@pytest.fixture(params=KINDS)
def shape(request):
    return shape_of_kind(request.param, layers=3, hidden=24)


def total(shape, key, **division):
    return sum(getattr(part, key) for part in shape.parts(Division(**division)))


@pytest.mark.parametrize("numeric", NUMERIC)
def test_parameters_are_those_of_the_module(shape, numeric):
    shape = replace(shape, numeric=numeric)
    real = sum(parameter.numel() for parameter in shape.build().parameters())
    assert total(shape, "parameters") == real


@pytest.mark.parametrize("numeric", NUMERIC)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(shape, numeric, dropout, dtype):
    shape = replace(shape, numeric=numeric, dropout=dropout, hidden=96)
    module, (numbers, codes) = shape.build(), rows(50)
    module.seed_samples(range(50))
    real = kept_bytes(module, numbers.float(), codes, dtype=dtype)
    costs = [part.in_bytes(dtype.itemsize, 50, 1) for part in shape.parts()]
    assert sum(part.activations for part in costs) == pytest.approx(real, rel=0.04)


def test_weights_are_those_by_which_stages_are_divided(shape):
    module = shape.build()
    assert [part.weights for part in shape.parts()] == costs(module, stage_names(module))


def test_a_factorisation_has_the_rows_and_columns_of_a_blocks_matrices(shape):
    matrices = [m.weight for m in shape.block().modules() if isinstance(m, Linear)]
    numbers = sum(3 * sum(matrix.shape) for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    assert shape.low_rank(3) == pytest.approx(numbers / elements)


def test_a_measured_block_takes_a_samples_vectors(shape):
    small = shape.at_most(2, 12)
    assert small.hidden == 12
    between = torch.zeros(5, small.tokens, small.hidden)
    assert small.block()(between).shape == between.shape


def test_a_cut_table_keeps_a_feature():
    numbers = TableSizes(edges=((0.0, 1.0),) * 3, codes=(2, 2), outputs=1)
    assert [numbers.first(count).features for count in (0, 2, 4, 9)] == [1, 2, 4, 5]
    assert replace(numbers, edges=()).first(0).codes == (2,)


def test_ranks_that_cannot_share_the_layers_are_refused(shape):
    key = "heads" if hasattr(shape, "heads") else "hidden"
    with pytest.raises(ConfigError, match=f"parallel.tp 5 does not divide model.{key}"):
        shape.check(Division(tp=5))
    with pytest.raises(ConfigError, match="sequence_parallel is on, but the model is one of table"):
        shape.check(Division(tp=2, sequence_parallel=True))
    with pytest.raises(ConfigError, match="more than the 5 parts"):
        shape.check(Division(pp=6))
    shape.check(Division(tp=2, pp=5))


def test_a_model_without_values_gets_those_of_a_whole_one(shape):
    torch.manual_seed(4)
    usual = shape.build()
    torch.manual_seed(4)
    later = unfilled(shape.module, torch.float32, **shape.arguments)
    values = InitialValues(later)
    for one, other in zip(usual.parameters(), later.parameters(), strict=True):
        into = torch.full_like(one, torch.nan)
        values.fill(other, into)
        assert torch.equal(into, one)


def test_a_table_without_features_or_outputs_is_refused():
    with pytest.raises(ConfigError, match="no feature"):
        TableSizes(edges=(), codes=(), outputs=1)
    with pytest.raises(ConfigError, match="nothing to predict"):
        TableSizes(edges=(), codes=(3,), outputs=0)
