"""The command line and the package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hpc_train
from hpc_train.config_file import KEYS, load
from tests.programs import hpc_train as command
from tests.programs import run

HEAVY = ("torch", "mpi4py", "horovod", "h5py", "numpy")


@pytest.mark.parametrize(
    "program",
    [
        "import hpc_train",
        "from hpc_train.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from hpc_train.cli import main; main(['train', '--help'])",
        "import hpc_train.horovod_build",
    ],
)
def test_the_front_door_loads_neither_torch_nor_mpi(program):
    check = f"{program}\nimport sys\nassert not {{*{HEAVY}}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_everything_that_is_exported_exists():
    assert all(getattr(hpc_train, name) for name in hpc_train.__all__)


def test_help_lists_the_verbs_and_the_exit_codes():
    text = run(*command("--help")).stdout
    for word in ("doctor", "prepare", "train", "generate", "75 stopped early"):
        assert word in text


def test_help_of_train_lists_every_key_with_its_meaning():
    text = run(*command("train", "--help")).stdout
    for key in KEYS:
        assert f"--{key} " in text
    assert "Samples per optimizer step over the whole job." in " ".join(text.split())


def test_the_version():
    assert hpc_train.__version__ in run(*command("--version")).stdout


def test_print_config_gives_a_file_that_means_the_same(tmp_path):
    options = ["--run.steps", "3", "--model.layers=2"]
    printed = run(*command("train", *options, "--print_config"))
    assert printed.returncode == 0
    (tmp_path / "all.yaml").write_text(printed.stdout)
    assert load(tmp_path / "all.yaml") == load(None, options)
