"""What `doctor --image` says of images that do not fit.

tests/system/test_containers.py has it run a real image.
"""

from __future__ import annotations

import json

import pytest

from hpc_train import __version__
from hpc_train.cli.doctor import image
from hpc_train.launch.containers import Container
from hpc_train.launch.launchers import FoundLauncher
from hpc_train.launch.lines import Line
from hpc_train.mpi.gpus import AMD, NONE, NVIDIA, Gpus
from tests.programs import hpc_train, only_line, run

FACTS = {
    "python": "3.11.7 (/usr/bin/python3)",
    "hpc_train": __version__,
    "mpi": {"version": "Open MPI v4.1.8, package: x", "mpi4py": "4.1.2"},
    "loaded": ["libmpi.so.40"],
    "torch": {"version": "2.9", "build": "CUDA", "for": "12.8"},
    "glibc": ["2.28"],
    "providers": None,
}
MPICH = {"version": "MPICH Version:      4.2.3\nMPICH ABI: 16", "mpi4py": "4.1.2"}
CRAY = {"version": "MPI VERSION    : CRAY MPICH version 8.1.28.15\n", "mpi4py": "4.1.2"}


def launcher(kind, script="", version="the one"):
    return FoundLauncher(kind, lambda job: Line(["sh", "-c", script], {}), version)


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        ({}, "ok", ""),
        ({"hpc_train": "9.9"}, "warning", "same version"),
        ({"hpc_train": ""}, "error", "pip install"),
    ],
)
def test_the_package_in_the_image(facts, status, word):
    found = image.package({**FACTS, **facts})
    assert found.status == status
    assert word in found.remedy


@pytest.mark.parametrize(
    ("mpi", "kind", "fits"),
    [
        (FACTS["mpi"], "open_mpi", True),
        (FACTS["mpi"], "hydra", False),
        (FACTS["mpi"], "pals", False),
        (MPICH, "hydra", True),
        (MPICH, "intel_mpi", True),
        (MPICH, "open_mpi", False),
        (CRAY, "pals", True),
        (CRAY, "flux", True),
    ],
)
def test_the_launcher_and_the_mpi_in_the_image_are_of_one_kind(mpi, kind, fits):
    found = image.mpi_inside({**FACTS, "mpi": mpi}, launcher(kind))
    assert (found.status == "ok") == fits
    assert fits or "take an image with" in found.remedy
    assert "libmpi.so.40" in found.text


@pytest.mark.parametrize(("mpi", "fits"), [(FACTS["mpi"], False), (MPICH, True)])
def test_srun_has_a_plugin_for_the_mpi_in_the_image(monkeypatch, mpi, fits):
    monkeypatch.setattr(
        image, "output", lambda *words, **how: "MPI plugin types are...\nnone\npmi2"
    )
    found = image.mpi_inside({**FACTS, "mpi": mpi}, launcher("srun"))
    assert (found.status == "ok") == fits
    assert fits or "pmi2, and it needs pmix or pspmix" in found.text


def test_an_mpi4py_that_does_not_load():
    found = image.mpi_inside({**FACTS, "mpi": {"error": "no libmpi.so.12"}}, launcher("hydra"))
    assert found.status == "error"
    assert "no libmpi.so.12" in found.text


@pytest.mark.parametrize(
    ("torch", "gpus", "status"),
    [
        (FACTS["torch"], Gpus(4, NVIDIA), "ok"),
        (FACTS["torch"], Gpus(8, AMD), "warning"),
        (FACTS["torch"], NONE, "ok"),
        ({}, NONE, "error"),
    ],
)
def test_torch_is_built_for_the_gpus_of_the_host(torch, gpus, status):
    found = image.torch_inside({**FACTS, "torch": torch}, gpus)
    assert found.status == status
    assert status != "warning" or found.remedy == "install torch for ROCm in the image"


def test_an_old_c_library_is_warned_of_where_the_hosts_drivers_are_loaded():
    assert image.glibc(FACTS, NONE).status == "ok"
    assert image.glibc({**FACTS, "glibc": ["2.9"]}, Gpus(1, NVIDIA)).status == "warning"
    assert image.glibc({**FACTS, "glibc": ["99.0"]}, Gpus(1, NVIDIA)).status == "ok"
    assert "another C library" in image.glibc({**FACTS, "glibc": []}, NONE).text


@pytest.mark.parametrize(
    ("providers", "device", "statuses"),
    [
        (None, "class/cxi/cxi0", []),
        (["tcp", "shm"], "", ["ok"]),
        (["tcp", "shm"], "class/cxi/cxi0", ["warning"]),
        (["cxi", "tcp"], "class/cxi/cxi0", ["ok"]),
        (["tcp"], "class/infiniband/mlx5_0", ["warning"]),
    ],
)
def test_a_slow_network_is_warned_of_where_the_host_has_a_fast_one(
    tmp_path, providers, device, statuses
):
    if device:
        (tmp_path / device).mkdir(parents=True)
    found = image.network({**FACTS, "providers": providers}, tmp_path)
    assert [one.status for one in found] == statuses


def test_variables_of_the_hosts_python_are_warned_of():
    assert image.host_python({"PATH": "/bin"}) == []
    (found,) = image.host_python({"PYTHONPATH": "/site"})
    assert "unset PYTHONPATH" in found.remedy


BOTH = "for n in 1 2; do echo started 2; echo received; done"


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (BOTH, "ok", "8 MiB passed each way"),
        ("echo started 1; echo started 1", "error", "each rank is alone"),
        ("echo started 2; sleep 30", "error", "8 MiB between two ranks did not arrive within"),
        ("sleep 30", "error", "did not start within"),
        ("echo 'hpc-train: error: no luck' >&2; exit 2", "error", "two ranks failed: no luck"),
    ],
)
def test_two_ranks_that_are_started_in_the_image(script, status, text):
    """The launcher is a stand-in, which hangs where the real ranks would."""
    seconds = 20 if "sleep" not in script else 0.5
    found = image.two_ranks(Container("apptainer", "/it.sif"), launcher("x", script), seconds)
    assert found.status == status
    assert text in found.text
    assert bool(found.remedy) == (status != "ok")


def test_an_image_that_is_not_there_and_options_without_one(tmp_path):
    done = run(*hpc_train("doctor", "--json", "--image", "no.sif"), cwd=tmp_path)
    assert done.returncode == 1
    (found,) = json.loads(done.stdout)["findings"]
    assert found["topic"] == "image"
    assert found["remedy"]
    done = run(*hpc_train("doctor", "--image_options", "--nv"))
    assert done.returncode == 2
    assert "give --image" in only_line(done.stderr)
