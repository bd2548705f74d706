from __future__ import annotations

import functools
import re

import h5py
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hpc_train.data.check import check_shards
from hpc_train.data.prepare.dealing import Dealing
from hpc_train.data.prepare.partial import held_partial
from hpc_train.data.tables import stage_rows, statistics
from hpc_train.data.tables.fixed import FeatureOptions
from hpc_train.data.tables.prepare_table import STAGES, prepare_table, work_on
from hpc_train.data.tables.schema import parse_schema
from hpc_train.data.tables.table_manifest import read_table_manifest
from hpc_train.data.tables.table_request import TableOptions, table_request
from hpc_train.errors import DataError
from tests.data.prepared import (
    held_out,
    made_table,
    prepared,
    request_of,
    seen,
    write_csv,
    write_parts,
)

ROWS = 500
THIRD = TableOptions(validation=0.3)


def rows_of(out, split):
    manifest = read_table_manifest(out)
    parts = []
    for shard in manifest.splits.get(split, ()):
        with h5py.File(out / shard.name) as file:
            parts.append(file["rows"][:])
    return np.concatenate(parts)


def feature(manifest, name):
    every = (*manifest.features.numeric, *manifest.features.categorical)
    return next(one for one in every if one.name == name)


def numbers_of(values):
    return np.array([float("nan") if one == "" else float(one) for one in values])


def test_features_are_those_of_the_training_rows(tmp_path):
    table = made_table(ROWS)
    path = write_csv(tmp_path / "a.csv", table)
    made = prepared(path, tmp_path / "out", options=THIRD)
    out = held_out("a.csv", ROWS, 0.3)
    assert made.rows("train") == (~out).sum()
    assert made.rows("validation") == out.sum()
    number = numbers_of(table["number"])[~out]
    known = number[~np.isnan(number)]
    found = feature(made, "number")
    assert found.center == pytest.approx(known.mean(), rel=1e-12)
    assert found.scale == pytest.approx(known.std(), rel=1e-12)
    levels = np.quantile(known, np.linspace(0, 1, 49))
    np.testing.assert_allclose(found.edges, (levels - known.mean()) / known.std(), rtol=1e-5)
    stored = rows_of(out=tmp_path / "out", split="train")
    place = [one.name for one in made.features.numeric].index("number")
    wanted = (number - known.mean()) / known.std()
    np.testing.assert_allclose(stored["numeric"][:, place], wanted, rtol=1e-5, atol=1e-6)
    words = np.array(table["word"])[~out]
    of_word = feature(made, "word")
    counts = [int((words == one).sum()) for one in of_word.categories]
    assert counts == sorted(counts, reverse=True)
    assert of_word.shares == pytest.approx(
        [0.0, *(np.array([(words == "").sum(), *counts]) / len(words))]
    )
    labels = np.array(table["label"])[~out]
    assert made.features.target.classes == ("no", "perhaps", "yes")
    assert [
        made.features.target.classes[code] for code in stored["target"][:, 0]
    ] == labels.tolist()
    assert (stored["weight"] == 1).all()
    assert {"day.days", "day.month", "day.weekday"} < {one.name for one in made.features.numeric}
    assert "day.hour" not in {one.name for one in made.features.numeric}  # dates without a time
    check_shards(tmp_path / "out", made)


def test_a_column_named_like_a_part_of_a_date_takes_no_feature_away(tmp_path):
    table = made_table(100)
    table |= {"day.month": table["value"], "day.weekday": table["word"]}
    made = prepared(write_csv(tmp_path / "a.csv", table), tmp_path / "out")
    parts = {one.name: one.part for one in made.features.numeric if one.column == "day"}
    assert parts == {"day.days": "days", "day.month_": "month", "day.weekday_": "weekday"}
    assert feature(made, "day.month").column == "day.month"
    assert feature(made, "day.weekday").categories


def test_robust_scaling_takes_the_median_and_the_quartiles(tmp_path):
    table = made_table(ROWS)
    table["number"][5] = 1e6
    table["count"][5] = 1e200
    options = TableOptions(validation=0, features=FeatureOptions(scaling="robust", bins=4))
    made = prepared(write_csv(tmp_path / "a.csv", table), tmp_path / "out", options=options)
    number = numbers_of(table["number"])
    low, middle, high = np.nanquantile(number, [0.25, 0.5, 0.75])
    found = feature(made, "number")
    assert (found.center, found.scale) == pytest.approx((middle, high - low), rel=1e-12)
    assert len(found.edges) == 5
    assert found.edges[-1] == pytest.approx((1e6 - middle) / (high - low), rel=1e-6)
    assert np.isfinite(feature(made, "count").edges).all()


@pytest.mark.parametrize("fill", [1e20, 1e200])
@pytest.mark.parametrize("scaling", ["standard", "robust"])
def test_codes_of_missing_values_hide_no_others_and_are_told(tmp_path, caplog, scaling, fill):
    table = made_table(ROWS)
    table["value"][:5] = [fill] * 5
    table["value"][5:] = np.random.default_rng(0).normal(size=ROWS - 5).tolist()
    options = TableOptions(validation=0, features=FeatureOptions(scaling=scaling))
    made = prepared(write_csv(tmp_path / "a.csv", table), tmp_path / "out", options=options)
    assert len(feature(made, "value").edges) > 40
    written = rows_of(tmp_path / "out", "train")["numeric"]
    assert np.isfinite(written[~np.isnan(written)]).all()
    told = f"column 'value': its value {fill!r} is far from most others"
    assert caplog.text.count(told) == (scaling == "standard")


@settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
)
@given(seed=st.integers(0, 1000), role=st.sampled_from([{}, {"group": "who"}, {"time": "when"}]))
def test_held_out_rows_decide_nothing(tmp_path_factory, seed, role):
    tmp_path = tmp_path_factory.mktemp("leak")
    table = made_table(200, seed)
    path = write_csv(tmp_path / "a.csv", table)
    schema = request_of(path, tmp_path / "one", **role).schema
    first = prepare_table(table_request([path], tmp_path / "one", schema, THIRD))
    if role == {}:
        out = held_out("a.csv", 200, 0.3)
    elif "time" in role:
        when = np.array(table["when"])
        out = when >= np.sort(when)[-first.rows("validation")]
    else:
        who = np.array(table["who"])
        out = np.isin(who, sorted({*table["who"]})) & ~np.isin(who, kept_groups(tmp_path, table))
    assert out.sum() == first.rows("validation")
    random = np.random.default_rng(seed)
    for place in np.flatnonzero(out).tolist():
        table["number"][place] = float(random.normal(0, 1e6))
        table["count"][place] = int(random.integers(1000))
        table["word"][place] = "purple"
        table["day"][place] = "1999-01-01T10:00:00"
        table["label"][place] = "never"
    write_csv(path, table)
    again = prepare_table(table_request([path], tmp_path / "two", schema, THIRD))
    assert again.features == first.features
    one, two = (rows_of(tmp_path / name, "train").tobytes() for name in ("one", "two"))
    assert one == two
    assert again.rows("validation") == 0  # no training row has their class
    assert again.left_out == {"class": out.sum()}


def kept_groups(tmp_path, table):
    """The groups of the training rows, found by a table whose only feature is the group."""
    only = {"who": table["who"], "name": table["who"], "label": table["label"]}
    path = write_csv(tmp_path / "groups.csv", only)
    made = prepared(path, tmp_path / "groups", group="who", options=THIRD)
    return feature(made, "name").categories


def test_groups_stay_together(tmp_path):
    table = made_table(ROWS)
    table["name"] = table["who"]
    path = write_csv(tmp_path / "a.csv", table)
    made = prepared(path, tmp_path / "out", group="who", options=THIRD)
    place = [one.name for one in made.features.categorical].index("name")
    groups = feature(made, "name").categories
    assert 0 < len(groups) < 30
    rows = sum(who in groups for who in table["who"])
    assert made.rows("train") == rows
    assert made.rows("validation") == ROWS - rows
    # No feature knows a group that is held out.
    assert (rows_of(tmp_path / "out", "validation")["categorical"][:, place] == 0).all()


def test_the_latest_rows_are_held_out(tmp_path):
    table = made_table(ROWS)
    table["copy"] = table["when"]
    path = write_csv(tmp_path / "a.csv", table)
    made = prepared(path, tmp_path / "out", time="when", options=THIRD)
    assert made.rows("validation") == 0.3 * ROWS
    place = [one.name for one in made.features.numeric].index("copy")
    of = made.features.numeric[place]
    found = [
        rows_of(tmp_path / "out", split)["numeric"][:, place] * of.scale + of.center
        for split in ("train", "validation")
    ]
    assert found[0].max() < found[1].min()


def test_rows_without_a_role_are_left_out(tmp_path):
    table = made_table(100)
    for name, place in (("label", 3), ("who", 3), ("who", 4), ("value", 5)):
        table[name][place] = ""
    path = write_csv(tmp_path / "a.csv", table)
    table["value"] = [abs(one) if one != "" else "" for one in table["value"]]
    write_csv(path, table)
    made = prepared(path, tmp_path / "out", group="who", weight="value")
    assert made.left_out == {"target": 1, "group": 1, "weight": 1}
    assert made.rows("train") + made.rows("validation") == 97
    assert rows_of(tmp_path / "out", "train")["weight"].mean() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "role", "why"),
    [
        ({"label": [f"l{n}" for n in range(60)]}, {}, "all 6 rows for it have classes that no"),
        ({"who": ["b", "d"] * 30}, {"group": "who"}, "all groups are in training"),
        ({"when": [1] * 60}, {"time": "when"}, "too many rows have the latest time"),
        ({}, {"options": TableOptions(validation=1e-9)}, "the rows are few; give more --valid"),
        ({}, {"options": TableOptions(validation=0)}, ""),
    ],
)
def test_where_nothing_is_held_out_a_warning_says_why(tmp_path, caplog, change, role, why):
    path = write_csv(tmp_path / "a.csv", made_table(60) | change)
    made = prepared(path, tmp_path / "out", **role)
    assert made.rows("validation") == 0
    told = [one for one in caplog.messages if "nothing is held out" in one]
    assert len(told) == bool(why)
    assert all(f"nothing is held out for validation: {why}" in one for one in told)
    of_class = 60 - made.rows("train") if "label" in change else 0
    assert made.left_out == ({"class": of_class} if of_class else {})


def test_a_schema_edited_by_hand_decides(tmp_path):
    table = made_table(ROWS)
    path = write_csv(tmp_path / "a.csv", table)
    text = request_of(path, tmp_path / "out").schema.to_yaml()
    text = text.replace("count: numeric", "count: categorical").replace("day: date", "day: ignored")
    schema = parse_schema(text)
    made = prepare_table(table_request([path], tmp_path / "out", schema))
    assert read_table_manifest(tmp_path / "out").schema == schema
    assert {one.name for one in made.features.categorical} == {"word", "who", "count"}
    assert not any(one.column == "day" for one in made.features.numeric)


def test_names_in_a_schema_are_texts_and_each_is_there_once():
    for columns, cause in {
        "{x: numeric, y: date, x: ignored}": "has the column 'x' twice",
        "{x: numeric, no: date}": "name YAML reads as False: write its name in quotes",
    }.items():
        with pytest.raises(DataError, match=cause):
            parse_schema(f"{{columns: {columns}, task: none}}")
    assert parse_schema("{columns: {1: numeric}, task: none}").kind("1") == "numeric"


def test_a_schema_without_missing_texts_has_those_of_the_files():
    text = "{columns: {x: numeric}, task: none"
    assert parse_schema(f"{text}}}", [""]).missing == ("",)
    assert parse_schema(f"{text}, missing: ['?']}}", [""]).missing == ("?",)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("task: none\ntask: regression", "the schema has the key 'task' twice: remove one"),
        ("missing: ['', 0000-00-00]", "the schema is not YAML: year 0 is out of range: mend"),
        ("missing: !!bool x", "the schema is not YAML: 'x': mend"),
        (f"missing: {'[' * 3000}", "the schema is not YAML: maximum recursion depth"),
    ],
)
def test_a_schema_that_cannot_be_read_is_one_line(text, cause):
    with pytest.raises(DataError, match=re.escape(cause)):
        parse_schema(f"columns: {{x: numeric}}\n{text}")


def test_the_most_frequent_categories_get_codes_and_the_others_are_unknown(tmp_path):
    columns = {
        "number": [0, 1] * 8,
        "word": ["b"] * 5 + ["a"] * 5 + ["c"] * 4 + ["d"] * 2,
        "label": ["yes", "no"] * 8,
    }
    options = TableOptions(validation=0, features=FeatureOptions(max_categories=3))
    made = prepared(write_csv(tmp_path / "a.csv", columns), tmp_path / "out", options=options)
    of = feature(made, "word")
    assert of.categories == ("a", "b", "c")
    assert of.shares == (2 / 16, 0.0, 5 / 16, 5 / 16, 4 / 16)
    codes = rows_of(tmp_path / "out", "train")["categorical"][:, 0]
    assert codes.tolist() == [3] * 5 + [2] * 5 + [4] * 4 + [0] * 2


@pytest.mark.parametrize(
    ("task", "targets"), [("regression", ["value"]), ("multilabel", ["p", "q"]), ("none", [])]
)
def test_targets_of_other_tasks(tmp_path, task, targets):
    table = made_table(ROWS)
    random = np.random.default_rng(0)
    table |= {name: random.integers(0, 2, ROWS).tolist() for name in ("p", "q")}
    path = write_csv(tmp_path / "a.csv", table)
    options = TableOptions(validation=0)
    made = prepared(path, tmp_path / "out", targets=targets, task=task, options=options)
    rows, of = rows_of(tmp_path / "out", "train"), made.features.target
    if task == "none":
        assert of is None
        assert rows.dtype.names == ("numeric", "categorical", "weight")
    elif task == "regression":
        value = np.array(table["value"])
        assert (of.center, of.scale) == pytest.approx((value.mean(), value.std()), rel=1e-12)
        found = rows["target"][:, 0] * of.scale + of.center
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)
    else:
        assert rows["target"].tolist() == [*map(list, zip(table["p"], table["q"], strict=True))]
        assert of.shares == pytest.approx([np.mean(table["p"]), np.mean(table["q"])])


class Stopped(Exception):
    pass


def test_what_is_stopped_in_any_stage_continues(tmp_path):
    folder = write_parts(tmp_path / "in", made_table(ROWS), 6)
    options = TableOptions(shard_mb=0.005)
    whole = prepared(folder, tmp_path / "whole", options=options)
    assert len(whole.splits["train"]) > 3
    request = request_of(folder, tmp_path / "out", options=options)
    for stage in range(1, len(STAGES)):
        left = 2

        def stop(make, *arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped
            make(*arguments)

        with pytest.raises(Stopped), held_partial(request.target, request.key) as work:
            for number, (begin, make) in enumerate(STAGES[: stage + 1]):
                preparation = begin(request, work)
                if number == stage:
                    assert len(preparation.finished) == 0
                    make = functools.partial(stop, make)
                work_on(Dealing(preparation), make)
    assert not (tmp_path / "out").exists()
    prepare_table(request)
    assert seen(tmp_path / "out") == seen(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "whole", "out"}


def test_portions_of_a_file_are_its_rows_each_once(tmp_path, monkeypatch):
    table = made_table(ROWS)
    table["word"] = [f"two\nlines {n % 7}" for n in range(ROWS)]
    path = write_csv(tmp_path / "a.csv", table)
    options = TableOptions(validation=0)
    whole = prepared(path, tmp_path / "whole", options=options)
    cut = functools.partial(stage_rows.cut_tables, nbytes=1 << 12)
    monkeypatch.setattr(stage_rows, "cut_tables", cut)
    made = prepared(path, tmp_path / "cut", options=options)
    assert made.features.categorical == whole.features.categorical
    for one, other in zip(made.features.numeric, whole.features.numeric, strict=True):
        assert (one.center, one.scale) == pytest.approx((other.center, other.scale), rel=1e-12)
    found, wanted = (rows_of(tmp_path / name, "train") for name in ("cut", "whole"))
    assert (found["categorical"] == wanted["categorical"]).all()
    assert (found["target"] == wanted["target"]).all()


def test_a_lost_file_of_a_stage_is_made_again(tmp_path):
    folder = write_parts(tmp_path / "in", made_table(ROWS), 4)
    request = request_of(folder, tmp_path / "out")
    with held_partial(request.target, request.key) as work:
        for begin, make in STAGES[:2]:
            preparation = begin(request, work)
            work_on(Dealing(preparation), make)
    [lost] = work.glob("rows/shards/rows-00002.rows")
    lost.write_bytes(lost.read_bytes()[:-1])
    prepare_table(request)
    prepared(folder, tmp_path / "whole")
    assert seen(tmp_path / "out") == seen(tmp_path / "whole")


def test_classes_that_are_written_in_several_ways_are_told(tmp_path, caplog):
    label = ["True", "true", "1", "1.0", "one", "two"] * 20
    prepared(write_csv(tmp_path / "a.csv", made_table(120) | {"label": label}), tmp_path / "out")
    told = "the target label has classes that differ only in how they are written: "
    assert f"{told}'1' and '1.0'; 'True' and 'true'; if they are the same" in caplog.text


@pytest.mark.parametrize(
    ("change", "roles", "message"),
    [
        ({"label": ["one"] * 60}, {}, "all training rows have the target label = one"),
        (
            {"label": ["", *["yes"] * 59], "who": ["a", *[""] * 59]},
            {"group": "who"},
            "no row is left to train on; not taken are 1 (no target), 59 (no group)",
        ),
        (
            {"value": [1.0] * 7 + [-1.0] * 53},
            {"weight": "value"},
            "a.csv, line 9: value is -1, a weight below 0",
        ),
        ({"value": [0.0] * 60}, {"weight": "value"}, "the weights of all training rows are 0"),
        ({"label": [f"l{n}" for n in range(60)]}, {"limit": 50}, "has more than 50 classes"),
        ({"p": [0, 2] * 30}, {"targets": ["p"], "task": "multilabel"}, "p is 2, not 0 or 1"),
        (
            {"p": [0] * 9 + [3] * 51, "q": [0, 0, 7] + [0] * 57},
            {"targets": ["p", "q"], "task": "multilabel"},
            "a.csv, line 4: q is 7, not 0 or 1",
        ),
        (
            {"value": [*range(50), *[-1.0] * 9, 1e300]},
            {"targets": ["value"]},
            "value are so large, up to 1e+300, that",
        ),
        ({}, {"task": "regression"}, "label"),
        ({}, {"time": "word"}, "time"),
        ({}, {"time": "when", "group": "who"}, "a group and a time"),
        ({}, {"group": "label"}, "column 'label' has two roles"),
    ],
)
def test_what_cannot_be_learned_is_one_clear_error(tmp_path, monkeypatch, change, roles, message):
    roles = dict(roles)
    monkeypatch.setattr(statistics, "CLASS_LIMIT", roles.pop("limit", 1 << 12))
    path = write_csv(tmp_path / "a.csv", made_table(60) | change)
    with pytest.raises(DataError) as caught:
        prepared(path, tmp_path / "out", **roles)
    assert message in caught.value.cause
    assert not (tmp_path / "out").exists()


def test_wrong_weights_and_labels_are_counted(tmp_path):
    table = made_table(100)
    table["value"] = [-1.0 if n % 10 == 0 else 1.0 for n in range(100)]
    path = write_csv(tmp_path / "a.csv", table)
    options = TableOptions(wrong="count")
    made = prepared(path, tmp_path / "out", weight="value", options=options)
    assert made.wrong == 10
    assert made.rows("train") + made.rows("validation") == 90
    table["value"] = ["?", *[-1.0] * 99]
    write_csv(path, table)
    kinds = request_of(path, tmp_path / "none", options=options, weight="value")
    with pytest.raises(DataError, match=r"; not taken are 99 \(a wrong .*, 1 \(a value is no num"):
        prepare_table(kinds)


def test_the_size_of_shards_changes_no_split(tmp_path):
    path = write_csv(tmp_path / "a.csv", made_table(ROWS))
    few = prepared(path, tmp_path / "few")
    many = prepared(path, tmp_path / "many", options=TableOptions(shard_mb=0.003))
    assert len(many.splits["train"]) > len(few.splits["train"]) == 1
    assert many.features == few.features
    for split in ("train", "validation"):
        few_rows, many_rows = (rows_of(tmp_path / name, split) for name in ("few", "many"))
        assert few_rows.tobytes() == many_rows.tobytes()
