"""The line for each launcher, and which one is chosen."""

from __future__ import annotations

import os
import re
import socket
import sys
from itertools import pairwise

import pytest

from hpc_train.errors import SetupError, UserError
from hpc_train.launch import launchers, lines
from hpc_train.launch.hosts import Host
from hpc_train.launch.lines import LaunchedJob

# What the programs print for --version, and what each of them is.
VERSIONS = {
    "open_mpi": "mpirun (Open MPI) 4.1.8\n",
    "open_mpi 5": "mpirun (Open MPI) 5.0.6\n",
    "hydra": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "intel_mpi": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024\n",
    "pals": "mpiexec version 1.8.0 revision 7d1b8a5 (built Mar  4 2025)\n",
}
TWO = [Host("n1", 4), Host("n2", 4)]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put programs into the only folder of PATH, which print a text."""

    def put(**texts):
        for name, text in texts.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", "/none/python")

    return put


def line(kind, **fields):
    job = LaunchedJob(["train"], **{"ranks": 8, "hosts": TWO, "cores": 8, "threads": 2, **fields})
    return {
        "open_mpi": lambda: lines.open_mpi("mpirun", job),
        "hydra": lambda: lines.hydra("mpiexec", job),
        "intel_mpi": lambda: lines.intel_mpi("mpiexec", job),
        "pals": lambda: lines.pals("mpiexec", job),
        "srun": lambda: lines.srun("srun", "pmix", job),
        "flux": lambda: lines.flux_run(["-o", "pmi=pmix"], job),
        "jsrun": lambda: lines.jsrun(job),
        "horovodrun": lambda: lines.horovodrun("horovodrun", job),
    }[kind]()


def test_ranks_are_bound_to_as_many_cores_as_they_have_threads():
    assert "--map-by ppr:4:node:PE=2 --bind-to core" in str(line("open_mpi"))
    assert "-hosts n1:4,n2:4 -bind-to core:2" in str(line("hydra"))
    assert "I_MPI_PIN_DOMAIN=omp" in str(line("intel_mpi"))
    assert "-n 8 --ppn 4 --hosts n1,n2 --depth 2 --cpu-bind depth" in str(line("pals"))
    text = str(line("srun"))
    assert "--mpi=pmix --ntasks=8 " in text
    assert " --nodes=2 '--nodelist=n[1-2]' " in text
    assert "--ntasks-per-node=4 --cpus-per-task=2 --cpu-bind=cores train" in text
    assert str(line("horovodrun")).endswith("horovodrun -np 8 -H n1:4,n2:4 train")
    text = str(line("flux"))
    assert text.startswith("flux run --tasks-per-node=4 --nodes=2 -o pmi=pmix --requires=host:n1,")
    assert text.endswith("--exclusive -o cpu-affinity=per-task train")
    resources = "-n 2 -r 1 -a 4 -c ALL_CPUS -g ALL_GPUS"
    assert str(line("jsrun")) == f"jsrun {resources} -b packed:2 -d packed train"


@pytest.mark.parametrize("fields", [{"cores": 2}, {"hosts": [Host("n1", 5), Host("n2", 3)]}])
def test_ranks_are_not_bound_where_cores_are_too_few_or_hosts_uneven(fields):
    assert "--bind-to none" in str(line("open_mpi", **fields))
    assert "-bind-to none" in str(line("hydra", **fields))
    assert "--cpu-bind none" in str(line("pals", **fields))
    assert "--cpu-bind=none" in str(line("srun", **fields))
    if "cores" in fields:
        assert "cpu-affinity=off" in str(line("flux", **fields))
        assert "-b none" in str(line("jsrun", **fields))
    else:
        assert "--ntasks=8 --nodes=2" in str(line("flux", **fields))
        with pytest.raises(UserError, match="unequal numbers of ranks"):
            line("jsrun", **fields)


def test_ranks_on_other_hosts_get_the_variables(monkeypatch):
    given = ("HOROVOD_CYCLE_TIME", "HF_HOME", "DATA", "SECRET")
    own = (
        "HOSTNAME",
        "SHLVL",
        "TMPDIR",
        "SSH_TTY",
        "SLURM_PROCID",
        "PBS_JOBID",
        "OMPI_ARGV",
        "a b",
    )
    for name in (*given, *own, "PALS_RANKID", "BASH_FUNC_module%%", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "hidden")
    words = line("open_mpi", environ={"OMP_NUM_THREADS": "2"}).words
    named = {b for a, b in pairwise(words) if a == "-x"}
    assert named >= {*given, "OMP_NUM_THREADS", "PATH"}
    assert not named & {*own, "PALS_RANKID", "BASH_FUNC_module%%", "CUDA_VISIBLE_DEVICES"}
    assert "hidden" not in " ".join(words), "all users of a host see the line"
    assert "-x" not in line("open_mpi", hosts=[]).words


@pytest.mark.parametrize("kind", VERSIONS)
def test_programs_are_told_apart_by_what_they_say(programs, kind):
    programs(mpirun=VERSIONS[kind], mpiexec=VERSIONS[kind])
    assert launchers.find_launcher(None, None).kind == kind.partition(" ")[0]


def test_the_launcher_of_the_machine_is_taken_unless_another_is_named(programs):
    programs(mpirun=VERSIONS["open_mpi"], mpiexec=VERSIONS["pals"])
    assert launchers.find_launcher(None, "pbs").kind == "pals", "the machine's own comes first"
    assert launchers.find_launcher("mpirun", "pbs").kind == "open_mpi", "unless one is named"
    with pytest.raises(SetupError, match="srun is not here"):
        launchers.find_launcher("srun", None)


@pytest.mark.parametrize(
    ("mpi", "plugins", "taken"),
    [
        ("open_mpi", "none\npmi2\npmix\npmix_v4", "--mpi=pmix"),
        ("open_mpi", "none\npmi2", "mpirun"),
        ("hydra", "none\npmi2\npmix", "--mpi=pmi2"),
        ("hydra", "none\ncray_shasta\npmi2", "--mpi=cray_shasta"),
    ],
)
def test_srun_is_taken_in_a_job_where_it_can_start_this_mpi(programs, mpi, plugins, taken):
    programs(mpirun=VERSIONS[mpi], srun=plugins)
    found = launchers.find_launcher(None, "slurm")
    assert taken in str(found.make(LaunchedJob(["train"], 2)))


@pytest.mark.parametrize(
    ("mpi", "components", "taken"),
    [
        ("open_mpi", "mca:pmix:flux:version", []),
        ("open_mpi", "mca:pmix:isolated:version", ["-o", "pmi=pmix"]),
        ("open_mpi 5", "", ["-o", "pmi=pmix"]),
        ("hydra", "", []),
    ],
)
def test_flux_is_told_how_ranks_of_this_mpi_find_each_other(programs, mpi, components, taken):
    programs(flux="commands: 0.88.0", ompi_info=components, mpirun=VERSIONS[mpi])
    found = launchers.find_launcher(None, "flux")
    words = found.make(LaunchedJob(["train"], 2, cores=2)).words
    assert words[:4] == ["flux", "run", "--tasks-per-node=2", "--nodes=1"]
    assert words[4:] == [*taken, "--exclusive", "-o", "cpu-affinity=per-task", "train"]


def test_jsrun_is_taken_in_an_lsf_job_that_has_it(programs):
    programs(mpirun=VERSIONS["open_mpi"])
    assert launchers.find_launcher(None, "lsf").kind == "open_mpi"
    with pytest.raises(SetupError, match="jsrun is not here"):
        launchers.find_launcher("jsrun", "lsf")
    programs(mpirun=VERSIONS["open_mpi"], jsrun="")
    found = launchers.find_launcher(None, "lsf")
    assert found.kind == "jsrun"
    assert "cannot leave one out" in found.note
    assert launchers.find_launcher(None, "slurm").kind == "open_mpi"


@pytest.mark.parametrize("kind", ["open_mpi 5", "hydra"])
def test_where_horovodrun_breaks_mpirun_is_used_and_said_so(programs, kind):
    programs(mpirun=VERSIONS[kind], horovodrun="")
    found = launchers.find_launcher("horovodrun", None)
    assert found.kind == kind.partition(" ")[0]
    assert "mpirun is used" in found.note
    assert re.search(r"Open MPI\) 5|Hydra", found.note)


def test_horovodrun_is_used_where_it_works(programs):
    programs(mpirun=VERSIONS["open_mpi"], horovodrun="")
    assert launchers.find_launcher("horovodrun", None).kind == "horovodrun"


@pytest.fixture
def beside(programs, monkeypatch, tmp_path):
    """Put Open MPI's programs beside this Python, in a folder that PATH does not have."""
    folder = tmp_path / "environment"
    folder.mkdir()
    programs(mpirun=VERSIONS["open_mpi"], mpiexec=VERSIONS["open_mpi"])
    for name in ("mpirun", "mpiexec"):
        (tmp_path / name).rename(folder / name)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def test_a_launcher_beside_this_python_is_found(beside):
    found = launchers.find_launcher(None, None)
    assert found.make(LaunchedJob(["train"], 2)).words[0] == str(beside / "mpirun")
    assert not found.note


def test_open_mpi_of_this_environment_is_started_by_its_path(beside, monkeypatch):
    """By its name, it would not find its own files on other hosts."""
    monkeypatch.setenv("PATH", str(beside), prepend=os.pathsep)
    found = launchers.find_launcher(None, "pbs")
    assert found.make(LaunchedJob(["train"], 2)).words[0] == str(beside / "mpirun")


def test_an_unknown_launcher_on_the_path_is_never_replaced_silently(
    beside, programs, tmp_path, monkeypatch
):
    programs(mpiexec="mpiexec of somebody else", mpirun="mpirun of somebody else")
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    found = launchers.find_launcher(None, "pbs")
    assert found.make(LaunchedJob(["train"], 2)).words[0] == str(beside / "mpirun")
    assert f"{tmp_path}/mpirun is no launcher that is known" in found.note
    assert str(beside / "mpirun") in found.note
    with pytest.raises(SetupError, match=f"{tmp_path}/mpiexec is no launcher that is known") as no:
        launchers.find_launcher("mpiexec", "pbs")
    assert "'mpiexec of somebody else'" in str(no.value)


def test_pals_is_known_by_its_folder_too(programs, tmp_path):
    (tmp_path / "opt/cray/pals/1.8/bin").mkdir(parents=True)
    programs(mpiexec="words of a later version")
    target = tmp_path / "opt/cray/pals/1.8/bin/mpiexec"
    (tmp_path / "mpiexec").rename(target)
    (tmp_path / "mpiexec").symlink_to(target)
    assert launchers.find_launcher(None, "pbs").kind == "pals"


@pytest.mark.parametrize("wanted", [None, "mpirun", "mpiexec"])
def test_intel_mpis_mpiexec_is_started_and_not_its_script(programs, tmp_path, wanted):
    """mpirun is a shell script, which a signal ends before mpiexec.hydra can pass it on."""
    intel = dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra"), VERSIONS["intel_mpi"])
    programs(**intel)
    found = launchers.find_launcher(wanted, None)
    assert found.kind == "intel_mpi"
    assert found.make(LaunchedJob(["train"], 2)).words[0] == str(tmp_path / "mpiexec.hydra")


def test_srun_starts_intel_mpi_only_with_slurms_library(programs, monkeypatch):
    """Without it, each rank is alone."""
    programs(mpirun=VERSIONS["intel_mpi"], srun="none\npmi2\npmix")
    monkeypatch.delenv("I_MPI_PMI_LIBRARY", raising=False)
    assert launchers.find_launcher(None, "slurm").kind == "intel_mpi"
    with pytest.raises(SetupError, match="I_MPI_PMI_LIBRARY is not set"):
        launchers.find_launcher("srun", "slurm")
    monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/usr/lib64/libpmi2.so")
    found = launchers.find_launcher(None, "slurm")
    assert "--mpi=pmi2" in str(found.make(LaunchedJob(["train"], 2)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("open_mpi", "mpirun -np 8 --map-by ppr:4:node:PE=2 --bind-to core"),
        ("open_mpi 5", "mpirun -np 8 --map-by ppr:4:node:PE=2 --bind-to core"),
        ("hydra", "mpirun -n 8 -ppn 4 -bind-to core:2"),
        (None, "mpirun -np 8"),
    ],
)
def test_mpirun_in_a_batch_script_gives_each_rank_its_cores(programs, kind, words):
    """Of its own, Open MPI binds a rank to one core, with all its threads."""
    programs(**({"mpirun": VERSIONS[kind]} if kind else {}))
    assert " ".join(launchers.mpirun_of_batch(8, per_node=4, threads=2)) == words


def test_a_long_list_of_nodes_is_one_argument(programs):
    """Linux takes arguments of at most 128 KiB."""
    hosts = [Host(f"nid{number:06}", 8) for number in range(1, 12001)]
    words = line("srun", hosts=hosts, ranks=96000).words
    assert "--nodelist=nid[000001-012000]" in words


def test_without_any_launcher_the_error_says_what_was_tried(programs):
    programs()
    with pytest.raises(SetupError, match="mpiexec, mpirun"):
        launchers.find_launcher(None, None)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ""),
        (
            {"cores": 6},
            "4 ranks of 2 threads need 8 cores, and a host has 6 for the job",
        ),
        ({"hosts": [Host("n1", 5), Host("n2", 3)]}, "not all hosts have the same number of ranks"),
    ],
)
def test_ranks_that_are_not_bound_are_told_so(fields, told):
    job = LaunchedJob(["train"], **{"ranks": 8, "hosts": TWO, "cores": 8, "threads": 2, **fields})
    assert told in job.why_not_bound
    assert bool(job.why_not_bound) != job.binds


def test_threads_are_what_the_user_says_or_a_share_of_the_cores():
    assert launchers.threads_of({}, 8, 2) == 4
    assert launchers.threads_of({}, 2, 8) == 1
    assert launchers.threads_of({"OMP_NUM_THREADS": "3"}, 8, 2) == 3
    assert launchers.threads_of({"SLURM_CPUS_PER_TASK": "2"}, 8, 2) == 2
    assert launchers.threads_of({"SLURM_CPUS_PER_TASK": "8"}, 8, 2) == 4, "hardware threads"


@pytest.mark.parametrize(
    ("variables", "answer", "cores"),
    [
        ({"JOB_CPUS_PER_NODE": "128(x2),64"}, "batch 2 32 1 64", 64),
        ({"JOB_CPUS_PER_NODE": "128(x2)"}, "batch 2 32 2 128", 64),
        ({"JOB_CPUS_PER_NODE": "64(x2)"}, "batch 2 32 2 64", 64),
        ({"JOB_CPUS_PER_NODE": "128", "THREADS_PER_CORE": "1"}, "batch 2 32 2 128", 64),
        ({"JOB_CPUS_PER_NODE": "8", "THREADS_PER_CORE": "1"}, "batch 2 32 2 128", 8),
        ({"JOB_CPUS_PER_NODE": "8"}, "", 8),
    ],
)
def test_salloc_on_the_login_host_counts_the_cores_of_the_job(programs, variables, answer, cores):
    programs(sinfo=answer)
    environ = {f"SLURM_{name}": value for name, value in variables.items()}
    assert launchers.cores_of_hosts({**environ, "SLURM_JOB_PARTITION": "batch"}) == cores


def test_a_host_of_a_slurm_job_has_no_more_cores_than_the_job_has_on_it(monkeypatch):
    monkeypatch.setattr(launchers, "cores_here", lambda **_: 4)
    for cpus, cores in ((2, 2), (8, 4)):
        environ = {"SLURM_JOB_CPUS_PER_NODE": str(cpus), "SLURMD_NODENAME": "n1"}
        assert launchers.cores_of_hosts(environ) == cores
    assert launchers.cores_of_hosts({}) == 4


def test_a_container_has_the_cores_of_its_quota(monkeypatch):
    monkeypatch.setattr(launchers, "physical_cores", lambda _: {*range(64)})
    monkeypatch.setattr(launchers, "cpu_quota", lambda: 2.5)
    assert launchers.cores_here() == 3
    here = socket.gethostname()
    for hosts, cores in (([], 3), (["a", f"{here}.a.b"], 3), (["a", "b"], 64)):
        assert launchers.cores_of_hosts({}, hosts) == cores, "the others have their own"
