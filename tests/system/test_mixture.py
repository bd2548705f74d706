"""Training on a mixture of data folders, through the command line."""

from __future__ import annotations

import json
import re

import pytest

from hpc_train.config.file import load
from hpc_train.data.prepare.work import prepare_text
from hpc_train.errors import ConfigError
from hpc_train.planning.model import planned_shape
from tests.data.corruption import sealed
from tests.programs import only_line
from tests.system.test_train import assert_succeeded


@pytest.fixture
def digits(tmp_path):
    """A small folder, whose samples are used several times."""
    (tmp_path / "digits.txt").write_text("1234567890\n" * 2000)
    prepare_text([tmp_path / "digits.txt"], tmp_path / "digits", validation=0.1)
    return tmp_path / "digits"


def mixed(text_data, digits, weight):
    parts = [{"path": str(text_data), "weight": 1}, {"path": str(digits), "weight": weight}]
    return ["--data.path", json.dumps(parts)]


@pytest.mark.slow("four jobs")
def test_a_mixture_is_the_same_on_every_layout_and_after_a_resume(program, text_data, digits):
    steady = [*mixed(text_data, digits, 3), "--model.vocab", "264"]  # which two ranks can share
    steady += ["--optimizer.schedule", "constant", "--data.validation_every", "5"]
    whole = program.train("whole", *steady)
    assert_succeeded(whole)
    assert f"{text_data} 25.00% (48 samples, " in whole.stdout + whole.stderr
    grid = ["--parallel.tp", "2", "--run.steps", "5"]  # and dp 2
    assert_succeeded(program.train("bent", *steady, *grid, launcher="mpirun", ranks=4))
    stages = ["--parallel.pp", "2"]
    assert_succeeded(program.train("bent", *steady, *stages, launcher="mpirun", ranks=2))
    for key, count in (("loss", 12), ("validation_loss", 3), ("mixture_share_2", 12)):
        both = [
            [record[key] for record in program.metrics(name) if key in record]
            for name in ("whole", "bent")
        ]
        assert len(both[0]) == count
        assert both[1] == pytest.approx(both[0], rel=1e-10)

    line = refused(program, "whole", *steady, *mixed(text_data, digits, 2))
    assert "was made with shares of the mixture [0.25, 0.75], this run has [0.333" in line
    assert "set the weights of the mixture (weight in data.path) back, start" in line
    assert re.search(r"another run\.dir and --checkpoint\.weights \S*step-000000012\.safet", line)
    turned = json.dumps([*reversed(json.loads(mixed(text_data, digits, 3)[1]))])
    line = refused(program, "whole", *steady, "--data.path", turned)
    assert "was made from the same data in another order than " in line


def refused(program, name, *options):
    done = program.train(name, *options)
    assert done.returncode == 2, done.stderr
    return only_line(done.stderr)


def test_folders_that_do_not_fit_together(program, text_data, digits):
    tree = json.loads((digits / "manifest.json").read_text())
    (digits / "manifest.json").write_text(sealed(tree | {"vocab": 60}))
    line = refused(program, "run", *mixed(text_data, digits, 1))
    assert f"{digits} has a vocabulary of 60 tokens, and {text_data} has one of 256" in line
    assert "prepare all folders of a mixture with the same tokenizer" in line
    (digits / "manifest.json").write_text(sealed(tree | {"tokenizer": "t.json"}))
    (digits / "t.json").write_text("{}")
    line = refused(program, "run", *mixed(text_data, digits, 1))
    assert f"{digits} has another tokenizer than {text_data}" in line
    (digits / "t.json").unlink()
    (digits / "manifest.json").unlink()
    assert f"{digits} holds no prepared data" in refused(
        program, "run", *mixed(text_data, digits, 1)
    )


def test_a_plan_needs_one_vocabulary_of_all_folders(program, text_data, digits):
    config = load(program.config, mixed(text_data, digits, 1))
    assert planned_shape(config).vocab == 256
    tree = json.loads((digits / "manifest.json").read_text())
    (digits / "manifest.json").write_text(sealed(tree | {"vocab": 60}))
    with pytest.raises(ConfigError, match=r"not known: .* has a vocabulary of 60 tokens, and"):
        planned_shape(config)
