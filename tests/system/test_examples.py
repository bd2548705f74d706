"""The examples, run as their first lines say."""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path

import pytest

from hpc_train.mpi.runtime import horovod_built
from tests.programs import hpc_train, python, run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FIRST_RUN = ROOT / "docs/tutorial/first-run.md"
TABLES = ROOT / "docs/tutorial/tables.md"


def example(name, folder, *options, ranks=1):
    launcher = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
    cold = name in ("own_model.py", "forecast.py") and ranks == 2  # some stay cold
    program = python(str(EXAMPLES / name), warm=not cold)
    done = run(*launcher, *program, *options, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def code(name):
    """A script's lines without docstring and blank lines."""
    text = (EXAMPLES / name).read_text()
    return [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]


def test_many_ranks_take_at_most_ten_changed_lines():
    changes = list(difflib.ndiff(code("own_loop_single.py"), code("own_loop.py")))
    assert sum(line.startswith("+ ") for line in changes) <= 10
    assert sum(line.startswith("- ") for line in changes) <= 10


def test_a_script_for_horovod_takes_at_most_eight_changed_lines():
    changes = [
        *difflib.ndiff(code("horovod_script.py"), code("horovod_script_resumable.py")),
    ]
    assert sum(line.startswith("+ ") for line in changes) <= 8
    assert sum(line.startswith("- ") for line in changes) <= 8


@pytest.mark.long
@pytest.mark.skipif(not horovod_built(), reason="Horovod is not built")
def test_a_script_for_horovod_learns(tmp_path):
    text = example("horovod_script.py", tmp_path, ranks=2)
    assert float(text.split("accuracy on held-out digits: ")[1]) > 0.85


@pytest.mark.slow("a script trains on two ranks, twice")
@pytest.mark.skipif(not horovod_built(), reason="Horovod is not built")
def test_a_script_for_horovod_goes_on_where_it_was_stopped(tmp_path):
    whole = example("horovod_script_resumable.py", tmp_path, ranks=2)
    accuracy = float(whole.split("accuracy on held-out digits: ")[1])
    assert accuracy > 0.85
    # What is left of a job that was killed after step 160.
    folder = tmp_path / "runs/hvd"
    expected = (folder / "step-000000200.safetensors").read_bytes()
    for name in ("step-000000180", "step-000000200"):
        (folder / f"{name}.safetensors").unlink()
    (folder / "LATEST").unlink()
    rest = example("horovod_script_resumable.py", tmp_path, ranks=2)
    assert "epoch 6:" not in rest
    assert "epoch 7:" in rest
    assert (folder / "step-000000200.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.long) if n != 2 else n for n in (1, 2, 3)]
)
def test_an_own_loop_learns(tmp_path, ranks):
    text = example("own_loop.py", tmp_path, ranks=ranks)
    accuracy = float(text.split("accuracy on held-out digits: ")[1].split()[0])
    assert accuracy > 0.85
    assert text.count("epoch 8: ") == 1
    if ranks == 3:
        return
    # Run again, it has nothing left to do.
    again = example("own_loop.py", tmp_path, ranks=ranks)
    assert "epoch" not in again
    assert f"accuracy on held-out digits: {accuracy:.3f}" in again


def test_the_single_script_learns_as_well(tmp_path):
    text = example("own_loop_single.py", tmp_path)
    assert float(text.split("accuracy on held-out digits: ")[1]) > 0.85


def test_an_own_model_and_data_set_under_the_trainer(tmp_path):
    losses = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        options = ["--precision.dtype", "float32", "--data.batch", "36"]
        text = example("own_model.py", folder, *options, ranks=ranks)
        assert (folder / "runs/wines/metrics.jsonl").exists()
        losses.append(float(text.split("loss on held-out wines: ")[1]))
    assert max(losses) < 0.2


def test_a_forecast_from_files_of_others_learns_the_same_on_two_ranks(tmp_path):
    losses, errors = [], []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        options = ["--run.log_every", "1", "--data.workers", "1"]
        text = example("forecast.py", folder, *options, ranks=ranks)
        errors.append(float(text.split("error of the forecast for waves-2003.h5: ")[1]))
        records = (folder / "runs/waves/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in records])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert max(errors) < losses[0][0] / 5


@pytest.mark.parametrize(
    ("name", "says"), [("own_model.py", "loss on held-out"), ("forecast.py", "error of the")]
)
def test_data_of_float32_train_a_model_of_float64(tmp_path, name, says):
    options = ["--precision.dtype", "float64", "--run.epochs", "null", "--run.steps", "2"]
    assert says in example(name, tmp_path, *options)


@pytest.mark.slow("one rank, and a layout of four")
@pytest.mark.parametrize("layout", [pytest.param((2, 2, 1), marks=pytest.mark.long), (1, 2, 2)])
def test_an_own_model_learns_the_same_under_any_layout(tmp_path, layout):
    losses = []
    for dp, tp, pp in ((1, 1, 1), layout):
        folder = tmp_path / f"{dp}{tp}{pp}"
        folder.mkdir()
        sizes = {"dp": dp, "tp": tp, "pp": pp}
        options = ["--run.epochs", "2"]
        options += [word for key, n in sizes.items() for word in (f"--parallel.{key}", str(n))]
        text = example("own_parallel.py", folder, *options, ranks=dp * tp * pp)
        losses.append(float(text.split("loss on held-out digits: ")[1]))
    assert losses[0] < 1.0
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.slow("three programs import pandas and scikit-learn, and fit several models")
def test_tables_are_fitted_from_python(tmp_path):
    found = []
    for ranks in (1, 2):
        text = example("churn.py", tmp_path, "40", ranks=ranks)
        # Each rank predicts and prints. The line of one may begin before another's has ended.
        areas = re.findall(r"area under the ROC curve: (\d\.\d{3})", text)
        assert len(areas) == text.count("accuracy: ") == ranks
        found.append(float(areas[0]))
    assert found[0] == pytest.approx(found[1], abs=0.002)
    assert found[0] > 0.8
    text = example("diabetes.py", tmp_path, "60")
    assert (tmp_path / "runs/diabetes/metrics.jsonl").exists()
    assert float(text.split("R2 on held-out patients: ")[1]) > 0


@pytest.mark.slow("three batch jobs that train side by side")
def test_runs_are_submitted_from_python(tmp_path):
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text() * 3)
    words = ["prepare", "text", "text.txt", "--out", "data"]
    assert run(*hpc_train(*words), cwd=tmp_path).returncode == 0
    text = example("submit_many.py", tmp_path, "--scheduler", "local")
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == ["rate 0.0001", "rate 0.001", "rate 0.01"]
    assert all(line.endswith("(finished)") for line in lines)
    losses = [float(line.split()[3]) for line in lines]
    assert losses[0] > losses[1], "the smallest rate learns least in so few steps"


@pytest.mark.slow("the whole demo, of four ranks that start three times")
def test_the_demo_is_exact(tmp_path):
    done = run(sys.executable, "-m", "examples.demo", "--every", "5", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are the same to the last bit" in done.stdout


@pytest.mark.slow("the tutorial prepares data, and starts two ranks, then four")
def test_the_first_run_goes_as_its_page_says(tmp_path):
    """Its commands, from the data to the result, are typed as they stand."""
    if "Open MPI" not in run("mpirun", "--version").stdout:
        pytest.skip("the page is for the MPI of `make setup`")
    text = FIRST_RUN.read_text().partition("## Prepare text")[2]
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    typed = "\n".join(lines).replace("steps: 600", "steps: 60")
    seen = "until grep -q '\"step\": 20' runs/first/metrics.jsonl; do sleep 0.1; done"
    assert typed.count("\nkill ") == 1
    typed = typed.replace("\nkill ", f"\n{seen} 2>/dev/null\nkill ")
    done = run("bash", "-c", typed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n75\n" in done.stdout
    assert '"step": 60' in done.stdout
    assert "async def " in done.stdout
    assert "model.head.norm.weight" in done.stdout


@pytest.mark.slow("the tutorial of tables prepares three tables, trains four times, and predicts")
def test_the_tutorial_of_tables_goes_as_its_page_says(tmp_path):
    """Its commands, but for the installation, are typed as they stand."""
    lines = [line[4:] for line in TABLES.read_text().splitlines() if line.startswith("    ")]
    typed = "\n".join(line for line in lines if not line.startswith("pip "))
    typed = typed.replace("steps: 300", "steps: 60").replace("steps=200", "steps=60")
    done = run("bash", "-e", "-c", typed, cwd=tmp_path, environ={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "columns:" in done.stdout  # the schema
    assert "held-out samples at the end" in done.stdout + done.stderr
    assert '"row","diagnosis","prediction"' in done.stdout
    assert "accuracy: 0.9" in done.stdout
