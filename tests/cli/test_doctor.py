"""hpc-train doctor, as it is run: alone, under a launcher, and where something is missing."""

from __future__ import annotations

import json
import sys

import pytest

from hpc_train.cli import doctor
from hpc_train.host import processor
from hpc_train.mpi import runtime
from tests.programs import command, hpc_train, run

TOPICS = {"Python", "torch", "HDF5", "launcher", "MPI", "Horovod", "MPI-IO", "nodes and ranks",
          "binding", "devices"}  # fmt: skip


def topics(done):
    tree = json.loads(done.stdout[done.stdout.index("{") :])
    return tree, {finding["topic"]: finding for finding in tree["findings"]}


def test_alone_it_looks_at_everything_and_says_that_the_main_job_runs():
    done = run(*hpc_train("doctor", "--json"))
    assert done.returncode == 0
    tree, found = topics(done)
    assert tree["ok"]
    assert found.keys() >= TOPICS
    assert "MPI_THREAD_MULTIPLE" in found["MPI"]["text"]
    if found["devices"]["text"] == "CPU only":
        assert str(processor.here().kind) in found["matrix products"]["text"]
    assert all(finding["remedy"] for finding in tree["findings"] if finding["status"] != "ok")


@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
def test_it_says_what_horovod_is_built_against_and_that_it_shares_libmpi():
    _, found = topics(run(*hpc_train("doctor", "--json")))
    assert found["Horovod"]["status"] == "ok"
    assert "for torch" in found["Horovod"]["text"]
    assert "for mpi4py and Horovod" in found["libmpi"]["text"]


def test_under_a_launcher_rank_0_reports_for_all():
    done = run(*command("mpirun", 3, "doctor", "--json"))
    assert done.returncode == 0, done.stdout + done.stderr
    tree, found = topics(done)
    assert [rank["rank"] for rank in tree["ranks"]] == [0, 1, 2]
    assert "started by Open MPI" in found["launcher"]["text"]
    assert found["nodes and ranks"]["text"].startswith("1 x 3 (")
    text = run(*command("mpirun", 2, "doctor")).stdout
    assert text.count("the main job runs here") == 1


def test_it_knows_which_mpi_io_will_write_the_checkpoints():
    warned = topics(run(*hpc_train("doctor", "--json")))[1]["MPI-IO"]
    if "OMPIO" in warned["text"]:
        assert warned["status"] == "warning"
        assert "export OMPI_MCA_io=^ompio" in warned["remedy"]
        mended = run(*hpc_train("doctor", "--json"), environ={"OMPI_MCA_io": "^ompio"})
        assert topics(mended)[1]["MPI-IO"]["status"] == "ok"


def test_without_thread_support_the_main_job_cannot_run():
    environ = {"MPI4PY_RC_THREAD_LEVEL": "single"}
    done = run(*command("mpirun", 2, "doctor"), environ=environ)
    assert done.returncode == 1
    assert "the main job cannot run here" in done.stdout
    assert "unset MPI4PY_RC_THREAD_LEVEL" in done.stdout


def test_doctor_says_without_mpi_that_the_main_job_cannot_run(tmp_path):
    hide = "import sys\nsys.modules['mpi4py'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = run(*hpc_train("doctor"), environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "the main job cannot run here" in done.stdout
    assert "->" in done.stdout


def test_a_missing_horovod_is_a_warning_that_says_how_to_build_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    done = run(*hpc_train("doctor", "--json"), environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    finding = topics(done)[1]["Horovod"]
    assert finding["status"] == "warning"
    assert runtime.BUILD_HOROVOD in finding["remedy"]


def test_no_launcher_on_the_path(tmp_path):
    done = run(sys.executable, "-m", "hpc_train", "doctor", environ={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "no mpirun, mpiexec or srun on the PATH" in done.stdout


def test_two_mpi_libraries_in_one_process_are_an_error():
    rank = {"libmpi": ["/a/libmpi.so.40", "/b/libmpi.so.40"], "horovod": {}}
    (finding,) = doctor.one_libmpi(rank)
    assert finding.status == doctor.ERROR
    assert "--rebuild" in finding.remedy


@pytest.mark.parametrize(("cores", "status"), [([[0], [1]], "ok"), ([[0, 1], [0, 1]], "ok"),
                                               ([[0], [0]], "warning")])  # fmt: skip
def test_ranks_that_share_cores_are_warned_of(cores, status):
    ranks = [{"host": "a", "cores": mine} for mine in cores]
    finding = doctor.binding(ranks)
    assert finding.status == status
    assert bool(finding.remedy) == (status == "warning")


def products(way, light, heavy, why="AMD with AVX2, measured 2026-11-22"):
    """What ranks say of themselves: the first of a host, and another one of it."""
    speed = {"light": light, "heavy": heavy} if light else None
    return [{"products": {"way": way, "why": why, "onednn_speed": speed}}, {"products": None}]


@pytest.mark.parametrize(
    ("way", "light", "heavy", "remedy"),
    [
        ("torch", 0.8, 0.9, ""),
        ("torch", 1.0, 1.1, ""),
        ("torch", 1.2, 1.7, "--precision.matmul onednn"),
        ("onednn", 1.7, 1.8, ""),
        ("onednn", 0.8, 0.8, "--precision.matmul torch"),
    ],
)
def test_a_matmul_table_that_is_wrong_here_is_a_warning_with_the_key_to_set(
    way, light, heavy, remedy
):
    (finding,) = doctor.matrix_products(products(way, light, heavy))
    assert finding.status == ("warning" if remedy else "ok")
    assert remedy in finding.remedy
    for word in (way, "AMD with AVX2", f"{light:.2f}", f"{heavy:.2f}"):
        assert word in finding.text


def test_each_kind_of_host_has_its_own_finding():
    found = doctor.matrix_products(
        products("torch", 0.8, 0.8) * 2 + products("torch", 1.5, 1.5, "Intel with AVX2")
    )
    assert [finding.status for finding in found] == ["ok", "warning"]


def test_without_onednn_there_is_nothing_to_compare():
    (finding,) = doctor.matrix_products(products("torch", None, None))
    assert finding.status == "ok"
    assert "times as fast" not in finding.text


def test_without_torch_there_are_no_matrix_products_and_mpi_is_still_looked_at(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = run(*hpc_train("doctor", "--json"), environ={"PYTHONPATH": str(tmp_path)})
    _, found = topics(done)
    assert "matrix products" not in found
    assert "MPI_THREAD_MULTIPLE" in found["MPI"]["text"]


def test_nodes_are_counted_with_their_ranks():
    ranks = [{"host": host} for host in "abab"]
    assert doctor.nodes(ranks).text == "2 x 4 (a: 2, b: 2)"
