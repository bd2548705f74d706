"""Which parameters an optimizer decays, and its steps against a loop of plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpc_train.config import OptimizerSection
from hpc_train.config.file import load
from hpc_train.models.tabular.module import TabularMlp
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.optimizers import ADAM_BETAS, SGD_MOMENTUM, build_optimizer
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer


def test_only_matrices_decay_and_no_stacked_vectors_of_members():
    sizes = TableSizes(edges=((0.0, 0.5, 1.0),), codes=(4,), outputs=2)
    model = TabularMlp(sizes=sizes, layers=1, hidden=8, embedding_width=4, members=3)
    names = {id(one): name for name, one in model.named_parameters()}
    groups = build_optimizer(model, OptimizerSection(weight_decay=0.1)).param_groups
    decayed = {names[id(p)] for one in groups for p in one["params"] if one["weight_decay"]}
    assert decayed == {
        "embedding.row.features.numeric.weight",
        "embedding.row.features.numeric.slope",
        "embedding.row.features.categorical.table.weight",
        "embedding.row.project.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "head.weight",
    }
    assert sum(len(one["params"]) for one in groups) == len(names)


class Columns(nn.Module):
    """Its weights are columns of a larger matrix, so that there are gaps in their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)[:, :3])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean(1)


class Turned(nn.Module):
    """Complex weights, and a complex buffer as of a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.register_buffer("turns", torch.polar(*torch.rand(2, 3, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.rfft(x) * self.weight * self.turns - 1j).abs().mean(1)


class Rows(nn.Module):
    """Rows of a table, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().long() % 5).sum(1).square().mean(1)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", [Columns, Turned, Rows])
def test_steps_are_those_of_plain_torch(group, together, kind, name):
    torch.manual_seed(0)
    model, x = kind(), 3 * torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    options = ["--run.dir", f"{together}", "--run.steps", "5", "--data.batch", "8"]
    options += ["--run.preflight", "false", "--precision.dtype", "float64"]
    options += ["--optimizer.name", name, "--optimizer.lr", "0.1", "--optimizer.clip_norm", "0.5"]
    task = TrainingTask(model, TensorDataset(x), lambda model, batch: model(batch[0]).mean())
    with Trainer(load(None, options), task, Runtime(group, group)) as trainer:
        trainer.train()
    if kind is Rows:
        plain.table.sparse = False
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(plain.parameters(), lr=0.1, betas=ADAM_BETAS, weight_decay=0.0)
        if name == "adamw"
        else torch.optim.SGD(plain.parameters(), lr=0.1, momentum=SGD_MOMENTUM)
    )
    for _ in range(5):
        optimizer.zero_grad()
        plain(x).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for name, expected in plain.state_dict().items():
        found = trainer.model.state_dict()[name]
        assert found.dtype == expected.dtype
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_complex_numbers_stay_complex_in_float32(group, together):
    torch.manual_seed(0)
    model = Turned()
    before = model.turns.clone()
    options = ["--run.dir", f"{together}", "--run.steps", "1", "--data.batch", "8"]
    options += ["--run.preflight", "false"]
    task = TrainingTask(
        model, TensorDataset(torch.randn(8, 4)), lambda model, batch: model(batch[0]).mean()
    )
    with Trainer(load(None, options), task, Runtime(group, group)) as trainer:
        trainer.train()
    assert trainer.model.weight.dtype == torch.complex64
    assert torch.equal(trainer.model.turns, before.to(torch.complex64))
