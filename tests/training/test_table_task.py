"""Models of tables on several ranks, against one rank: losses, scores, sampling, weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_train.checkpoint import restore, state
from hpc_train.checkpoint.catalogue import newest
from hpc_train.config.file import load
from hpc_train.data.tables.features import (
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
    TargetValues,
)
from hpc_train.errors import CheckpointMismatch, ConfigError
from hpc_train.models.kinds import SHAPES
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.table_task import table_task
from hpc_train.training.trainer import Trainer
from tests.conftest import records
from tests.training.test_trainer import stop_after

ROWS, HELD_OUT = 97, 41
STEPS = 7
TARGETS = {
    "classification": TargetValues(
        task="classification", names=("y",), classes=("a", "b", "c"), shares=(0.7, 0.2, 0.1)
    ),
    "multilabel": TargetValues(task="multilabel", names=("p", "q"), shares=(0.5, 0.2)),
    "regression": TargetValues(task="regression", names=("y",), center=50.0, scale=5.0),
}


class Table:
    """A table in memory, whose batches are those of `TableDataset`."""

    def __init__(self, task, rows, seed):
        generator = np.random.default_rng(seed)
        numeric = generator.normal(size=(rows, 3))
        codes = generator.integers(0, 5, (rows, 2))
        value = numeric[:, 0] - numeric[:, 1] ** 2 + (codes[:, 0] == 3)
        target = {
            "classification": np.digitize(value, [0.3, 1.0]),
            "multilabel": np.stack([value > 0, numeric[:, 2] > 1], 1).astype(float),
            "regression": value,
        }[task]
        numeric[generator.random((rows, 3)) < 0.1] = np.nan
        weight = generator.gamma(2.0, 0.5, rows)
        self.columns = [torch.tensor(column) for column in (numeric, codes, target, weight)]

    def __len__(self):
        return len(self.columns[0])

    def fetch(self, indices):
        rows = torch.as_tensor(np.asarray(indices))
        return tuple(column[rows] for column in self.columns)


def features(task):
    edges = (-3.0, -1.0, 0.0, 1.0, 3.0)
    names = ("u", "v", "w")
    return TableFeatures(
        numeric=tuple(NumericFeature(name=name, column=name, edges=edges) for name in names),
        categorical=tuple(
            CategoricalFeature(
                name=name, categories=("x", "y", "z"), shares=(0.0, 0.1, 0.3, 0.3, 0.3)
            )
            for name in ("c", "d")
        ),
        target=TARGETS[task],
    )


KINDS = {
    "tabular": ["--model.layers", "2", "--model.hidden", "8", "--model.heads", "2"],
    "tabular_mlp": ["--model.hidden", "8", "--model.members", "3", "--model.embedding_width", "4"],
    "tabular_resnet": ["--model.hidden", "8", "--model.embedding_width", "4"],
}


def settings(directory, kind, *options):
    fixed = ["--run.dir", str(directory), "--run.steps", str(STEPS), "--run.log_every", "1"]
    fixed += ["--model.kind", kind, *KINDS[kind], "--data.batch", "24"]
    fixed += ["--data.validation_every", "3", "--precision.dtype", "float64"]
    fixed += ["--optimizer.lr", "0.01", "--checkpoint.every", "3", "--run.preflight", "false"]
    return load(None, [*fixed, "--run.deterministic", "true", *options])


def make(config, task, started):
    data = Table(task, ROWS, 0), Table(task, HELD_OUT, 1)
    whole = table_task(config, features(task), *data, started.world)
    return Trainer(config, whole, started)


def run(directory, kind, task, started, *options):
    make(settings(directory, kind, *options), task, started).train()


LAYOUTS = [
    [],
    ["--data.micro_batch", "2", "--memory.zero", "3"],
    ["--data.micro_batch", "3", "--memory.zero", "2", "--memory.recompute", "full"],
    ["--parallel.tp", "2", "--data.micro_batch", "4", "--memory.recompute", "selective"],
    ["--parallel.tp", "2", "--parallel.pp", "2", "--data.micro_batch", "4"],
    ["--parallel.pp", "2", "--data.micro_batch", "3", "--parallel.schedule", "zero_bubble"],
    ["--data.validation_batches", "1", "--data.micro_batch", "6"],
]
TASKS = [  # each with some of the layouts
    ("tabular", "classification", ["--data.class_weights", "balanced"], [1, 4]),
    ("tabular_mlp", "classification", ["--data.sampling", "balanced"], [2, 4, 6]),
    ("tabular_mlp", "regression", ["--model.quantiles", "[0.1, 0.5, 0.9]"], [0, 3, 5]),
    ("tabular_resnet", "multilabel", [], [1]),
]


def _compared(key):
    measured = {"samples_per_second", "memory_gb", "time", "tflops", "node_hours"}
    return not key.endswith("_seconds") and key not in measured


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "task", "options", "layouts"), TASKS)
def test_losses_and_scores_are_those_of_one_rank_on_every_layout(
    job, together, kind, task, options, layouts
):
    alone = Runtime(Group(), Group())
    found = []
    for number, layout in ((number, LAYOUTS[number]) for number in layouts):
        more = [one for one in layout if "validation_batches" in one]
        limited = [*options, *layout[:2]] if more else options
        own = together / f"alone-{bool(more)}"
        if job.world.rank == 0 and not own.exists():
            run(own, kind, task, alone, *limited)
        job.world.barrier()
        run(together / str(number), kind, task, job, *options, *layout)
        found.append((records(own), records(together / str(number))))
    job.world.barrier()
    for mine, theirs in found:
        assert len(mine) == STEPS
        assert "validation_loss" in mine[-1]
        for a, b in zip(mine, theirs, strict=True):
            keys = {key for key in a if _compared(key)}
            assert keys == {key for key in b if _compared(key)}
            for key in keys:
                assert b[key] == pytest.approx(a[key], rel=1e-10, abs=1e-13), key


SCORES = {
    "classification": {"accuracy", "balanced_accuracy", "auc", "log_loss", "calibration_error"},
    "regression": {"rmse", "r2", "mae"},
}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_training_learns_and_says_how_good_it_is(tmp_path, task, caplog):
    alone = Runtime(Group(), Group())
    with caplog.at_level("INFO"):
        run(tmp_path / "run", "tabular_mlp", task, alone, "--run.steps", "150")
    first, last = (records(tmp_path / "run")[at] for at in (2, -1))
    assert last["validation_loss"] < 0.8 * first["validation_loss"]
    names = {f"validation_{name}" for name in (*SCORES[task], "loss")}
    assert {key for key in last if key.startswith("validation")} == names
    good = "accuracy" if task == "classification" else "r2"
    assert last[f"validation_{good}"] > 0.4
    [told] = [r.message for r in caplog.records if r.message.startswith("held-out samples at")]
    assert f"{good.replace('_', ' ')} {last[f'validation_{good}']:.5g}" in told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_have_no_number_that_json_lacks(tmp_path, dtype):
    """Held-out rows of one class have no AUC. It is left out, and nothing is null."""
    config = settings(tmp_path / "run", "tabular_mlp", "--precision.dtype", dtype)
    data = [Table("classification", rows, 0) for rows in (ROWS, HELD_OUT)]
    for table in data:
        table.columns = [
            column.float() if column.is_floating_point() else column for column in table.columns
        ]
    data[1].columns[2] = torch.zeros(HELD_OUT, dtype=torch.int64)
    task = table_task(config, features("classification"), *data, Group())
    Trainer(config, task, Runtime(Group(), Group())).train()
    last = records(tmp_path / "run")[-1]
    assert "validation_auc" not in last
    assert last["validation_balanced_accuracy"] == last["validation_accuracy"]
    assert "null" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.mpi
@pytest.mark.parametrize("sampling", [pytest.param("natural", marks=pytest.mark.long), "balanced"])
def test_a_stopped_run_goes_on_bit_for_bit(job, together, sampling):
    options = ["--data.sampling", sampling]
    given = ("tabular", "classification")
    run(together / "whole", *given, job, *options)
    config = settings(together / "cut", given[0], *options)
    trainer = make(config, given[1], job)
    stop_after(trainer, 4, job)
    make(config, given[1], job).train()
    if job.world.rank == 0:
        whole, cut = records(together / "whole"), records(together / "cut")
        for key in ("step", "loss", "validation_loss", "validation_auc"):
            assert [r.get(key) for r in whole] == [r.get(key) for r in cut]
        last = f"checkpoints/step-{STEPS:09d}.safetensors"
        assert (together / "whole" / last).read_bytes() == (together / "cut" / last).read_bytes()


def test_a_run_with_another_sampling_is_not_resumed(tmp_path):
    alone = Runtime(Group(), Group())
    run(tmp_path / "run", "tabular_mlp", "classification", alone)
    options = ["--data.sampling", "balanced", "--run.steps", "9"]
    with pytest.raises(CheckpointMismatch, match="made with data.sampling natural"):
        run(tmp_path / "run", "tabular_mlp", "classification", alone, *options)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("task", "options", "why"),
    [
        ("regression", ["--data.sampling", "balanced"], "data.sampling is balanced, but"),
        ("multilabel", ["--data.class_weights", "balanced"], "data.class_weights is balanced, but"),
        ("classification", ["--model.quantiles", "[0.5]"], "model.quantiles is given, but"),
    ],
)
def test_keys_that_the_task_cannot_have_are_refused(job, tmp_path, task, options, why):
    config = settings(tmp_path / "run", "tabular_mlp", *options)
    with pytest.raises(ConfigError, match=why):
        make(config, task, job)


@pytest.mark.parametrize(
    "options",
    [
        ["--data.loss", "token"],
        ["--data.micro_tokens", "100"],
        ["--data.across_documents", "false"],
        ["--model.vocab", "100"],
        ["--model.sequence", "100"],
    ],
)
def test_keys_of_texts_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=f"{options[0][2:]} is given, but model.kind "):
        settings(tmp_path / "run", "tabular", *options)


def test_a_checkpoint_has_all_that_a_reader_needs(tmp_path):
    started = Runtime(Group(), Group())
    trainer = make(settings(tmp_path / "run", "tabular"), "classification", started)
    trainer.train()
    reader = restore.open_together(newest(tmp_path / "run"), started.world)
    about = restore.load_state(reader, started.world)["about"]
    assert TableFeatures.from_tree(about["features"]) == features("classification")
    torch.set_default_dtype(getattr(torch, about["dtype"]))
    try:
        model = SHAPES[about["kind"]].from_tree(about["shape"]).build()
    finally:
        torch.set_default_dtype(torch.float32)
    restore.load_tensors(reader, state.model_tensors(model, {}), started.world)
    numeric, categorical, _, _ = Table("classification", HELD_OUT, 1).columns
    with torch.no_grad():
        expected = trainer.model.eval()(numeric, categorical)
        found = model.eval()(numeric, categorical)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
