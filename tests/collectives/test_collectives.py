from __future__ import annotations

import pytest
import torch

from hpc_train.collectives import connect

pytestmark = pytest.mark.mpi
SHAPES = [(), (0,), (1,), (7, 3), (5000,)]


@pytest.fixture(params=[1 << 30, 64], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    # By name: this module is read in one process too, and importing mpi4py.MPI would start MPI.
    monkeypatch.setattr("hpc_train.collectives.mpi.PIECE_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_is_over_all_ranks(group, pieces, shape, dtype):
    if not group:
        return
    tensor = torch.full(shape, group.rank + 1, dtype=dtype)
    connect(group).sum_(tensor)
    assert torch.equal(tensor, torch.full(shape, sum(range(1, group.size + 1)), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_takes_any_type(group, pieces, shape, dtype):
    if not group:
        return
    root = group.size - 1
    tensor = torch.full(shape, float(group.rank == root)).to(dtype)
    connect(group).broadcast_(tensor, root)
    assert torch.equal(tensor, torch.ones(shape).to(dtype))


def test_tensors_may_lie_in_any_order(group):
    if not group:
        return
    tensor = torch.full((2, 3, 4, 5), float(group.rank)).to(memory_format=torch.channels_last)
    connect(group).broadcast_(tensor, group.size - 1)
    assert torch.equal(tensor, torch.full((2, 3, 4, 5), group.size - 1.0))
    connect(group).sum_(tensor)
    assert torch.equal(tensor, torch.full((2, 3, 4, 5), group.size * (group.size - 1.0)))


def test_16_bit_floats_are_refused_and_not_added_as_integers(group):
    if group and group.size > 1:
        with pytest.raises(TypeError, match="cannot add torch.bfloat16"):
            connect(group).sum_(torch.ones(2, dtype=torch.bfloat16))
