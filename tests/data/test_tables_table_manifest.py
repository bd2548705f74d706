from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpc_train.data.manifest import FILE_NAME, hash_of_manifest, read_manifest
from hpc_train.data.prepare.work import prepare_text
from hpc_train.data.tables.table_manifest import (
    parse_table_manifest,
    read_any_manifest,
    read_table_manifest,
)
from hpc_train.errors import DataError
from tests.data.prepared import made_table, prepared, write_csv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    prepared(write_csv(folder / "a.csv", made_table(200)), folder / "out")
    return folder / "out"


def test_a_manifest_is_read_back(folder):
    made = read_table_manifest(folder)
    assert parse_table_manifest(json.loads(made.to_json())) == made
    assert read_any_manifest(folder) == made
    older = replace(made, left_out=7)  # it had the sum of all reasons
    assert parse_table_manifest(json.loads(older.to_json())) == older


def leaves(tree, path=()):
    """The places of all values in a tree of JSON."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


WRONG = (None, True, -1, 1 << 70, 1.5, float("nan"), float("inf"), "x\0", [], {}, [[]], ["a", "a"])


def test_wrong_values_are_refused_even_with_their_hash(folder):
    text = (folder / FILE_NAME).read_text()
    tree = json.loads(text)
    for one in tree["features"]["numeric"]:
        one["edges"] = one["edges"][:3]
    for path in [*leaves(tree)]:
        for value in WRONG if path else ():
            changed = json.loads(json.dumps(tree))
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            changed["hash"] = hash_of_manifest(changed)
            try:
                made = parse_table_manifest(changed)
            except ValueError:
                continue
            assert json.loads(made.to_json()) == changed  # another sound table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["features"]["numeric"][0].update(scale=0.0), "its scale is 0.0"),
        (lambda tree: tree["features"]["numeric"][0].update(edges=[1.0, 1.0]), "edges do not rise"),
        (lambda tree: tree["features"]["numeric"][0].update(column="no"), "of no numeric column"),
        (lambda tree: tree["features"]["categorical"][0]["shares"].pop(), "one share for each"),
        (lambda tree: tree["features"].update(target=None), "another target than its schema"),
        (lambda tree: tree["features"]["numeric"].pop(), "end behind the end|hash"),
        (lambda tree: tree["splits"]["train"][0].update(rows=0), "rows is 0"),
        (lambda tree: tree["schema"]["columns"].update(word="noun"), "kind 'noun'"),
        (lambda tree: tree["left_out"].update(more=1), "left_out has the unknown key 'more'"),
        (lambda tree: tree["left_out"].update(group=-1), "left_out is -1"),
        (lambda tree: tree.update(more=1), "unknown key 'more'"),
        (lambda tree: tree.update(format="hpc_train.table/9"), "format is 'hpc_train.table/9'"),
    ],
)
def test_what_is_wrong_is_named(folder, tmp_path, change, message):
    tree = json.loads((folder / FILE_NAME).read_text())
    change(tree)
    (tmp_path / FILE_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError, match=f"is damaged .*({message})"):
        read_table_manifest(tmp_path)


def test_a_manifest_of_another_version_is_not_called_damaged(folder, tmp_path):
    tree = json.loads((folder / FILE_NAME).read_text()) | {"format": "hpc_train.table/9", "new": 1}
    tree["hash"] = hash_of_manifest(tree)
    (tmp_path / FILE_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"made by another version of hpc_train: .*table/9.*: use"):
        read_table_manifest(tmp_path)


def test_folders_of_tokens_and_of_tables_are_told_apart(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    prepare_text([tmp_path / "a.txt"], tmp_path / "out", validation=0)
    with pytest.raises(DataError, match="it has rows of a table, not tokens of texts") as caught:
        read_manifest(folder)
    assert "prepare text" in caught.value.remedy
    with pytest.raises(DataError, match="it has tokens of texts, not rows of a table") as caught:
        read_table_manifest(tmp_path / "out")
    assert "prepare table" in caught.value.remedy
    assert read_any_manifest(tmp_path / "out") == read_manifest(tmp_path / "out")
