"""Tables through the command line: prepare, train, kill, resume, and mistakes in one line."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from tests.programs import ENVIRON, Program, hpc_train, only_line, ranks_of, run
from tests.system.test_train import assert_succeeded
from tests.waiting import wait_until

CONFIG = """
run: {steps: 60, log_every: 1, deterministic: true, preflight: false}
model: {kind: tabular, layers: 1, hidden: 16, heads: 2}
data: {path: PATH, batch: 24, micro_batch: 6, sampling: balanced, validation_every: 20}
optimizer: {lr: 0.01}
precision: {dtype: float64}
checkpoint: {every: 5, keep: 0}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A table with few rows of one class, prepared."""
    folder = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(400, 2))
    colors = generator.choice(["red", "green", "blue"], 400)
    rare = numbers[:, 0] + (colors == "red") > 1.4
    lines = ["size,weight,color,kind"]
    for (size, weight), color, found in zip(numbers, colors, rare, strict=True):
        lines.append(f"{size:.4f},{weight:.4f},{color},{'rare' if found else 'common'}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    given = [str(folder / "table.csv"), "--target", "kind", "--validation", "0.25"]
    assert_succeeded(run(*hpc_train("prepare", "table", *given, "--out", str(folder / "data"))))
    return folder / "data"


@pytest.fixture
def table(tmp_path, prepared):
    """A small training on the table, to be run through its command line."""
    config = tmp_path / "table.yaml"
    config.write_text(CONFIG.replace("PATH", str(prepared)))
    return Program(config, tmp_path)


@pytest.mark.slow("three jobs of two ranks")
def test_a_killed_run_goes_on_bit_for_bit(table):
    done = table.train("whole", launcher="mpirun", ranks=2)
    assert_succeeded(done)
    last = table.metrics("whole")[-1]
    assert (
        f"held-out samples at the end: loss {last['validation_loss']:.5g}, accuracy" in done.stdout
    )
    assert last["validation_auc"] > 0.9
    command = table.command("cut", launcher="mpirun", ranks=2)
    latest = table.root / "cut" / "checkpoints" / "LATEST"
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL) as process:
        wait_until(latest.exists)
        ranks_of(process)[-1].kill()
    assert process.returncode != 0
    done = table.train("cut", launcher="mpirun", ranks=2)
    assert_succeeded(done)
    assert "resumed from" in done.stdout
    assert table.losses("cut") == table.losses("whole")
    assert table.checkpoint("cut", 60).read_bytes() == table.checkpoint("whole", 60).read_bytes()


def refused(table, *options):
    done = table.train("run", *options)
    assert done.returncode == 2, done.stderr
    return only_line(done.stderr)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--model.kind", "gpt"], "data.sampling is balanced, but model.kind is gpt"),
        (["--data.loss", "token"], "data.loss is given, but model.kind is tabular"),
        (["--model.quantiles", "[0.5]"], "model.quantiles is given, but the table's task is"),
        (["--data.damaged", "substitute"], "data.damaged is substitute, but the data set"),
        (["--parallel.sequence_parallel", "true"], "parallel.sequence_parallel"),
        (["--data.path", "nowhere"], "nowhere holds no prepared data"),
        (["--data.path", "[{path: a}, {path: b}]"], "data.path names 2 folders, but a model of"),
    ],
)
def test_a_mistake_is_one_line(table, options, why):
    assert why in refused(table, *options)


def test_a_gpt_is_not_trained_on_a_table_nor_a_table_on_text(table, text_data):
    line = refused(table, "--data.path", str(text_data))
    assert f"{text_data} is a folder of another kind" in line
    table.config.write_text(
        table.config.read_text().replace("kind: tabular, ", "").replace("sampling: balanced, ", "")
    )
    assert "is a folder of another kind: it has rows of a table" in refused(table)
