from __future__ import annotations

import io
import json

import numpy as np
import pytest

from hpc_train.data.tables import statistics
from hpc_train.data.tables.features import Categories, NumericFeature
from hpc_train.data.tables.fixed import FeatureOptions, candidate_features, fix_features
from hpc_train.data.tables.row_files import write_array, write_texts
from hpc_train.data.tables.schema import parse_schema
from hpc_train.data.tables.splits import RowSplit
from hpc_train.data.tables.statistics import (
    PortionStatistics,
    add_counts,
    only_largest,
    ranked,
    sampled_share,
    summaries_of,
)

SCHEMA = parse_schema("{columns: {x: numeric, word: categorical}, task: none}")


class Kept(io.BytesIO):
    def close(self):
        pass


def fitted(portions, **options):
    """The features of portions, each the values of x and the codes and texts of word."""
    total = sum(len(x) for x, _ in portions)
    trees, files = [], []
    for key, (x, word) in enumerate(portions):
        candidates = [NumericFeature(name="x", column="x")]
        found = PortionStatistics(SCHEMA, RowSplit(SCHEMA, 0.0), candidates, sampled_share(total))
        found.add(key, np.arange(len(x)), {"x": x, "word": word})
        files.append(Kept())
        trees.append(found.write(files[-1]))
    opened = files.__getitem__
    summaries = summaries_of(trees, opened)
    return fix_features(SCHEMA, FeatureOptions(**options), trees, opened, summaries)


def test_what_rank_0_keeps_of_a_portion_does_not_grow_with_the_columns():
    def kept(count):
        names = [f"{kind} {n}" for n in range(count) for kind in ("numeric", "categorical")]
        columns = {name: name.partition(" ")[0] for name in names}
        schema = parse_schema(json.dumps({"columns": columns, "task": "none"}))
        found = PortionStatistics(schema, RowSplit(schema, 0.0), candidate_features(schema), 1.0)
        word = Categories(np.zeros(9, np.int32), ("a",))
        values = {
            name: word if kind == "categorical" else np.ones(9) for name, kind in columns.items()
        }
        found.add(0, np.arange(9), values)
        return json.dumps(found.write(io.BytesIO()))

    assert len(kept(100)) < len(kept(1)) + 20  # digits of places


def test_quantiles_of_many_rows_are_as_near_as_is_said():
    random = np.random.default_rng(0)
    portions = [
        (random.lognormal(n / 4, 1, 100_000), Categories(np.zeros(100_000, np.int32), ("a",)))
        for n in range(3)
    ]
    [made] = fitted(portions, bins=50).numeric
    every = np.sort(np.concatenate([x for x, _ in portions]))
    assert made.center == pytest.approx(every.mean(), rel=1e-12)
    assert made.scale == pytest.approx(every.std(), rel=1e-12)
    edges = np.array(made.edges) * made.scale + made.center
    below = np.searchsorted(every, edges) / len(every)
    assert np.abs(below - np.linspace(0, 1, 51)).max() < 0.01
    np.testing.assert_allclose(edges[[0, -1]], every[[0, -1]], rtol=1e-5)


def test_equal_and_missing_values_give_rising_edges():
    nan = np.nan
    same = Categories(np.array([0, 0, 1, -1], np.int32), ("a", "b"))
    [made] = fitted([(np.array([1.0, 1.0, 1.0, 2.0]), same)]).numeric
    assert len(made.edges) == len({*made.edges}) >= 2
    [made] = fitted([(np.array([5.0, 5.0, nan, np.inf]), same)]).numeric
    assert (made.center, made.edges) == (5.0, (-1.0, 1.0))
    assert fitted([(np.array([5.0, 5.0, 5.0, 5.0]), same)]).numeric == ()


@pytest.mark.parametrize("unit", [1e-170, 5e-324])
@pytest.mark.parametrize("scaling", ["standard", "robust"])
def test_numbers_whose_squares_are_0_are_a_feature(unit, scaling):
    word = Categories(np.zeros(4, np.int32), ("a",))
    x = np.array([0.0, 1.0, 2.0, 4.0]) * unit
    [made] = fitted([(x, word)], scaling=scaling).numeric
    scaled = made.values({"x": x})
    assert np.ptp(scaled) >= 1
    assert len(made.edges) > 2


def test_counts_of_many_texts_are_as_near_as_is_said(monkeypatch):
    monkeypatch.setattr(statistics, "COUNTED_TEXTS", 50)
    random = np.random.default_rng(0)
    true, counts, total = {}, {}, 0
    for _ in range(20):
        texts = [str(n) for n in random.zipf(1.4, 2000) % 1000]
        own = {text: texts.count(text) for text in {*texts}}
        for text, number in own.items():
            true[text] = true.get(text, 0) + number
        total += len(texts)
        own = only_largest(own, 50)
        file = io.BytesIO()
        write_texts(file, [*own])
        write_array(file, np.array([*own.values()]))
        counts = add_counts(counts, file, 0)
    assert len(counts) <= 50
    errors = [true[text] - counts.get(text, 0) for text in true]
    assert min(errors) >= 0
    assert max(errors) <= total / 51
    assert ranked(counts, 3) == ranked(true, 3)


def test_equal_counts_are_ranked_by_value():
    assert ranked({"b": 2, "a": 2, "c": 3}) == ["c", "a", "b"]
