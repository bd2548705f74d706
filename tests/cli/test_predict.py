"""`hpc-train predict`: on many ranks, as it is run, and against what NumPy computes."""

from __future__ import annotations

import csv
import json

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch

from hpc_train import files
from hpc_train.checkpoint.catalogue import newest
from hpc_train.checkpoint.export import export_model
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.cli.predict import column_names, predict_together
from hpc_train.config.file import load
from hpc_train.data.tables.prepare_table import prepare_table
from hpc_train.data.tables.schema import Column, TableSchema
from hpc_train.data.tables.table_request import TableOptions, table_request
from hpc_train.errors import CheckpointMismatch, ConfigError, DataError
from hpc_train.models.lora import LoraAdapters
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.tabular import Regressor
from hpc_train.training.predict import PredictOptions, features_read_by
from hpc_train.training.tables import train_table
from hpc_train.training.trained import load_model
from tests.checkpoint.states import save_tensors
from tests.data.prepared import write_csv
from tests.programs import hpc_train, only_line, run

KINDS = {
    "id": "ignored",
    "size": "numeric",
    "day": "date",
    "color": "categorical",
    "importance": "numeric",
    "kind": "categorical",
    "p": "numeric",
    "q": "numeric",
    "height": "numeric",
}
TARGETS = {"classification": ("kind",), "multilabel": ("p", "q"), "regression": ("height",)}
ALONE = Runtime(Group(), Group())
TRAINED = [
    *("--run.steps", "8", "--run.preflight", "false", "--run.log_every", "8"),
    *("--model.kind", "tabular_mlp", "--model.hidden", "8", "--model.members", "3"),
    *("--data.batch", "32", "--optimizer.lr", "0.03", "--optimizer.warmup_steps", "1"),
]


def made_columns(rows=300, seed=0):
    random = np.random.default_rng(seed)
    size = random.normal(10, 3, rows).round(4)
    color = random.choice(["red", "green", "blue"], rows)
    days = (np.datetime64("2024-01-30") + random.integers(0, 400, rows)).astype(str)
    height = size * 2 + 4 * (color == "red") + random.normal(0, 1, rows)
    return {
        "id": [f"row {number}" for number in range(rows)],
        "size": size.tolist(),
        "day": days.tolist(),
        "color": color.tolist(),
        "importance": random.gamma(2, 0.5, rows).round(3).tolist(),
        "kind": np.digitize(height, [20, 24]).astype(str).tolist(),
        "p": (height > 20).astype(int).tolist(),
        "q": (size > 12).astype(int).tolist(),
        "height": height.round(4).tolist(),
    }


def trained_run(folder, task, *options):
    """Train a model for a task in this process; returns the run directory."""
    others = {name for names in TARGETS.values() for name in names} - {*TARGETS[task]}
    kinds = KINDS | dict.fromkeys(others, "ignored")
    schema = TableSchema(
        columns=tuple(Column(name=name, kind=kind) for name, kind in kinds.items()),
        task=task,
        targets=TARGETS[task],
        weight="importance",
    )
    source = write_csv(folder / "training.csv", made_columns())
    request = table_request([source], folder / "data", schema, TableOptions(validation=0.0))
    prepare_table(request)
    places = ["--data.path", str(folder / "data"), "--run.dir", str(folder / "run")]
    train_table(load(None, [*TRAINED, *places, *options]), ALONE)
    return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run directory of a classification."""
    return trained_run(tmp_path_factory.mktemp("trained"), "classification")


def predicted(checkpoint, paths, out, **how):
    """Predict in this process."""
    options = PredictOptions(paths=[str(path) for path in paths], out=out, **how)
    return predict_together(ALONE, str(checkpoint), options)


def loaded(checkpoint):
    return load_model(checkpoint, "tables", torch.device("cpu"), Group())


def expected(checkpoint, columns, module=None):
    """The outputs of each member for a table (N, K, outputs), computed in one batch."""
    found = loaded(checkpoint)
    seconds = np.array(columns["day"], "datetime64[s]").astype(np.float64)
    raw = {"size": np.array(columns["size"]), "day": seconds}
    raw["color"] = np.array(columns["color"], object)
    numeric, categorical = features_read_by(found).encode(raw)
    with torch.no_grad():
        outputs = (module or found.module)(
            torch.tensor(numeric).float(), torch.tensor(categorical).long()
        )
    return outputs.double().numpy()


def of_classes(outputs):
    """The probabilities of classes (N, C), the mean over the members."""
    exact = np.exp(outputs)
    return (exact / exact.sum(-1, keepdims=True)).mean(1)


@pytest.mark.ranks(1, 2, 4)
def test_any_number_of_ranks_writes_the_same_bytes(group, together):
    if group.rank == 0:
        checkpoint = trained_run(together, "classification")
        for number in range(5):
            write_csv(together / "in" / f"{number}.csv", made_columns(100, seed=number))
        how = {"columns": ("id", "size", "day"), "batch": 32}
        alone = predicted(checkpoint, [together / "in"], together / "alone.parquet", **how)
    group.barrier()
    options = PredictOptions(
        paths=[str(together / "in")],
        out=together / "out.parquet",
        columns=("id", "size", "day"),
        batch=32,
    )
    made = predict_together(Runtime(group, group), str(together / "run"), options)
    everyone = group.gathered(made)
    assert all(one == made for one in everyone)
    if group.rank == 0:
        assert made == alone
        assert made.rows == 500
        written = (together / "out.parquet").read_bytes()
        assert written == (together / "alone.parquet").read_bytes()
        assert not list(together.glob(".*"))


def test_predictions_and_scores_are_those_of_numpy(trained, tmp_path):
    columns = made_columns(250, seed=1)
    columns["color"][3] = columns["color"][9] = "purple"
    columns["kind"][5] = "of another class"
    given = {name: columns[name] for name in ("kind", "color", "importance", "day", "id", "size")}
    write_csv(tmp_path / "t.csv", given | {"more": columns["q"]})
    words = ["predict", str(trained), "t.csv", "--out", "p.parquet", "--columns", "id,day"]
    done = run(*hpc_train(*words, "--batch", "64", "--scores", "s.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told, line = done.stdout.splitlines()[-2:]
    assert told == (
        "p.parquet: 250 rows predicted, 0 wrong rows left out, 2 cells with unknown categories"
    )
    table = pd.read_parquet(tmp_path / "p.parquet")
    names = ["row", "id", "day", "prediction", *(f"probability_{one}" for one in "012")]
    assert list(table) == names
    assert table["row"].tolist() == list(range(250))
    assert table["id"].tolist() == columns["id"]
    assert table["day"].dt.strftime("%Y-%m-%d").tolist() == columns["day"]
    probabilities = of_classes(expected(trained, columns))
    assert np.allclose(table[names[4:]], probabilities, atol=1e-6)
    assert table["prediction"].tolist() == probabilities.argmax(1).astype(str).tolist()

    unknown = "1 row is not scored, because the model does not know the class: write classes as the"
    assert f"{unknown} table of its training has them, which are '0', '1', '2'" in done.stdout
    kept = np.arange(250) != 5  # the others have a known class
    target = np.array([int(one) for one in np.array(columns["kind"])[kept]])
    weight = np.array(columns["importance"])[kept]
    seen = table[names[4:]].to_numpy()[kept]
    scores = json.loads(line)
    assert scores == json.loads((tmp_path / "s.json").read_text())
    assert scores["scored_rows"] == 249
    right = seen.argmax(1) == target
    assert scores["accuracy"] == pytest.approx((right * weight).sum() / weight.sum())
    own = -np.log(seen[np.arange(249), target])
    assert scores["log_loss"] == pytest.approx((own * weight).sum() / weight.sum())
    areas = []
    for number in range(3):
        inside, score = target == number, seen[:, number]
        above = (score[inside][:, None] > score[~inside]) + (
            score[inside][:, None] == score[~inside]
        ) / 2
        pairs = weight[inside][:, None] * weight[~inside]
        areas.append((above * pairs).sum() / pairs.sum())
    assert scores["auc"] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("multilabel", ()),
        ("regression", ()),
        ("regression", ("--model.quantiles", "[0.1, 0.5]", "--precision.dtype", "float64")),
    ],
)
def test_each_task_has_its_columns(tmp_path, task, options):
    checkpoint = trained_run(tmp_path, task, *options)
    columns = made_columns(90, seed=2)
    source = write_csv(tmp_path / "t.csv", columns)
    made = predicted(checkpoint, [source], tmp_path / "p.csv")
    table = pd.read_csv(tmp_path / "p.csv")
    outputs = expected(checkpoint, columns) if not options else None
    weight = np.array(columns["importance"])
    if task == "multilabel":
        names = ["prediction_p", "prediction_q", "probability_p", "probability_q"]
        assert list(table) == ["row", *names]
        chances = (1 / (1 + np.exp(-outputs))).mean(1)
        assert np.allclose(table[names[2:]], chances, atol=1e-6)
        assert (table[names[:2]].to_numpy() == (chances > 0.5)).all()
        right = [(table[f"prediction_{one}"] == columns[one]) @ weight for one in "pq"]
        assert made.scores["accuracy"] == pytest.approx(np.mean(right) / weight.sum())
    elif not options:
        assert list(table) == ["row", "prediction"]
        target = features_read_by(loaded(checkpoint)).target
        values = outputs[..., 0].mean(1) * target.scale + target.center
        assert np.allclose(table["prediction"], values, rtol=1e-5)
        errors = (table["prediction"] - columns["height"]) ** 2
        assert made.scores["rmse"] == pytest.approx((errors @ weight / weight.sum()) ** 0.5)
    else:
        assert list(table) == ["row", "quantile_0.1", "quantile_0.5"]
        above = columns["height"] - table["quantile_0.1"]
        losses = np.maximum(0.1 * above, -0.9 * above)
        assert made.scores["pinball_0.1"] == pytest.approx(losses @ weight / weight.sum())


def test_a_model_with_adapters_predicts_like_one_with_merged_weights(trained, tmp_path):
    tuning = ["--checkpoint.weights", str(trained), "--finetune.lora", "2"]
    checkpoint = trained_run(tmp_path, "classification", *tuning)
    columns = made_columns(60, seed=4)
    predicted(checkpoint, [write_csv(tmp_path / "t.csv", columns)], tmp_path / "p.parquet")
    found = loaded(checkpoint)
    adapters = LoraAdapters.of(found.about)
    weights = {name: tensor.detach() for name, tensor in found.module.state_dict().items()}
    for layer in adapters.layers:
        a, b = (weights.pop(f"{layer}.{name}") for name in ("lora_a", "lora_b"))
        assert b.abs().max() > 0
        weights[f"{layer}.weight"] = adapters.merged(weights[f"{layer}.weight"], a, b)
    merged = found.shape.build().eval()
    merged.load_state_dict(weights)
    seen = pd.read_parquet(tmp_path / "p.parquet")[[f"probability_{one}" for one in "012"]]
    assert np.allclose(seen, of_classes(expected(checkpoint, columns, merged)), atol=1e-6)
    assert not np.allclose(seen, of_classes(expected(trained, columns)), atol=1e-4)


def test_files_of_all_formats_give_the_same_predictions(trained, tmp_path):
    columns = made_columns(120, seed=3)
    needed = {name: columns[name] for name in ("size", "day", "color")}
    write_csv(tmp_path / "t.csv", needed)
    frame = pd.DataFrame(needed | {"day": np.array(columns["day"], "datetime64[us]")})
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=50)
    np.savez(tmp_path / "t.npz", **{name: np.array(values) for name, values in needed.items()})
    found = []
    for kind in ("csv", "parquet", "npz"):
        made = predicted(trained, [tmp_path / f"t.{kind}"], tmp_path / f"{kind}.parquet")
        assert made.scores is None
        found.append(pyarrow.parquet.read_table(tmp_path / f"{kind}.parquet"))
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])
    predicted(trained, [tmp_path / "t.csv"], tmp_path / "p.csv")
    with (tmp_path / "p.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["probability_1"]) for row in rows] == found[0]["probability_1"].to_pylist()


def test_copies_of_numbers_keep_all_their_digits(trained, tmp_path):
    columns = made_columns(3)
    columns["size"] = ["1797000000000000001", "", "9007199254740993.0"]
    columns["importance"] = ["18446744073709551615", "0.1", "2"]  # no number type has all of these
    columns["height"] = ["true", "false", "0.25"]
    source = write_csv(tmp_path / "t.csv", {name: columns[name] for name in KINDS})
    chosen = trained_run(tmp_path, "regression")
    predicted(chosen, [source], tmp_path / "p.csv", columns=("size", "importance", "height"))
    with (tmp_path / "p.csv").open() as file:
        rows = [
            [row[name] for name in ("size", "importance", "height")] for row in csv.DictReader(file)
        ]
    assert rows == [
        ["1797000000000000001", "18446744073709551615", "1"],
        ["", "0.1", "0"],
        ["9007199254740993", "2", "0.25"],
    ]


def test_wrong_rows_end_it_or_are_left_out(trained, tmp_path):
    columns = made_columns(50)
    columns["size"][20] = "large"
    columns["day"][30] = ""
    source = write_csv(tmp_path / "t.csv", columns)
    with pytest.raises(DataError, match=r"t\.csv, line 22: column 'size': 'large' is no number"):
        predicted(trained, [source], tmp_path / "p.parquet")
    assert not list(tmp_path.glob("*p.parquet*"))
    numbered = write_csv(tmp_path / "n.csv", columns | {"day": [1] * 50})
    with pytest.raises(
        DataError, match="give values of the kind that .* had in training, or leave"
    ):
        predicted(trained, [numbered], tmp_path / "p.parquet")
    how = {"wrong": "count", "score": False, "columns": ("size",)}
    made = predicted(trained, [source], tmp_path / "p.parquet", **how)
    assert (made.rows, made.wrong, made.scores) == (49, 1, None)
    table = pd.read_parquet(tmp_path / "p.parquet")
    kept = [*range(20), *range(21, 50)]
    assert table["row"].tolist() == kept
    assert table["size"].tolist() == [columns["size"][row] for row in kept]


def test_predictions_that_were_stopped_continue(trained, tmp_path, monkeypatch):
    for number in range(3):
        write_csv(tmp_path / "in" / f"{number}.csv", made_columns(40, seed=number))
    predicted(trained, [tmp_path / "in"], tmp_path / "whole.parquet")

    def ends(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("hpc_train.training.predicted_rows._writer", ends)
        predicted(trained, [tmp_path / "in"], tmp_path / "p.parquet")
    assert not (tmp_path / "p.parquet").exists()
    monkeypatch.setattr("hpc_train.training.predict.read_rows", ends)  # no part is made again
    predicted(trained, [tmp_path / "in"], tmp_path / "p.parquet")
    assert (tmp_path / "p.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not list(tmp_path.glob(".*"))
    (tmp_path / ".p.parquet.partial" / "key").mkdir(parents=True)  # as after a kill at the end
    with pytest.raises(DataError, match="exists already"):
        predicted(trained, [tmp_path / "in"], tmp_path / "p.parquet")
    assert not list(tmp_path.glob(".*"))


def test_a_kill_before_the_result_has_its_name_leaves_scores_that_are_taken(
    trained, tmp_path, monkeypatch
):
    source = write_csv(tmp_path / "t.csv", made_columns(40))
    out, scores = tmp_path / "p.csv", tmp_path / "s.json"
    rename = files.rename

    def ends(one, other):
        if other == out:
            raise KeyboardInterrupt
        rename(one, other)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("hpc_train.files.rename", ends)
        predicted(trained, [source], out, scores=scores)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(DataError, match="mine exists already: give another --scores"):
        predicted(trained, [source], out, scores=tmp_path / "mine")
    assert (scores.exists(), out.exists()) == (True, False)
    made = predicted(trained, [source], out, scores=scores)
    assert json.loads(scores.read_text()) == made.scores
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "p.csv", "s.json", "t.csv"]


def test_mistakes_end_with_one_line(trained, tmp_path):
    write_csv(tmp_path / "t.csv", {"color": ["red"], "id": ["a"]})
    words = [str(trained), "t.csv", "--out", "p.parquet"]
    done = run(*hpc_train("predict", *words), cwd=tmp_path)
    assert done.returncode == 2
    assert only_line(done.stderr) == (
        "t.csv has no columns 'size', 'day', which the model reads: its columns are color, id"
    )
    done = run(*hpc_train("generate", str(trained)))
    assert done.returncode == 2
    assert "does not hold a language model: model.kind is tabular_mlp" in only_line(done.stderr)


def test_names_of_columns_are_quoted_as_in_csv():
    assert column_names('id,"a, b","c\nd"') == ("id", "a, b", "c\nd")
    assert column_names("") == ()
    with pytest.raises(ConfigError, match="names 'a' twice"):
        column_names("a,b,a")
    for wrong in ("a\nb", 'id,"a'):
        with pytest.raises(ConfigError, match=r"--columns .* cannot be read .*: quote a name"):
            column_names(wrong)


def test_the_run_directory_of_an_estimator_is_a_run(tmp_path):
    columns = made_columns(60)
    known = pd.DataFrame({name: columns[name] for name in ("size", "color")})
    how = {"steps": 3, "patience": 0, "quantiles": (0.1, 0.5), "run_dir": tmp_path / "run"}
    made = Regressor(**how).fit(known, columns["height"])
    source = write_csv(tmp_path / "t.csv", columns)
    predicted(tmp_path / "run", [source], tmp_path / "p.csv")
    found = pd.read_csv(tmp_path / "p.csv")[["quantile_0.1", "quantile_0.5"]]
    np.testing.assert_allclose(found, made.predict_quantiles(known), rtol=1e-4)


def test_predictions_that_are_not_finite_are_told(tmp_path, caplog):
    random = np.random.default_rng(0)
    table = pd.DataFrame({"a": random.normal(size=60), "b": random.normal(size=60)})
    how = {"steps": 2, "config": {"model.hidden": 8, "model.numeric": "linear"}}
    made = Regressor("resnet", **how, run_dir=tmp_path / "run").fit(table, table["a"])
    table.loc[[3, 7], "a"] = 1e300, -1e308
    write_csv(tmp_path / "new.csv", table.to_dict("list"))
    with caplog.at_level("WARNING", "hpc_train"):
        made.predict(table[:3])
        assert "not finite" not in caplog.text
        made.predict(table)
        predicted(tmp_path / "run", [tmp_path / "new.csv"], tmp_path / "p.csv")
    assert caplog.text.count("the predictions of 2 rows are not finite") == 2


@pytest.mark.parametrize("name", ["alone.safetensors", "alone.pt"])
def test_exported_weights_are_told_from_a_checkpoint(trained, tmp_path, name):
    export_model(newest(trained), tmp_path / name)
    with pytest.raises(CheckpointMismatch) as caught:
        predicted(tmp_path / name, ["t.csv"], tmp_path / "p.csv")
    assert "no checkpoint of hpc_train" in caught.value.cause
    assert "give the checkpoint that `hpc-train checkpoint export` made it of" in str(caught.value)


def test_options_that_do_not_fit_are_refused(trained, tmp_path):
    columns = made_columns(10)
    known = {name: columns[name] for name in ("size", "day", "color")}
    source = write_csv(tmp_path / "t.csv", known | {"prediction": columns["id"]})
    (tmp_path / "there.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    out = tmp_path / "p.csv"
    for error, message, how in (
        (ConfigError, "--out is .*p.json", {"out": tmp_path / "p.json"}),
        (DataError, "there.csv exists already", {"out": tmp_path / "there.csv"}),
        (DataError, "folder.csv is a folder", {"out": tmp_path / "folder.csv"}),
        (ConfigError, "--columns names 'prediction'", {"columns": ("prediction",)}),
        (DataError, "no columns 'b', 'c', to copy", {"columns": ("b", "c")}),
        (DataError, "no scores to write, as it has no column 'kind'", {"scores": tmp_path / "s"}),
        (ConfigError, "--out and --scores are both .*p.csv: give two files", {"scores": out}),
        (ConfigError, "--scores and --no_scores", {"scores": tmp_path / "s", "score": False}),
    ):
        with pytest.raises(error, match=message):
            predicted(trained, [source], **{"out": out, **how})
    assert not out.exists()


def test_other_checkpoints_are_refused(tmp_path):
    source = write_csv(tmp_path / "t.csv", made_columns(10))
    with pytest.raises(CheckpointMismatch, match=r"t.csv is a text, and no checkpoint"):
        predicted(source, [source], tmp_path / "p.csv")
    state = json.dumps({"about": {"kind": "gpt"}, "identity": {}}).encode()
    gpt = tmp_path / "step-000000001.safetensors"
    save_tensors(gpt, {"model.weight": LocalTensor.whole(torch.ones(3))}, state, Group())
    with pytest.raises(CheckpointMismatch, match="not hold a model of tables: model.kind is gpt"):
        predicted(gpt, ["t.csv"], tmp_path / "p.csv")
    pretrained = trained_run(tmp_path, "regression", "--model.pretraining", "masked_cells")
    with pytest.raises(CheckpointMismatch, match="is only pretrained, by model.pretraining masked"):
        predicted(pretrained, ["t.csv"], tmp_path / "p.csv")
