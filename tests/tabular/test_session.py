"""Programs that fit estimators and know nothing of ranks."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hpc_train.errors import SetupError
from hpc_train.tabular import Regressor
from tests.programs import python, run
from tests.tabular.tables import SMALL, curve

ROOT = Path(__file__).parents[2]
HEAD = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from hpc_train.mpi.environment import read_launch
from hpc_train.tabular import Regressor
from hpc_train.training.trainer import Trainer
from tests.tabular.tables import EXACT, curve

launch = read_launch(os.environ)
rank = launch.rank if launch else 0
X, y = curve()
how = dict(steps=90, batch=16, patience=8, lr=0.01, config=EXACT)
"""
FIT = """
folder, number, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
take_step = Trainer._train_step

def interrupted(self, step, report):
    take_step(self, step, report)
    if step.number == at and (launch is None or rank == 1):
        os.kill(os.getpid(), number)

Trainer._train_step = interrupted
made = Regressor(**how, run_dir=folder).fit(X, y)
told = {"predictions": made.predict(X).tolist(), "history": made.history_}
if rank == 0:
    print("RESULT", json.dumps(told))
"""


def program(folder, text):
    path = folder / "program.py"
    path.write_text(HEAD + text)
    return str(path)


def start(script, *words, ranks=1):
    launcher = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
    return run(*launcher, *python(script, *map(str, words)))


def result(done):
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


@pytest.mark.slow("three programs")
@pytest.mark.parametrize(
    ("ranks", "ends"),
    [(1, ("stopped",)), (2, ("killed",)), pytest.param(1, ("killed",), marks=pytest.mark.long)],
)
def test_a_fit_that_was_killed_or_stopped_makes_the_same_model_bit_for_bit(tmp_path, ranks, ends):
    script = program(tmp_path, FIT)
    whole = result(start(script, tmp_path / "whole", 0, 0, ranks=ranks))
    assert len(whole["history"]) == 90
    for name in ends:
        number = signal.SIGKILL if name == "killed" else signal.SIGTERM
        done = start(script, tmp_path / name, int(number), 60, ranks=ranks)
        assert done.returncode != 0
        if name == "stopped":
            assert done.returncode == 75, done.stdout + done.stderr
            assert "stopped by SIGTERM after step 60, checkpoint written" in done.stdout
        assert result(start(script, tmp_path / name, 0, 0, ranks=ranks)) == whole


LONG = pytest.mark.long
PLAIN = "made = Regressor(**how)\n"


def test_ranks_end_when_they_like_and_each_has_the_model(tmp_path):
    text = PLAIN + "made.fit(X, y)\nif rank: time.sleep(1)\n"
    text += "print('RESULT', json.dumps(made.predict(X).tolist()))\n"
    done = start(program(tmp_path, text), ranks=2)
    alone = result(start(program(tmp_path, text)))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2
    for line in lines:
        assert json.loads(line.removeprefix("RESULT")) == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(
    ("on_rank_1", "told"),
    [
        ("sys.exit(3)", "rank 1 .* came to the end of the program, but this rank to a fit"),
        ("raise KeyError('x')", "rank 1 .* left the program by KeyError, and the others did not"),
    ],
)
def test_a_rank_that_leaves_ends_the_job(tmp_path, on_rank_1, told):
    text = PLAIN + f"made.fit(X, y)\nif rank: {on_rank_1}\nmade.fit(X, y)\n"
    done = start(program(tmp_path, text), ranks=2)  # within its limit of time
    assert done.returncode != 0
    assert re.search(told, done.stdout + done.stderr)


def test_the_same_mistake_of_all_ranks_is_told_once(tmp_path):
    done = start(program(tmp_path, PLAIN + "made.fit(X, y[1:])\n"), ranks=2)
    assert done.returncode == 2  # `hpc-train launch` does not restart it
    assert done.stderr.count("inconsistent numbers of samples") == 1, done.stderr


@pytest.mark.slow("starts two ranks cold")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("made.fit(X, y).score(X, y[1:])", "inconsistent numbers of samples"),
        pytest.param("made.fit(X, y).predict(X[:, 1:])", "X has 3 features", marks=LONG),
        pytest.param("made.predict(X)", "instance is not fitted yet", marks=LONG),
    ],
    ids=["score", "predict", "unfitted"],
)
def test_a_mistake_of_all_ranks_in_predictions_is_one_line(tmp_path, text, told):
    script = program(tmp_path, PLAIN.replace("90", "9") + text)
    done = start(script, ranks=2)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1, done.stderr
    assert told in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.slow("starts two ranks cold")
def test_another_error_of_all_ranks_has_one_traceback(tmp_path):
    text = PLAIN + "made.fit(X, y)\n{}['x']\n"
    done = start(program(tmp_path, text), ranks=2)
    assert done.stderr.count("Traceback") == 1, done.stderr


def test_a_process_that_a_rank_has_started_cannot_fit(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(multiprocessing.current_process(), "name", "LokyProcess-1")
    with pytest.raises(SetupError, match=r"LokyProcess-1, .*give n_jobs=1"):
        Regressor(config=SMALL).fit(*curve())


def test_threads_that_fit_at_once_make_the_models_of_one_thread():
    X, y = curve()

    def made(seed):
        return Regressor(steps=5, batch=16, config=SMALL, seed=seed).fit(X, y).predict(X)

    seeds = range(12)
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal([*pool.map(made, seeds)], [*map(made, seeds)])


def test_threads_fit_without_a_run_directory_only(tmp_path):
    caught, made = [], []

    def fit(run_dir):
        try:
            made.append(Regressor(steps=3, config=SMALL, run_dir=run_dir).fit(*curve()))
        except SetupError as error:
            caught.append(str(error))

    for run_dir in (None, tmp_path):
        thread = threading.Thread(target=fit, args=(run_dir,))
        thread.start()
        thread.join()
    assert len(made) == 1
    assert "leave out run_dir" in caught[0]


def test_importing_loads_nothing_and_a_missing_library_is_named():
    text = (
        "import sys, importlib.util\n"
        "import hpc_train, hpc_train.tabular\n"
        "loaded = {'torch', 'mpi4py', 'sklearn'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "importlib.util.find_spec = lambda name: None\n"
        "try:\n    hpc_train.tabular.Classifier\n"
        "except hpc_train.errors.SetupError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "needs scikit-learn, which is not installed here: pip install" in done.stdout
