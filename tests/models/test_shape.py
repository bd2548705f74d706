"""What an architecture says of itself, held against its module."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import get_args, get_type_hints

import pytest
import torch

from hpc_train.config import ModelSection
from hpc_train.errors import ConfigError
from hpc_train.models.gpt.shape import GptShape
from hpc_train.models.kinds import SHAPES
from hpc_train.models.shape import Division
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.planning.model import shape_of
from tests.models.kept_bytes import kept_bytes

SHAPE = GptShape(layers=2, hidden=64, heads=4, vocab=300, sequence=32)


def total(shape, key, **division):
    return sum(getattr(part, key) for part in shape.parts(Division(**division)))


def test_every_kind_of_the_configuration_has_a_shape_that_builds_its_module():
    assert list(SHAPES) == list(get_args(get_type_hints(ModelSection)["kind"]))
    table = TableSizes(edges=((0.0, 1.0), (0.0, 1.0, 2.0)), codes=(3,), outputs=5)
    tokens = [torch.zeros(3, 8, dtype=torch.int64)]
    of_table = [torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)]
    for kind, make in SHAPES.items():
        section = ModelSection(kind=kind, layers=2, hidden=36, dropout=0.0)
        shape = shape_of(section, 11 if section.is_language else table)
        assert type(shape) is make
        result = shape.build()(*(tokens if section.is_language else of_table))
        expected = (8, 11) if section.is_language else (16 if kind == "tabular_mlp" else 1, 5)
        assert result.shape == (3, *expected)
        between = (3, shape.tokens, 36)
        assert shape.block()(torch.zeros(between)).shape == between
        assert len(shape.parts()) == 4
        again = json.loads(json.dumps(asdict(shape)))
        assert make.from_tree(again) == shape


def test_models_are_imported_without_torch():
    check = (
        "import sys, hpc_train.models.kinds as kinds\n"
        "from hpc_train.models.tabular.sizes import TableSizes\n"
        "table = {'sizes': TableSizes(edges=(), codes=(3,), outputs=2)}\n"
        "sizes = {'gpt': {'vocab': 11, 'sequence': 8, 'heads': 2}}\n"
        "sizes['tabular'] = {**table, 'heads': 2}\n"
        "llama = {'kv_heads': 1, 'head_width': 16, 'mlp_width': 64, 'rope_theta': 1e4}\n"
        "for kind in ('llama', 'mistral', 'qwen2', 'qwen3'):\n"
        "    sizes[kind] = {**sizes['gpt'], **llama, 'norm_eps': 1e-5}\n"
        "for kind, make in kinds.SHAPES.items():\n"
        "    make(layers=2, hidden=32, **sizes.get(kind, table)).parts()\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & sys.modules.keys()\n"
        "from hpc_train.models import GPT\n"
        "assert GPT.__name__ == 'GPT' and 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_module(tied):
    shape = GptShape(layers=3, hidden=48, heads=4, vocab=101, sequence=20, tie_embeddings=tied)
    real = sum(parameter.numel() for parameter in shape.build().parameters())
    assert total(shape, "parameters") == real
    assert shape.tied == (101 * 48 if tied else 0)
    assert total(shape, "parameters", pp=2) - real == shape.tied  # both stages have the matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_are_what_autograd_keeps(dropout, dtype):
    shape = replace(SHAPE, dropout=dropout)
    module = shape.build()
    module.seed_samples([1, 2])
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    real = kept_bytes(module, tokens, tokens, dtype=dtype)
    costs = [part.in_bytes(dtype.itemsize, 2, 1) for part in shape.parts()]
    assert sum(part.activations for part in costs) == pytest.approx(real, rel=0.03)


def test_tensor_and_sequence_parallel_divide_activations_as_in_the_paper():
    whole, half, cut = (
        SHAPE.parts(Division(tp=tp, sequence_parallel=cut))[1].activations / (64 * 32)
        for tp, cut in ((1, False), (2, False), (2, True))
    )
    assert (whole, half, cut) == (16, 4 + 12 / 2, 16 / 2)


def test_weights_are_those_of_matrix_products():
    linear = [m for m in SHAPE.build().modules() if isinstance(m, torch.nn.Linear)]
    weights = [part.weights for part in SHAPE.parts()]
    assert weights == [0, 12 * 64**2, 12 * 64**2, 300 * 64]
    assert sum(weights) == sum(m.weight.numel() for m in linear)


def test_products_have_two_operations_for_each_weight_and_token():
    embedding, block, *_, head = (part.flops for part in SHAPE.parts())
    assert embedding == 0
    assert block == 2 * 32 * 12 * 64**2 + 2 * 32**2 * 64
    assert head == 2 * 32 * 64 * 300


def test_a_factorisation_has_the_rows_and_columns_of_a_blocks_matrices():
    matrices = [m.weight for m in SHAPE.block().modules() if isinstance(m, torch.nn.Linear)]
    numbers = sum(3 * sum(matrix.shape) for matrix in matrices)
    elements = sum(matrix.numel() for matrix in matrices)
    assert SHAPE.low_rank(3) == pytest.approx(numbers / elements)


def test_heads_keep_their_width_when_a_shape_is_cut_down():
    wide = GptShape(layers=1, hidden=8192, heads=64, vocab=1, sequence=4096)
    assert wide.at_most(256, 1024) == replace(wide, hidden=1024, heads=8, sequence=256)
    assert wide.at_most(256, 64).hidden == 128, "one head at least"
    assert SHAPE.at_most(256, 1024) == SHAPE


@pytest.mark.parametrize(
    ("division", "cause", "remedy"),
    [
        ({"tp": 3}, "parallel.tp 3 does not divide model.heads 4", "divides: model.heads 3 or 6"),
        ({"tp": 8}, "parallel.tp 8 does not divide model.heads 4", "divides: model.heads 8"),
        (
            {"pp": 9},
            "parallel.pp 9 is more than the 4 parts of the model (embedding, 2 layers, head)",
            "nearest that fits: model.layers 7, or parallel.pp 4",
        ),
        (
            {"pp": 2, "virtual_stages": 3},
            "parallel.pp 2 x parallel.virtual_stages 3 is more than the 4 parts",
            "nearest that fits: model.layers 4, or parallel.pp 1",
        ),
        (
            {"pp": 2, "virtual_stages": 5},
            "virtual_stages 5 is more",
            "nearest that fits: model.layers 8",
        ),
    ],
)
def test_an_impossible_division_is_refused_with_the_nearest_possible(division, cause, remedy):
    with pytest.raises(ConfigError) as caught:
        SHAPE.check(Division(**division))
    assert cause in caught.value.cause
    assert caught.value.remedy.endswith(remedy)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({"vocab": 301}, "model.vocab 302"), ({"sequence": 33}, "model.sequence 32 or 34")],
)
def test_proposed_vocabularies_are_only_larger_and_sequences_also_smaller(changes, remedy):
    shape = replace(SHAPE, **changes)
    with pytest.raises(ConfigError) as caught:
        shape.check(Division(tp=2, sequence_parallel=True))
    assert caught.value.remedy == f"nearest that it divides: {remedy}"
    if "sequence" in changes:
        shape.check(Division(tp=2))


def test_one_stage_may_have_any_number_of_chunks():
    SHAPE.check(Division(virtual_stages=50))
