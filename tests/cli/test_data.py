"""`hpc-train data verify`, as it is run: alone and under a launcher."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.programs import command, hpc_train, modules_of, only_line, run


@pytest.fixture
def damaged(text_data, tmp_path):
    """A data folder in which one token is another one."""
    out = shutil.copytree(text_data, tmp_path / "out")
    with (out / "train-00001.h5").open("r+b") as file:
        file.seek(40_000)
        file.write(b"\1")
    return out


def test_a_sound_folder(text_data):
    done = run(*hpc_train("data", "verify", str(text_data)))
    assert (done.returncode, done.stderr) == (0, "")
    assert "sound" in done.stdout


def test_one_token_that_is_another_is_found_alone_and_under_a_launcher(damaged):
    alone = run(*hpc_train("data", "verify", str(damaged)))
    assert alone.returncode == 1
    assert f"shard {damaged}/train-00001.h5 is damaged" in alone.stdout
    assert "train-00001.h5" in only_line(alone.stderr)
    many = run(*command("mpirun", 3, "data", "verify", str(damaged)))
    assert many.returncode == 1
    assert only_line(many.stderr) == only_line(alone.stderr)
    told = [line for line in many.stdout.splitlines() if "is damaged" in line]
    assert len(told) == 1
    assert told[0].startswith("rank ")


@pytest.mark.parametrize("options", [[], ["--each_node"]], ids=["together", "each"])
def test_json_lists_each_damaged_file_with_who_has_read_it(damaged, options):
    (damaged / "validation-00000.h5").unlink()
    done = run(*command("mpirun", 2, "data", "verify", str(damaged), "--json", *options))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {one["file"] for one in told["damaged"]} == {"train-00001.h5", "validation-00000.h5"}
    assert all(one["host"] and one["rank"] in (0, 1) for one in told["damaged"])


def test_it_loads_neither_torch_nor_mpi_nor_hdf5(text_data):
    """The HDF5 library is not made for damaged files: at some of them it ends the process."""
    code, told, modules = modules_of("data", "verify", text_data)
    assert (code, {"torch", "mpi4py.MPI", "h5py"} & modules) == (0, set()), told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "no/such/folder"], "no/such/folder holds no prepared data"),
        (["verify"], "`hpc-train data verify --help` lists the options"),
        (["check", "x"], "`hpc-train data --help` lists the actions"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = run(*hpc_train("data", *words))
    assert done.returncode == 2
    assert message in only_line(done.stderr)
