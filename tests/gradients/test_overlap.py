"""Tensors that would part from a parameter that moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import AveragingOptions, average_gradients
from hpc_train.gradients.overlap import overlap


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def tied_by_data() -> nn.Module:
    model = two()
    model[1].weight.data = model[0].weight.data
    return model


def tied_in_part() -> nn.Module:
    model, values = nn.Module(), torch.randn(4, 3)
    model.first, model.last = nn.Parameter(values[:3]), nn.Parameter(values[2:])
    return model


def with_a_view() -> nn.Module:
    model = two()
    model[1].transposed = model[1].weight.data.t()
    return model


def with_listed_views() -> nn.Module:
    model = two()
    model.views = [model[0].bias[1:]]
    return model


def with_a_buffer() -> nn.Module:
    model = two()
    model.register_buffer("seen", model[0].weight.detach())
    return model


def tied() -> nn.Module:
    model = two()
    model[1].weight = model[0].weight
    return model


def in_one_flat_tensor() -> nn.Module:
    model, values = nn.Module(), torch.randn(6, 3)
    model.first, model.last = nn.Parameter(values[:3]), nn.Parameter(values[3:])
    return model


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (tied_by_data, "1.weight and 0.weight"),
        (tied_in_part, "last and first"),
        (with_a_view, "1.transposed and 1.weight"),
        (with_listed_views, "views[0] and 0.bias"),
        (with_a_buffer, "seen and 0.weight"),
    ],
)
def test_tensors_in_the_memory_of_a_parameter_are_found(build, named):
    model = build()
    cause, _ = overlap(model, model.parameters())
    one, other = named.split(" and ")
    assert cause.startswith((named, f"{other} and {one}"))


@pytest.mark.parametrize(
    "build",
    [
        tied,
        in_one_flat_tensor,
        lambda: nn.LSTM(3, 3, 2),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    ],
)
def test_models_whose_parameters_may_move_are_not_refused(build):
    model = build()
    assert overlap(model, model.parameters()) is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [1, 2])
def test_a_tie_that_zero_would_break_is_refused(job, zero):
    model = tied_by_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = AveragingOptions(engine="mpi", zero=zero)
    with pytest.raises(UserError, match=r"same memory: tie parameters by one object"):
        average_gradients(model, optimizer, job.world, options)
