"""A model of one table, trained further on a table with other columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hpc_train.checkpoint.catalogue import newest
from hpc_train.checkpoint.restore import Tensors
from hpc_train.config import ModelSection
from hpc_train.data.tables.dataset import TableDataset
from hpc_train.data.tables.features import (
    CategoricalFeature,
    NumericFeature,
    TableFeatures,
    TargetValues,
)
from hpc_train.data.tables.table_manifest import read_table_manifest
from hpc_train.data.tables.transfer import rescaling, with_statistics_of
from hpc_train.errors import ConfigError
from hpc_train.models.kinds import SHAPES
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.planning.model import table_sizes
from hpc_train.training.table_transfer import features_to_read
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.cases import cases
from tests.programs import hpc_train, run
from tests.training.test_trainer import check_equal, config

AGE = NumericFeature(name="age", column="age", center=40.0, scale=10.0, edges=(-2.0, 0.0, 1.0, 3.0))
HEIGHT = NumericFeature(name="height", column="height", center=170.0, scale=9.0, edges=(-2.0, 2.0))
WEIGHT = NumericFeature(name="weight", column="weight", edges=(-1.0, -0.5, 0.0, 0.5, 1.0))
TOWN = CategoricalFeature(name="town", categories=("x", "y", "z"), shares=(0.0, 0.0, 0.4, 0.3, 0.3))
JOB = CategoricalFeature(name="job", categories=("a", "b"), shares=(0.0, 0.0, 0.5, 0.5))
ILL = TargetValues(task="classification", names=("ill",), classes=("no", "yes"), shares=(0.5, 0.5))
OLD = TableFeatures(numeric=(HEIGHT, AGE), categorical=(TOWN,), target=ILL)
NEW = TableFeatures(
    numeric=(replace(AGE, center=60.0, scale=20.0, edges=(-1.0, 1.0)), WEIGHT),
    categorical=(JOB, replace(TOWN, categories=("z", "new", "x"))),
    target=ILL,
)
ROWS = 24
KINDS = {
    "tabular": {"layers": 1, "hidden": 8, "heads": 2},
    "tabular_mlp": {"layers": 1, "hidden": 8, "embedding_width": 4, "members": 3},
    "tabular_resnet": {"layers": 1, "hidden": 8, "embedding_width": 4},
}
NUMERIC = ["piecewise_linear", "periodic", "linear"]


class Rows:
    """The rows of a table in memory."""

    def __init__(self, features: TableFeatures) -> None:
        drawn = np.random.default_rng(3)
        raw = {"age": drawn.normal(50, 20, ROWS), "height": drawn.normal(170, 10, ROWS)}
        raw["age"][::7] = np.nan
        raw |= {"weight": drawn.normal(size=ROWS)}
        raw |= {"town": np.array([*"xyz", None, "new", "q"] * 4, object)}
        raw |= {"job": np.array([*"ab"] * 12, object)}
        numeric, codes = features.encode(raw)
        self.numeric, self.codes = torch.from_numpy(numeric), torch.from_numpy(codes).long()
        self.target = torch.arange(ROWS) % 2

    def __len__(self) -> int:
        return ROWS

    def fetch(self, indices) -> tuple[torch.Tensor, ...]:
        return self.numeric[indices], self.codes[indices], self.target[indices]


def model_of(
    kind: str, features: TableFeatures, numeric: str = "piecewise_linear", pretraining: str = "none"
):
    sizes = table_sizes(features, ModelSection(kind=kind, pretraining=pretraining))
    shape = SHAPES[kind](**KINDS[kind], sizes=sizes, numeric=numeric)
    torch.manual_seed(5)
    model = shape.build_unfilled(torch.float64)
    model.table = {"features": features.to_tree(), "quantiles": [], "pretraining": pretraining}
    return model


def loss(model: nn.Module, batch) -> torch.Tensor:
    outputs = model(*batch[:2]).mean(1)
    return nn.functional.cross_entropy(outputs, batch[2])


def train(directory, model, features: TableFeatures, *options: str, started=None) -> Trainer:
    task = TrainingTask(model, Rows(features), loss, about=model.table, private_parameters=True)
    settings = config(directory, "--data.validation_every", "0", *options)
    trainer = Trainer(settings, task, started or Runtime(Group(), Group()))
    trainer.train()
    return trainer


FROZEN = ["--run.steps", "1", "--optimizer.lr", "0"]


@pytest.mark.parametrize("numeric", NUMERIC)
@pytest.mark.parametrize("kind", KINDS)
def test_what_both_tables_have_is_taken_by_name_and_the_rest_is_new(tmp_path, kind, numeric):
    old = train(tmp_path / "old", model_of(kind, OLD, numeric), OLD, "--run.steps", "2").model
    options = [*FROZEN, "--checkpoint.weights", str(tmp_path / "old")]
    read = features_to_read(config(tmp_path / "new", *options), NEW, Group())
    assert read.numeric[0] == AGE  # with its old statistics
    model = train(tmp_path / "new", model_of(kind, read, numeric), read, *options).model
    fresh = train(tmp_path / "fresh", model_of(kind, read, numeric), read, *FROZEN).model
    theirs, mine, initial = (dict(one.named_parameters()) for one in (old, model, fresh))
    for name, tensor in mine.items():
        if ".features.numeric." in name:
            bins = slice(None, len(AGE.edges) - 1) if tensor.dim() == 3 else slice(None)
            bins = slice(None) if numeric != "piecewise_linear" else bins
            assert torch.equal(tensor[0][bins], theirs[name][1][bins])
            assert torch.equal(tensor[1], initial[name][1])
        elif name.endswith(
            "table.weight"
        ):  # job has 4 rows, and town 5: unknown, missing, z, new, x
            places = torch.tensor([4, 5, 6, 8])
            assert torch.equal(tensor[places], theirs[name][[0, 1, 4, 2]])
            others = torch.tensor([0, 1, 2, 3, 7])
            assert torch.equal(tensor[others], initial[name][others])
        elif name.startswith("embedding.") and name.endswith(("project.weight", "factors.weight")):
            width = tensor.shape[1] // 4
            each, before = tensor.split(width, 1), theirs[name].split(width, 1)
            assert torch.equal(each[0], before[1])
            assert torch.equal(each[3], before[2])
            assert torch.equal(each[1], initial[name].split(width, 1)[1])
        else:
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("numeric", NUMERIC)
def test_a_shared_table_is_predicted_as_before_whatever_its_own_statistics(tmp_path, numeric):
    old = train(tmp_path / "old", model_of("tabular", OLD, numeric), OLD).model
    moved = replace(
        OLD,
        numeric=tuple(replace(one, center=9.0, scale=3.0, edges=(0.0, 1.0)) for one in OLD.numeric),
        categorical=(replace(TOWN, categories=("y", "z", "x")),),
    )
    options = [*FROZEN, "--checkpoint.weights", str(tmp_path / "old")]
    read = features_to_read(config(tmp_path / "new", *options), moved, Group())
    model = train(tmp_path / "new", model_of("tabular", read, numeric), read, *options).model
    before, stored, now = Rows(OLD), Rows(moved), Rows(read)
    factors, summands = map(torch.from_numpy, rescaling(moved, read))
    torch.testing.assert_close(
        stored.numeric * factors + summands, now.numeric, rtol=1e-12, atol=1e-12, equal_nan=True
    )
    with torch.no_grad():
        expected = old.eval()(before.numeric, before.codes)
        found = model.eval()(now.numeric, now.codes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_another_target_gets_a_new_head_which_has_to_be_trained(tmp_path):
    train(tmp_path / "old", model_of("tabular_resnet", OLD), OLD)
    other = replace(OLD, target=replace(ILL, classes=("no", "yes", "perhaps")))
    weights = ["--checkpoint.weights", str(tmp_path / "old")]
    lora = [*weights, "--finetune.lora", "2"]
    with pytest.raises(ConfigError, match=r"lack all or a part of head\..* set finetune.head true"):
        train(tmp_path / "frozen", model_of("tabular_resnet", other), other, *lora)
    lora += ["--finetune.head", "true"]
    train(tmp_path / "tuned", model_of("tabular_resnet", other), other, *lora)
    with pytest.raises(ConfigError, match=r"lack .* embedding\.features.* finetune\.patterns"):
        train(tmp_path / "new", model_of("tabular_resnet", NEW), NEW, *lora)
    lora += ["--finetune.patterns", "['embedding.*']"]
    train(tmp_path / "new", model_of("tabular_resnet", NEW), NEW, *lora)


@pytest.mark.parametrize("pretraining", ["masked_cells", "contrast"])
def test_what_pretraining_has_learnt_is_taken_but_for_the_head(tmp_path, pretraining, caplog):
    caplog.set_level("INFO")
    learnt = model_of("tabular_mlp", OLD, pretraining=pretraining)
    old = train(tmp_path / "old", learnt, OLD, "--run.steps", "2").model
    weights = ["--checkpoint.weights", str(tmp_path / "old"), *FROZEN]
    tuned = train(tmp_path / "tuned", model_of("tabular_mlp", OLD), OLD, *weights).model
    assert "so the head begins anew" in caplog.text
    theirs = dict(old.named_parameters())
    for name, tensor in tuned.named_parameters():
        if not name.startswith("head."):
            assert torch.equal(tensor, theirs[name]), name
    again = model_of("tabular_mlp", OLD, pretraining=pretraining)
    train(tmp_path / "again", again, OLD, *weights)
    assert torch.equal(again.head.weight, old.head.weight)
    other = model_of("tabular_mlp", NEW, pretraining=pretraining)
    train(tmp_path / "other", other, NEW, *weights)  # whose cells are others


LAYOUTS = {
    "tensor": ["--parallel.tp", "2", "--memory.zero", "3"],
    "pipeline": [
        *("--parallel.pp", "2", "--data.micro_batch", "3", "--memory.recompute", "selective")
    ],
    "zero_bubble": [
        *("--parallel.pp", "2", "--data.micro_batch", "3", "--parallel.schedule", "zero_bubble")
    ],
}
CASES = {
    f"{kind}-{layout}": (kind, options) for kind in KINDS for layout, options in LAYOUTS.items()
}
NOW = ("tabular-pipeline", "tabular-tensor", "tabular_mlp-zero_bubble", "tabular_resnet-tensor")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("kind", "layout"), cases(CASES, later=set(CASES) - set(NOW)))
def test_layouts_give_the_losses_of_one_rank(job, together, kind, layout):
    chosen = ["--checkpoint.weights", str(together / "old"), "--finetune.lora", "2"]
    chosen += ["--finetune.head", "true", "--finetune.patterns", "['embedding.*']"]
    read = with_statistics_of(NEW, OLD)
    if job.world.rank == 0:
        train(together / "old", model_of(kind, OLD), OLD)
        train(together / "alone", model_of(kind, read), read, *chosen)
    job.world.barrier()
    train(together / "run", model_of(kind, read), read, *chosen, *layout, started=job)
    if job.world.rank == 0:
        check_equal(together / "run", together / "alone")
    job.world.barrier()


def test_a_run_that_goes_on_reads_its_table_as_before_without_the_weights(tmp_path):
    train(tmp_path / "old", model_of("tabular_resnet", OLD), OLD)
    options = ["--checkpoint.weights", str(tmp_path / "old")]
    read = features_to_read(config(tmp_path / "new", *options), NEW, Group())
    train(tmp_path / "new", model_of("tabular_resnet", read), read, *options)
    (tmp_path / "old").rename(tmp_path / "away")
    assert features_to_read(config(tmp_path / "new", *options), NEW, Group()) == read


def write_csv(path, columns: list[str]) -> None:
    """A table of some columns; what is to be predicted follows from age and town."""
    drawn = np.random.default_rng(len(columns))
    age, town = drawn.normal(30 + 10 * len(columns), 9, 400), drawn.choice([*"xyz"], 400)
    values = {"age": age.round(3), "town": town, "weight": drawn.normal(size=400).round(3)}
    values |= {"ill": np.where((age > 50) ^ (town == "x"), "yes", "no")}
    rows = zip(*(values[column] for column in columns), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]) + "\n")


@pytest.mark.slow("five programs, one of them of two ranks")
def test_a_prepared_table_is_read_as_the_weights_know_it(tmp_path):
    write_csv(tmp_path / "old.csv", ["age", "town", "ill"])
    write_csv(tmp_path / "new.csv", ["town", "weight", "age", "ill"])
    for name in ("old", "new"):
        prepared = ["prepare", "table", str(tmp_path / f"{name}.csv"), "--target", "ill"]
        done = run(*hpc_train(*prepared, "--out", str(tmp_path / name)))
        assert done.returncode == 0, done.stderr
    small = ["--model.kind", "tabular_resnet", "--model.hidden", "8", "--run.steps", "4"]

    def trained(name: str, *options: str, launcher: tuple[str, ...] = ()) -> dict:
        words = ["train", *small, "--data.path", str(tmp_path / name.split("-")[0])]
        command = hpc_train(*words, "--run.dir", str(tmp_path / f"run-{name}"), *options)
        done = run(*launcher, *command)
        assert done.returncode == 0, done.stderr
        return Tensors(newest(tmp_path / f"run-{name}")).state()["about"]

    old = trained("old")
    weights = ["--checkpoint.weights", str(tmp_path / "run-old"), "--finetune.lora", "2"]
    weights += ["--finetune.head", "true", "--finetune.patterns", "['embedding.*']"]
    tuned = trained("new", *weights, launcher=("mpirun", "-np", "2"))
    [age] = [one for one in tuned["features"]["numeric"] if one["name"] == "age"]
    assert age == old["features"]["numeric"][0]
    own = read_table_manifest(tmp_path / "new").features
    assert age["center"] != own.numeric[[one.name for one in own.numeric].index("age")].center
    assert tuned["lora"]["rank"] == 2
    manifest = read_table_manifest(tmp_path / "new")
    read = TableFeatures.from_tree(tuned["features"])
    sets = [
        TableDataset(tmp_path / "new", manifest, "train", dtype=torch.float64, read_as=features)
        for features in (None, read)
    ]
    stored, converted = (one.fetch(np.arange(len(one)))[0].numpy() for one in sets)
    for place, (was, now) in enumerate(zip(own.numeric, read.numeric, strict=True)):
        value = stored[:, place] * was.scale + was.center
        np.testing.assert_allclose(converted[:, place] * now.scale + now.center, value, rtol=1e-12)
