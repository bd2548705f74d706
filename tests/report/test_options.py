"""Configurations, and in what they differ."""

from __future__ import annotations

import json

import pytest

from hpc_train.report.options import config_differences, read_config, words_as_options


def test_differences_are_by_key_and_leave_out_where_a_run_writes(tmp_path):
    for name, lr, extra in (("a", 1e-3, ""), ("b", 1e-4, "data: {path: [x, {path: y}]}")):
        (tmp_path / name).mkdir()
        text = f"run: {{dir: {name}, seed: 1}}\noptimizer: {{lr: {lr}}}\n{extra}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    configs = [read_config(tmp_path / name)[1] for name in ("a", "b")]
    assert config_differences(configs) == {
        "optimizer.lr": ["0.001", "0.0001"],
        "data.path": ["", "['x', {'path': 'y'}]"],
    }
    without = config_differences([configs[0], {}, configs[0] | {"run.seed": "2"}])
    assert without == {"run.seed": ["1", "", "2"]}, "a run without a configuration differs in none"


@pytest.mark.parametrize("text", ["a: [", "just text", "", "? [a]\n: b", "!!python/object:x {}"])
def test_a_damaged_configuration_has_no_values(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(tmp_path) == (text, {}) or text.startswith("? ")
    read_config(tmp_path)


def test_aliases_that_multiply_are_cut(tmp_path):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, 40)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert len(read_config(tmp_path)[1]) == 2000


def test_long_values_are_compared_to_their_ends(tmp_path):
    for name, weight in (("a", 1), ("b", 2)):
        weights = [1] * 22 + [weight] + [1] * 7
        parts = [{"path": f"set{number}", "weight": one} for number, one in enumerate(weights)]
        (tmp_path / name).mkdir()
        tree = {"data": {"path": parts, "name": "x" * 300 + name}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(tree))
    configs = [read_config(tmp_path / name)[1] for name in ("a", "b")]
    assert config_differences(configs) == {
        "data.path.22.weight": ["1", "2"],
        "data.name": ["x" * 300 + "a", "x" * 300 + "b"],
    }


def test_the_options_of_a_task():
    words = ["--optimizer.lr=1e-3", "--run.seed", "2", "--data.path", "a", "b", "--run.compile"]
    assert words_as_options(words) == {
        "optimizer.lr": "1e-3",
        "run.seed": "2",
        "data.path": "a b",
        "run.compile": "",
    }
