"""Initial values: any part of a tensor, made alone, is the same part of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from hpc_train.models import GPT
from hpc_train.models import initial as initials
from hpc_train.models.gpt.shape import GptShape
from hpc_train.models.initial import Initial, InitialValues, normals, unfilled
from hpc_train.sharding import SliceSpec
from tests.models.memory import memory_of_its_own

SIZES = {"vocab": 13, "sequence": 6, "layers": 2, "hidden": 8, "heads": 2}


class Own(nn.Module):
    initial_seed = 5

    def __init__(self, *shape):
        super().__init__()
        self.weight = Parameter(torch.empty(shape))

    def initial(self, name):
        return Initial(mean=2.0, std=0.5)


@given(st.integers(0, 3000), st.integers(1, 500))
def test_numbers_do_not_depend_on_where_one_begins(begin, count):
    everything = normals(3, "a", 0, 3500)
    assert np.array_equal(normals(3, "a", begin, count), everything[begin : begin + count])


def test_numbers_are_normal_and_differ_by_seed_and_name():
    numbers = normals(3, "a", 0, 400_000).astype(np.float64)
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.std() - 1) < 0.01
    assert abs((numbers**4).mean() - 3) < 0.1
    assert abs((np.abs(numbers) > 1.96).mean() - 0.05) < 0.003
    for other in (normals(4, "a", 0, 400_000), normals(3, "b", 0, 400_000)):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.01


@settings(max_examples=60)
@given(st.data())
def test_a_slice_is_filled_as_the_whole(data):
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    whole = Own(rows, columns)
    InitialValues(whole).fill(whole.weight, whole.weight.data)
    dim = data.draw(st.integers(0, 1))
    size = (rows, columns)[dim]
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    part = whole.weight.detach().narrow(dim, start, stop - start)
    mine = Own(*part.shape)
    values = InitialValues(mine, {}, {"weight": SliceSpec((rows, columns), dim, start, stop)})
    first = data.draw(st.integers(0, len(part) - 1))
    into = torch.empty(len(part) - first, part.shape[1])
    values.fill(mine.weight, into, first)
    assert torch.equal(into, part[first:])


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_filled_bit_by_bit(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole, other = Own(50, 7), Own(50, 7)
    InitialValues(whole).fill(whole.weight, whole.weight.data)
    monkeypatch.setattr(initials, "AT_ONCE", 20)
    InitialValues(other).fill(other.weight, other.weight.data)
    assert torch.equal(whole.weight, other.weight)


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_that_is_filled_later_is_the_same_model(tie):
    torch.manual_seed(7)
    usual = GPT(**SIZES, tie_embeddings=tie)
    torch.manual_seed(7)
    later = GptShape(**SIZES, tie_embeddings=tie).build_unfilled(torch.float32)
    values = InitialValues(later)
    for parameter in later.parameters():
        values.fill(parameter, parameter.data)
    assert (later.head.output.weight is later.embedding.token.weight) == tie
    for (name, one), (other_name, other) in zip(
        usual.named_parameters(), later.named_parameters(), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other), name


def test_a_model_without_values_takes_no_memory():
    before = memory_of_its_own()
    model = unfilled(GPT, torch.float32, **SIZES | {"hidden": 2048, "vocab": 4096})
    assert memory_of_its_own() - before < 0.05 * sum(p.nbytes for p in model.parameters())
