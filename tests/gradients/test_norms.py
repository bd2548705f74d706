"""The norm of gradients is that of float64, whatever their type, and however they are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.gradients.norms import ROW_ELEMENTS, total_norm


def draw(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "near"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
)
def test_a_large_tensor_loses_no_digits(dtype, near):
    numbers = draw(3_000_001).to(dtype)
    expected = numbers.double().square().sum().sqrt().item()
    found = total_norm([numbers])
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, rel=near)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * ROW_ELEMENTS), max_size=6), st.booleans())
def test_it_does_not_depend_on_how_numbers_are_cut(sizes, turned):
    numbers = draw(sum(sizes)).float()
    parts = [part.reshape(-1, 1).t() if turned else part for part in numbers.split(sizes)]
    found = total_norm(parts).item() if sizes else total_norm([]).item()
    assert found == pytest.approx(numbers.double().norm().item(), rel=1e-6, abs=1e-30)


def test_columns_of_a_matrix_and_complex_numbers_and_other_types_count():
    matrix, waves = draw(60_000).view(300, 200), torch.complex(draw(20_000), draw(20_000, 1))
    tensors = [matrix[:, 3:150], waves, draw(5).float(), torch.ones(())]
    expected = sum(one.abs().double().square().sum().item() for one in tensors) ** 0.5
    assert total_norm(tensors).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("at", [0, ROW_ELEMENTS, 2 * ROW_ELEMENTS + 5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_told(at, bad):
    numbers = torch.ones(2 * ROW_ELEMENTS + 9)
    numbers[at] = bad
    assert not total_norm([torch.ones(3), numbers]).isfinite()
