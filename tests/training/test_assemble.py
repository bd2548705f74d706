"""Models that the Trainer builds by the user's class, so that each rank fills its own part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.errors import ConfigError, UserError
from hpc_train.models.deferred import Recipe
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import check_equal, config


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Regression(nn.Module):
    stages = ("first", "layers.*", "last")
    tensor_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(4))
        self.last = nn.Linear(8, 1)
        nn.init.orthogonal_(self.layers[1].up.weight)  # read, and so whole on every rank
        for layer in self.layers[2:]:
            nn.init.normal_(layer.down.weight, 0.0, 0.02)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def table(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make(settings, started, model) -> Trainer:
    torch.manual_seed(started.world.rank)  # the seed of the run decides the values
    task = TrainingTask(model, table(60, 1), loss, validation=table(11, 2), private_parameters=True)
    return Trainer(settings, task, started)


@pytest.fixture
def reference(together, job):
    if job.world.rank == 0:
        make(config(together / "reference"), Runtime(Group(), Group()), Regression).train()
    job.world.barrier()
    return together / "reference"


LAYOUTS = [
    ["--parallel.tp", "2", "--parallel.pp", "2", "--data.micro_batch", "6"],
    ["--parallel.tp", "2", "--memory.zero", "1"],
    ["--parallel.pp", "2", "--memory.zero", "3", "--data.micro_batch", "3"],
    ["--memory.zero", "0"],
]


@pytest.mark.mpi
@pytest.mark.parametrize("options", LAYOUTS)
def test_the_values_are_the_same_on_every_layout(job, together, reference, options):
    make(config(together / "run", *options), job, Regression).train()
    if job.world.rank == 0:
        check_equal(together / "run", reference)


class Normed(nn.Sequential):
    """BatchNorm layers are stages and blocks."""

    stages = ("*",)

    def __init__(self):
        norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        super().__init__(nn.Linear(5, 8), norms[0], nn.Linear(8, 8), norms[1], nn.Linear(8, 1))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("option", ["--parallel.pp=2", "--memory.recompute=full"])
def test_batch_norm_that_is_a_stage_or_a_block_sees_the_samples_of_all_ranks(job, together, option):
    make(config(together / "run", option), job, Normed).train()
    if job.world.rank == 0:
        make(config(together / "reference"), Runtime(Group(), Group()), Normed).train()
        check_equal(together / "run", together / "reference")


@pytest.mark.mpi
@pytest.mark.parametrize("options", [["--memory.zero", "0"], ["--memory.zero", "1"]])
def test_nodes_whose_processors_round_otherwise_begin_alike(job, together, monkeypatch, options):
    """Two nodes of two ranks. The second one makes other values."""
    node = job.world.split(job.world.rank // 2, job.world.rank)
    usual = Recipe.make

    def rounded(recipe):
        return usual(recipe) + (job.world.rank // 2) * 1e-9

    monkeypatch.setattr(Recipe, "make", rounded)
    settings = config(together / "run", *options, "--memory.scope", "node")
    with make(settings, Runtime(job.world, node), Regression) as trainer:
        sums = [float(p.detach().double().sum()) for p in trainer.model.parameters()]
        assert len({tuple(one) for one in job.world.gathered(sums)}) == 1
    node.close()


@pytest.mark.mpi
def test_ranks_that_build_different_models_are_refused(job, together):
    def build():
        model = Regression()
        nn.init.constant_(model.last.bias, float(job.world.rank == 2))
        return model

    with pytest.raises(UserError, match="how the model gets its initial values"):
        make(config(together / "run"), job, build)


@pytest.mark.mpi
def test_a_parameter_without_values_is_named_on_all_ranks(job, together):
    def build():
        model = Regression()
        model.last.more = nn.Parameter(torch.empty(3))
        return model

    with pytest.raises(UserError, match=r"parameter last\.more of the model is never given"):
        make(config(together / "run", "--parallel.pp", "2"), job, build)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("cache", "/dev/shm", "data.cache is given, but the data set was made without a cache"),
        ("across_documents", "false", "the data set does not have whole documents"),
    ],
)
def test_a_key_for_shards_is_refused_for_another_data_set(tmp_path, key, value, match):
    settings = config(tmp_path, f"--data.{key}", value)
    with pytest.raises(ConfigError, match=match):
        make(settings, Runtime(Group(), Group()), Regression)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to train"):
        make(
            config(tmp_path), Runtime(Group(), Group()), lambda: Regression().requires_grad_(False)
        )
