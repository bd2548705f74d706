"""The models of tables under all layouts, against one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from hpc_train.models.kinds import SHAPES
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import check_equal, config

TABLE = TableSizes(
    edges=((-1.0, 0.0, 2.0), (-0.5, 0.5), (-2.0, -1.0, 0.0, 3.0)), codes=(4, 3), outputs=3
)
SIZES = {"sizes": TABLE, "layers": 2, "hidden": 8, "dropout": 0.2}
MODELS = {
    "tabular": {"heads": 2},
    "tabular_mlp": {"members": 3, "embedding_width": 5, "numeric": "periodic"},
    "tabular_resnet": {"embedding_width": 3, "numeric": "linear"},
}
LAYOUTS = {
    "dp4": {},
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2, "parallel.schedule": "zero_bubble", "data.micro_batch": 3},
    "tp2-pp2": {"parallel.tp": 2, "parallel.pp": 2, "memory.recompute": "selective"},
    "zero1": {"memory.zero": 1, "data.micro_batch": 3},
    "zero2": {"memory.zero": 2, "memory.recompute": "full"},
    "zero3": {"memory.zero": 3, "parallel.tp": 2, "data.micro_batch": 4},
}


def rows(samples, seed):
    """Rows with missing numbers, and codes of missing and unknown categories."""
    generator = torch.Generator().manual_seed(seed)
    numeric = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    numeric[torch.rand(samples, 3, generator=generator) < 0.2] = torch.nan
    codes = [torch.randint(some, (samples,), generator=generator) for some in TABLE.codes]
    target = torch.randint(3, (samples,), generator=generator)
    return TensorDataset(numeric, torch.stack(codes, 1), target)


def loss(model, batch):
    numeric, categorical, target = batch
    predictions = model(numeric, categorical)
    classes = target.unsqueeze(1).expand(predictions.shape[:2])
    return F.cross_entropy(predictions.flatten(0, 1), classes.flatten())


def train(directory, kind, options, started):
    torch.manual_seed(0)
    shape = SHAPES[kind](**SIZES, **MODELS[kind])
    task = TrainingTask(
        shape.build_unfilled(torch.float64),
        rows(60, 1),
        loss,
        validation=rows(11, 2),
        private_parameters=True,
    )
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    Trainer(config(directory, *words), task, started).train()


@pytest.mark.mpi
@pytest.mark.slow("a training for each layout, and one alone")
@pytest.mark.parametrize(
    # test_table_task.py has the others on several layouts, too.
    "kind",
    [
        "tabular",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("tabular_mlp", "tabular_resnet")),
    ],
)
def test_losses_of_a_model_of_tables_are_those_of_one_rank(job, together, kind):
    if job.world.rank == 0:
        train(together / "reference", kind, {}, Runtime(Group(), Group()))
    for layout, options in LAYOUTS.items():
        train(together / layout, kind, options, job)
        if job.world.rank == 0:
            check_equal(together / layout, together / "reference")
