"""hpc-train doctor, as it is run: alone, under a launcher, and where something is missing."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from hpc_train.cli.doctor import checks, examine
from hpc_train.cli.doctor import probe as doctor_probe
from hpc_train.cli.doctor.findings import ERROR
from hpc_train.cli.doctor.probe import probe_in_a_rank
from hpc_train.host import processor
from hpc_train.mpi import runtime
from tests.programs import command, hpc_train, run

TOPICS = {"Python", "torch", "HDF5", "launcher", "MPI", "Horovod", "MPI-IO", "nodes and ranks",
          "binding", "devices"}  # fmt: skip


def topics(done):
    tree = json.loads(done.stdout[done.stdout.index("{") :])
    return tree, {finding["topic"]: finding for finding in tree["findings"]}


@pytest.fixture(scope="module")
def alone():
    """The answer of `hpc-train doctor` without a launcher."""
    done = run(*hpc_train("doctor", "--json"))
    assert done.returncode == 0
    return topics(done)


def test_alone_it_looks_at_everything_and_says_that_the_main_job_runs(alone):
    tree, found = alone
    assert tree["ok"]
    assert found.keys() >= TOPICS
    assert "MPI_THREAD_MULTIPLE" in found["MPI"]["text"]
    if found["devices"]["text"] == "CPU only":
        assert str(processor.here().kind) in found["matrix products"]["text"]
    assert all(finding["remedy"] for finding in tree["findings"] if finding["status"] != "ok")


@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
def test_it_says_what_horovod_is_built_against_and_that_it_shares_libmpi(alone):
    _, found = alone
    assert found["Horovod"]["status"] == "ok"
    assert "for torch" in found["Horovod"]["text"]
    assert "for mpi4py and Horovod" in found["libmpi"]["text"]


def test_under_a_launcher_rank_0_reports_for_all():
    done = run(*command("mpirun", 3, "doctor", "--json"))
    assert done.returncode == 0, done.stdout + done.stderr
    tree, found = topics(done)
    assert [rank["rank"] for rank in tree["ranks"]] == [0, 1, 2]
    assert "started by Open MPI" in found["launcher"]["text"]
    assert found["nodes and ranks"]["text"].startswith("1 node, 3 ranks (")
    text = run(*command("mpirun", 2, "doctor")).stdout
    assert text.count("the main job runs here") == 1


@pytest.mark.skipif(not shutil.which("ompi_info"), reason="the MPI is another one")
@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("OMPI_MCA_io", "", "ok"),
        ("OMPI_MCA_io", "^ompio", "ok"),
        ("OMPI_MCA_io", "ompio", "warning"),
        ("OMPI_MCA_io_ompio_priority", "90", "warning"),
    ],
)
def test_it_knows_which_mpi_io_will_write_the_checkpoints(name, value, status, monkeypatch):
    """Jobs prefer ROMIO, as `start_runtime` asks for it."""
    monkeypatch.setenv(name, value)
    assert checks.mpi_io("Open MPI 4.1.8", checks.mpi_io_component()).status == status


def test_only_rank_0_starts_programs_and_none_after_mpi_has_started(monkeypatch):
    started = []
    monkeypatch.setattr(checks, "_output", lambda command: started.append(command[0]) or "")
    monkeypatch.setattr(checks, "mpirun_version", lambda: started.append("mpirun") or "")
    monkeypatch.setattr(
        doctor_probe, "probe", lambda: started.append("MPI") or [{"error": "", "remedy": ""}]
    )
    for rank in ("0", "1"):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        examine()
    assert started == ["env", "mpirun", "MPI", "MPI"]


def test_a_rank_that_takes_long_is_not_taken_for_one_that_does_not_start(
    monkeypatch, tmp_path, nothing_beside_python
):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(doctor_probe, "RANK_PROBE_SECONDS", 0.3)
    version = "echo 'mpirun (Open MPI) 4.1.8'"
    put(tmp_path, "mpirun", f'[ "$1" = --version ] && {version} && exit; exec sleep 20')
    (failed,) = probe_in_a_rank()
    assert failed["error"] == "the rank that was started did not answer within 0.3 s"
    assert "try again" in failed["remedy"]


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


def test_an_mpi4py_that_does_not_load_is_told_with_its_file(tmp_path):
    """PYTHONPATH may have another one than the environment."""
    other = tmp_path / "mpi4py.py"
    other.write_text("raise ImportError('libmpi.so.12: cannot open')\n")
    done = run(*hpc_train("doctor"), environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert f"mpi4py does not load: libmpi.so.12: cannot open (of {other})" in done.stdout


def test_a_missing_horovod_is_a_warning_that_says_how_to_build_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    done = run(*hpc_train("doctor", "--json"), environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    finding = topics(done)[1]["Horovod"]
    assert finding["status"] == "warning"
    assert runtime.BUILD_HOROVOD in finding["remedy"]


@pytest.fixture
def nothing_beside_python(monkeypatch):
    """As in a virtual environment without an MPI of its own."""
    monkeypatch.setattr(sys, "executable", "/none/python")


def test_without_a_launcher_it_says_what_launch_would_say(
    monkeypatch, tmp_path, nothing_beside_python
):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = checks.launchers()
    assert finding.status == ERROR
    assert "no launcher is here: tried mpiexec, mpirun" in finding.text


def test_a_launcher_beside_this_python_is_found_as_launch_finds_it():
    """The environment need not be activated."""
    path = "/usr/bin:/bin"
    if not Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun", path=path):
        pytest.skip("this environment has no MPI of its own, or the system has one")
    done = run(sys.executable, "-m", "hpc_train", "doctor", environ={"PATH": path})
    assert done.returncode == 0, done.stdout
    assert str(Path(sys.executable).with_name("mpirun")) in done.stdout
    assert "the main job runs here" in done.stdout


def put(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_launcher_that_is_used_is_not_named_beside_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("mpirun", "mpiexec"):
        put(tmp_path, name, "echo 'mpirun (Open MPI) 4.1.8'")
    told = checks.launchers()[0].text
    assert told == f"{tmp_path}/mpirun (mpirun (Open MPI) 4.1.8); also mpiexec"


def test_inside_a_slurm_job_it_starts_its_rank_by_srun(
    monkeypatch, tmp_path, nothing_beside_python
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4")
    answer = """[{"rank": 0}]"""
    mpis = 'case "$1" in --mpi=list) echo "none pmix pmi2";; --version) echo slurm 24.05;; *)'
    put(tmp_path, "srun", f"{mpis} echo \"$@\" > {tmp_path}/line; echo '{answer}';; esac")
    assert probe_in_a_rank() == [{"rank": 0}]
    words = (tmp_path / "line").read_text().split()
    assert words[:2] == ["--mpi=pmix", "--ntasks=1"]
    assert "srun (slurm 24.05)" in checks.launchers()[0].text


def test_it_tells_why_mpi_does_not_start_and_not_the_last_line(
    monkeypatch, tmp_path, nothing_beside_python
):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = ["----" * 15, "There are not enough slots available in the system.", "----" * 15]
    says = "; ".join(f"echo '{line}' >&2" for line in [*lines, "", "mpirun: exiting"])
    version = "echo 'mpirun (Open MPI) 4.1.8'"
    put(tmp_path, "mpirun", f'[ "$1" = --version ] && {version} && exit; {says}; exit 1')
    (failed,) = probe_in_a_rank()
    assert "not enough slots" in failed["error"]
    put(tmp_path, "mpirun", f'[ "$1" = --version ] && {version} && exit; echo no 1 >&2; echo 2 >&2')
    (failed,) = probe_in_a_rank()
    assert failed["error"] == "MPI does not start here: no 1"


AMD = [4, "AMD", "ROCm"]


@pytest.mark.parametrize(
    ("devices", "gpus", "build", "text", "remedy"),
    [
        ([], None, ["processors", ""], "CPU only", ""),
        (["MI250X"], [1, "AMD", "ROCm"], ["ROCm", ""], "MI250X", ""),
        (
            [],
            AMD,
            ["CUDA", "Found no NVIDIA driver on your system."],
            "n1 has 4 AMD GPUs, and torch is built for CUDA",
            "install torch for ROCm: docs/how-to/cluster.md",
        ),
        ([], AMD, ["processors", ""], "torch is built for processors", "install torch for ROCm"),
        (
            [],
            [4, "NVIDIA", "CUDA"],
            ["CUDA", "The NVIDIA driver on your system is too old"],
            "torch finds none, although it is built for CUDA: The NVIDIA driver on your system is",
            "the version of the node's driver",
        ),
        ([], AMD, ["", ""], "torch does not load", "install torch for ROCm"),
    ],
)
def test_gpus_that_torch_does_not_see_are_warned_of(devices, gpus, build, text, remedy):
    """A wheel of torch computes on the GPUs of one vendor."""
    (rank,) = [{"host": "n1", "devices": devices, "gpus": gpus, "build": build}]
    finding = checks.devices([rank])
    assert finding.status == ("warning" if remedy else "ok")
    assert text in finding.text
    assert remedy in finding.remedy


def test_two_mpi_libraries_in_one_process_are_an_error():
    rank = {"libmpi": ["/a/libmpi.so.40", "/b/libmpi.so.40"], "horovod": {}}
    (finding,) = checks.one_libmpi(rank)
    assert finding.status == ERROR
    assert "--rebuild" in finding.remedy


@pytest.mark.parametrize(
    ("cores", "warning"),
    [
        ({"a": ["0", "1"]}, ""),
        ({"a": ["01", "01"]}, ""),
        ({"a": ["0", "0"]}, "2 ranks on 1 core of a: they share cores"),
        ({"a": ["0", "1"], "b": ["0", "0"]}, "2 ranks on 1 core of b: they share cores"),
        ({"a": ["0", "0", "0", "01234567"]}, "3 ranks on 1 core of a: they share cores"),
        ({"a": ["0", "01", "01"]}, "3 ranks on 2 cores of a: they share cores"),
    ],
)
def test_ranks_that_share_cores_are_warned_of(cores, warning):
    finding = checks.binding(
        [{"host": host, "physical_cores": [*mine]} for host, all_of in cores.items()
         for mine in all_of]
    )  # fmt: skip
    assert finding.status == ("warning" if warning else "ok")
    assert warning in finding.text
    assert bool(finding.remedy) == bool(warning)


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
    (finding,) = checks.matrix_products(products(way, light, heavy))
    assert finding.status == ("warning" if remedy else "ok")
    assert remedy in finding.remedy
    for word in (way, "AMD with AVX2", f"{light:.2f}", f"{heavy:.2f}"):
        assert word in finding.text


def test_each_kind_of_host_has_its_own_finding():
    found = checks.matrix_products(
        products("torch", 0.8, 0.8) * 2 + products("torch", 1.5, 1.5, "Intel with AVX2")
    )
    assert [finding.status for finding in found] == ["ok", "warning"]


def test_without_onednn_there_is_nothing_to_compare():
    (finding,) = checks.matrix_products(products("torch", None, None))
    assert finding.status == "ok"
    assert "times as fast" not in finding.text


def test_a_torch_that_does_not_load_is_an_error_and_nothing_else_is_blamed(tmp_path):
    missing = "libcublas.so.12: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f"raise OSError('{missing}')\n")
    done = run(*hpc_train("doctor", "--json"), environ={"PYTHONPATH": str(tmp_path)})
    tree, found = topics(done)
    assert (done.returncode, tree["ok"]) == (1, False)
    assert found["torch"]["status"] == "error"
    assert f"OSError: {missing}" in found["torch"]["text"]
    assert "install torch again" in found["torch"]["remedy"]
    assert "matrix products" not in found
    assert "MPI_THREAD_MULTIPLE" in found["MPI"]["text"]
    assert found["MPI"]["status"] == "ok"
    assert "torch does not load" in found["Horovod"]["text"]
    assert missing not in str([one for topic, one in found.items() if topic != "torch"])


def test_nodes_are_counted_with_their_ranks():
    ranks = [{"host": host} for host in "abab"]
    assert checks.nodes(ranks).text == "2 nodes, 4 ranks (a: 2, b: 2)"
