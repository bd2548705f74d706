from __future__ import annotations

import pytest

from hpc_train.config.file import load, paths_of
from hpc_train.errors import ConfigError


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(f"data: {{path: {text}}}")
    return path


def test_folders_have_weights_in_a_file_and_in_options(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TEXTS", "/scratch")
    expected = {"/home/me/a": 2.0, "/scratch/b": 1.0}
    text = "[{path: ~/a, weight: 2}, {path: $TEXTS/b}]"
    made = load(written(tmp_path, text))
    assert made.data.folders == load(None, ["--data.path", text]).data.folders == expected
    more = load(written(tmp_path, text), ["--data.path+", "{path: c, weight: 1e-3}"])
    assert more.data.folders == expected | {"c": 0.001}
    assert paths_of(more)[1:4] == [*more.data.folders]
    again = tmp_path / "again.yaml"
    again.write_text(more.to_yaml())
    assert load(again) == more
    assert load(again, ["--data.path", "d"]).data.folders == {"d": 1.0}


def test_a_variable_of_the_job_may_be_unknown_in_a_list_too():
    options = ["--data.path", "[{path: $NO_SUCH/a}]"]
    assert load(None, options, later=("data.path",)).data.folders == {"$NO_SUCH/a": 1.0}
    with pytest.raises(ConfigError, match=r"data\.path is '\$NO_SUCH/a', but the variable"):
        load(None, options)


@pytest.mark.parametrize("weight", ["010", "1:30"])
def test_a_weight_of_an_option_is_the_number_that_is_written(weight):
    with pytest.raises(ConfigError, match=f"the weight of a in data.path is '{weight}'"):
        load(None, ["--data.path", f"[{{path: a, weight: {weight}}}]"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "data.path is an empty list"),
        ("[a, b]", "data.path has 'a' in its list: write it as {path: FOLDER, weight: NUMBER}"),
        ("[{path: a, wieght: 2}]", "unknown key data.path.wieght: did you mean data.path.weight?"),
        ("[{weight: 2}]", "data.path has {'weight': 2} in its list: give its path"),
        ("[{path: [3]}]", "give its path"),
        (
            "[{path: a, weight: 0}]",
            "the weight of a in data.path is 0: give a finite number above 0",
        ),
        ("[{path: a, weight: .inf}]", "the weight of a in data.path is inf"),
        ("[{path: a, weight: true}]", "the weight of a in data.path is True"),
        ("[{path: a, weight: 1:30}]", "the weight of a in data.path is '1:30'"),
        ("[{path: a, weight: much}]", "the weight of a in data.path is 'much'"),
        ("[{path: a}, {path: a/}]", "data.path has a/ twice in its list"),
        ("[{path: a}, {path: b/../a}]", "data.path has b/../a twice in its list"),
        ("'[{path: a'", "data.path is '[{path: a': give a folder, or a list of {path: FOLDER"),
        ("''", "data.path is '': give a folder"),
        ("{path: a}", "it takes a path, or a list of {path: FOLDER, weight: NUMBER}"),
    ],
)
def test_a_list_that_is_no_mixture_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert message in str(caught.value)
