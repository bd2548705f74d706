"""`hpc-train submit` and `cancel` as a user calls them, with a scheduler that takes notes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_train.errors import UserError
from hpc_train.launch.sites import Queue, SiteContainers, filled, load_site
from tests.cli.desk import QSTAT, Desk
from tests.programs import ENVIRON, hpc_train, only_line, run
from tests.waiting import PATIENCE


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_a_job_is_queued_with_its_script_beside_its_outputs(desk):
    desk.scheduler("sbatch")
    options = ["--nodes", "2", "--ranks_per_node", "4", "--time", "00:10:00", "--run.seed", "3"]
    done = desk.run("submit", "my.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    script = desk.folder / "runs/my/job.sh"
    assert desk.calls("sbatch") == [f"--parsable {script}"]
    text = script.read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    command = next(line for line in text.splitlines() if line.startswith("command="))
    words = shlex.split(command.removeprefix("command=(").removesuffix(")"))
    assert words[-4:] == ["train", "runs/my/job.yaml", "--run.seed", "3"]
    assert os.access(script, os.X_OK)
    if sys.prefix != sys.base_prefix:
        assert f". {sys.prefix}/bin/activate || return\n" in text, (
            "whether or not it is activated here"
        )


def test_a_dry_run_queues_and_writes_nothing(desk):
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", "--nodes", "2", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash -l\n#PBS -N my\n#PBS -l select=2:ncpus=1:mpiprocs=1")
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("time", ["36:00:00", "1-12:00:00", "36h", "1d12h"])
def test_a_time_limit_has_several_forms(desk, time):
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", "--time", time, "--dry_run")
    assert "#SBATCH --time=36:00:00\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ([], True),
        (["--site", "frontier", "--account", "me"], False),  # its profile counts as the site does
        (["--directive=--hint=multithread"], False),  # SLURM takes only one of the two
        (["--directive=--threads-per-core=2"], False),
    ],
)
def test_cores_of_a_slurm_job_are_cores_on_hyperthreaded_nodes_too(desk, words, there):
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", *words, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert ("#SBATCH --threads-per-core=1\n" in done.stdout) == there


def test_mpirun_gives_each_rank_its_cores(desk):
    path = desk.folder / "bin/mpirun"
    path.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.6'\n")
    path.chmod(0o755)
    words = ["--launcher", "mpirun", "--nodes", "2", "--ranks_per_node", "2", "--threads", "8"]
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", *words, "--dry_run")
    line = "launcher=(mpirun -np 4 --map-by ppr:2:node:PE=8 --bind-to core)"
    assert f"{line}\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--directive", "--qos=debug", "--directive", "-l a=b", "--directive", "-x"],
        ["--directive", "--qos=debug", "--name", "it", "--directive=-l a=b", "--directive", "-x"],
        ["--directive=--qos=debug", "--directive", "-l a=b", "--directive=-x", "--run.seed", "3"],
    ],
)
def test_directives_may_begin_with_dashes_and_add_up(desk, words):
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", *words, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --qos=debug\n#SBATCH -l a=b\n#SBATCH -x\n" in done.stdout
    assert ("--run.seed" in done.stdout) == ("--run.seed" in words)


def test_setup_lines_and_axes_of_a_sweep_add_up(desk):
    words = [
        "--setup",
        "-x",
        "module load a",
        "--sweep",
        "run.seed=1,2",
        "--setup",
        "module load b",
    ]
    words += ["--sweep", "optimizer.lr=1e-3,1e-4", "--scheduler", "slurm", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert (
        "    -x || return\n    module load a || return\n    module load b || return\n"
        in done.stdout
    )
    assert "#SBATCH --array=0-3\n" in done.stdout


def test_an_option_that_takes_text_needs_some(desk):
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", "--dry_run", "--directive")
    assert "--directive: expected one argument" in only_line(done.stderr)


def test_options_may_have_dashes_for_underscores(desk):
    words = ["--ranks-per-node", "3", "--dry-run", "--max-requeues=7", "--scheduler", "slurm"]
    done = desk.run("submit", "my.yaml", *words)
    assert "#SBATCH --ntasks-per-node=3\n" in done.stdout, done.stderr
    assert "max_requeues=7\n" in done.stdout


PAGE = Path(__file__).parents[2] / "docs/how-to/jobs.md"
ROWS = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `--")]


@pytest.mark.parametrize("row", [row for row in ROWS if " " in row])
def test_options_of_the_documentation_can_be_given_as_they_stand_there(desk, row):
    words = ["2" if word == "N" else word for word in shlex.split(row)]
    scheduler = "pbs" if words[0] == "--resources" else "slurm"
    words += ["--sweep", "run.seed=1,2"] if words[0] == "--tasks_at_once" else []
    (desk.folder / "data/text").mkdir(parents=True, exist_ok=True)
    (desk.folder / "it.sif").write_bytes(bytes(32) + b"SIF_MAGIC")
    done = desk.run("submit", "my.yaml", *words, "--scheduler", scheduler, "--dry_run")
    assert done.returncode == 0, done.stderr


def test_a_run_directory_is_expanded_and_data_of_the_job_need_not_be_here(desk):
    desk.scheduler("sbatch")
    text = "run: {dir: '$HERE/runs/my'}\ndata: {path: '$NODE_DISK/data'}\n"
    (desk.folder / "my.yaml").write_text(text)
    done = desk.run("submit", "my.yaml", HERE=str(desk.folder))
    assert done.returncode == 0, done.stderr
    assert (desk.folder / "runs/my/job.sh").exists()
    assert "HERE is not set" in only_line(desk.run("submit", "my.yaml").stderr)


@pytest.mark.parametrize("site", ["frontier", "polaris", "lumi", "gadi"])
def test_a_sites_line_is_restarted_if_launch_starts_it(desk, site):
    words = ["submit", "my.yaml", "--site", site, "--account", "me", "--dry_run"]
    words += ["--queue", "q", "--nodes", "2", "--directive", "-l storage=x"]
    alone = launcher_of_script(desk.run(*words).stdout)
    started = launcher_of_script(desk.run(*words, "--launcher", "launch").stdout)
    assert started[1:5] == ["-m", "hpc_train", "launch", "--line"]
    profile = load_site(site)
    numbers = {"ranks_per_node": profile.ranks_per_node, "threads": profile.threads}
    kept = {"nodes": "{nodes}", "ranks": "{ranks}"}  # a restart may have fewer
    assert shlex.split(started[5]) == filled(profile.launcher, numbers | kept, "the line")
    ranks = 2 * profile.ranks_per_node
    whole = {**numbers, "nodes": 2, "ranks": ranks}
    assert alone == filled(profile.launcher, whole, "the line")
    each = ["--ranks_per_node", str(profile.ranks_per_node)]  # PBS may tell one slot for each node
    assert started[6:] == [*each, "--max_restarts", "3", "--"]
    fewer = desk.run(*words, "--launcher", "launch", "--max_restarts", "5")
    assert launcher_of_script(fewer.stdout)[8:10] == ["--max_restarts", "5"]


def test_without_a_sites_line_launch_is_the_default(desk):
    words = ["submit", "my.yaml", "--scheduler", "slurm", "--dry_run"]
    assert desk.run(*words).stdout == desk.run(*words, "--launcher", "launch").stdout


def launcher_of_script(text):
    line = next(line for line in text.splitlines() if line.startswith("launcher="))
    return shlex.split(line.removeprefix("launcher=(").removesuffix(")"))


def test_a_chain_waits_for_the_job_before(desk):
    desk.scheduler("sbatch")
    done = desk.run("submit", "my.yaml", "--chain", "3")
    assert done.stdout.split() == ["1", "2", "3"]
    assert "requeue_by=never" in (desk.folder / "runs/my/job.sh").read_text()
    waits = "--parsable --dependency=afternotok:{} --kill-on-invalid-dep=yes"
    assert desk.calls("sbatch")[1].startswith(waits.format(1))
    assert desk.calls("sbatch")[2].startswith(waits.format(2))


def test_a_sweep_is_an_array(desk):
    words = ["--sweep", "optimizer.lr=1e-3,1e-4", "run.seed=1,2", "--scheduler", "slurm"]
    done = desk.run("submit", "my.yaml", *words, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-3\n" in done.stdout
    assert "    2) command+=(--optimizer.lr 1e-4 --run.seed 1) ;;\n" in done.stdout
    desk.scheduler("sbatch")
    desk.command("squeue", "echo '1_0|1|1|PENDING|None||'")
    assert desk.run("submit", "my.yaml", *words).returncode == 0
    lines = desk.run("status", "runs/my").stdout.splitlines()
    assert lines[2:4] == [
        f"    task-{number} --optimizer.lr 1e-3 --run.seed {seed}: has not begun"
        for number, seed in enumerate((1, 2))
    ]


def test_another_cluster_is_named_by_a_variable(desk):
    words = ["--scheduler", "slurm", "--dry_run", "--directive=--clusters=cm4"]
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 2
    assert "--clusters=cm4 would queue the job on another cluster" in only_line(done.stderr)


def test_the_name_of_a_job_has_only_what_schedulers_take(desk):
    for name, told in (("a b", "run.dir 'runs/a b'"), ("ä", "run.dir 'runs/ä'")):
        done = desk.run(
            "submit", "my.yaml", "--scheduler", "slurm", "--run.dir", f"runs/{name}", "--dry_run"
        )
        assert done.returncode == 2
        assert told in only_line(done.stderr)
    more = ["--run.dir", "runs/%j", "--dry_run"]
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", *more)
    assert "#SBATCH --output=runs/%%j/%x-%j.out\n" in done.stdout
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", "--run.dir", ".", "--dry_run")
    assert f"#SBATCH --job-name={desk.folder.name}\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--scheduler local needs none"),
        (["--scheduler", "slurm"], "sbatch is not here"),
        (["--scheduler", "lsf"], "bsub is not here"),
        (["--scheduler", "sge"], "--scheduler"),
        (["--scheduler", "torque", "--name", "1st"], "of which the first is a letter"),
        (["--scheduler", "slurm", "--tasks_at_once", "2"], "--tasks_at_once is for a sweep"),
        (["--scheduler", "slurm", "--directive", '--comment="a'], "pairs of double quotes"),
        (["--scheduler", "slurm", "--directive", "#SBATCH --qos=x"], "without #SBATCH"),
        (["--scheduler", "slurm", "--directive", "qos=debug"], "an option that begins with -"),
        (["--scheduler", "local", "--nodes", "2"], "this machine is one node"),
        (["--scheduler", "local", "--queue", "x"], "--queue means nothing to local"),
        (["--scheduler", "lsf", "--memory", "64GB"], "in its own unit"),
        (["--scheduler", "flux", "--mail", "a@b"], "--mail means nothing to flux"),
        (["--scheduler", "mpijob"], "give --image"),
        (["--scheduler", "slurm", "--stage_data", "text"], "give --stage"),
        (["--scheduler", "local", "--name", "a/b"], "leave out slashes"),
        (["--scheduler", "local", "--run.dir", ""], "run.dir is empty"),
        (["--scheduler", "slurm", "--stage", "--stage_data", "nowhere"], "is not a folder"),
        (["--scheduler", "slurm", "--stage", "--image", "it.sif"], "leave out --stage"),
        (["--scheduler", "slurm", "--stage", "--stage_to", "disk"], "full path"),
        (["--scheduler", "slurm", "--stage", "--stage_to", ""], "full path"),
        (["--scheduler", "pbs", "--chain", "2"], "--chain means nothing to pbs"),
        (["--scheduler", "slurm", "--chain", "2", "--sweep", "run.seed=1,2"], "--sweep"),
        (["--scheduler", "slurm", "--chain", "2", "--requeue_by", "submit"], "--requeue_by"),
        (["--scheduler", "torque", "--requeue_by", "requeue"], "give --requeue_by submit"),
        (
            ["--scheduler", "slurm", "--requeue_by", "never", "--max_requeues", "3"],
            "--max_requeues",
        ),
        (["--scheduler", "slurm", "--chain", "2", "--max_requeues", "3"], "--max_requeues"),
        (["--scheduler", "mpijob", "--image", "x", "--time", "01:00:00"], "--time"),
        (["--scheduler", "mpijob", "--image", "x", "--account", "me"], "--account"),
        (["--scheduler", "mpijob", "--image", "x", "--setup", "true"], "--setup"),
        (["--scheduler", "mpijob", "--image", "x", "--sweep", "run.seed=1"], "--sweep"),
        (["--scheduler", "slurm", "--launcher", "srun", "--max_restarts", "2"], "--max_restarts"),
        (["--scheduler", "slurm", "--time", "soon"], "--time is 'soon'"),
        (["--scheduler", "slurm", "--time", "30"], "--time is '30': give HH:MM:SS, D-HH:MM:SS or"),
        (["--scheduler", "slurm", "--time", "00:00:00"], "--time is '00:00:00'"),
        (["--scheduler", "slurm", "--nodes", "0"], "nodes"),
        (["--scheduler", "slurm", "--name", "a b"], "'a b' cannot be used"),
        (["--scheduler", "slurm", "--sweep", "run.sed=1"], "did you mean run.seed"),
        (["--scheduler", "slurm", "--sweep", "run.seed"], "write section.key=VALUE,VALUE"),
        (["--scheduler", "slurm", "--sweep", "run.dir=a,b"], "a directory of its own"),
        (["--scheduler", "slurm", "--sweep", "run.seed=1,2", "run.seed=3"], "twice"),
        (["--scheduler", "slurm", "--sweep", "optimizer.lr=1e-3,abc"], "optimizer.lr"),
        (
            ["--scheduler", "slurm", "--sweep", "optimizer.lr=1e-3,0.001"],
            "again with --optimizer.lr",
        ),
        (["--scheduler", "pbs", "--sweep", "run.seed=1"], "a single task"),
        (
            ["--scheduler", "pbs", "--launcher", "srun"],
            "srun is for SLURM, and the scheduler is pbs",
        ),
        (
            ["--scheduler", "torque", "--launcher", "mpirun", "--threads", "2"],
            "slots of torque are cores",
        ),
        (
            ["--site", "lumi", "--account", "x", "--threads", "2"],
            "--threads cannot be 2: leave it out for 7",
        ),
        (["--scheduler", "slurm", "--run.sede", "1"], "did you mean --run.seed"),
        (["--site", "nowhere"], "there is no site profile nowhere: take archer2, aurora"),
        (["--site", "frontier"], "give --account"),
        (["--site", "frontier", "--scheduler", "pbs", "--account", "x"], "frontier has slurm"),
    ],
)
def test_mistakes_are_one_line(desk, words, message):
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)
    assert not (desk.folder / "runs").exists()


def test_an_mpijob_is_written(desk):
    words = ["--scheduler", "mpijob", "--image", "x:1", "--nodes", "2", "--ranks_per_node", "4"]
    done = desk.run(
        "submit", "my.yaml", *words, "--threads", "3", "--max_requeues", "7", "--dry_run"
    )
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    assert spec["slotsPerWorker"] == 4
    assert spec["runPolicy"]["backoffLimit"] == 7
    worker = spec["mpiReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 2
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == 12
    assert "--cores 12 " in _words_of_launcher(spec), "its own pod has others"


def test_a_profile_of_kubernetes_has_the_numbers_of_a_job(desk):
    profile = "scheduler: mpijob\nranks_per_node: 4\nthreads: 2\ngpus_per_node: 4\n"
    (desk.folder / "k.yaml").write_text(f"{profile}gpu_option: amd.com/gpu\n")
    words = ["--site", "k.yaml", "--image", "x:1", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    worker = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert spec["slotsPerWorker"] == 4
    limits = worker["resources"]["limits"]
    assert (limits["cpu"], limits["amd.com/gpu"]) == (8, 4)
    assert "--cores 8 " in _words_of_launcher(spec)
    (desk.folder / "k.yaml").write_text(f"{profile}environ: {{OMP_NUM_THREADS: 8}}\n")
    spec = yaml.safe_load(desk.run("submit", "my.yaml", *words).stdout)["spec"]
    assert "--cores 32 " in _words_of_launcher(spec), "the threads that its ranks will have"


def _words_of_launcher(spec):
    pod = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return " ".join(pod["containers"][0]["command"])


def test_a_run_directory_that_cannot_be_made_is_one_line(desk):
    desk.scheduler("sbatch")
    done = desk.run("submit", "my.yaml", "--run.dir", "/proc/no/such")
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert "run.dir /proc/no/such cannot be written (No such file or directory: /proc/no)" in line


def test_a_record_of_jobs_that_may_not_be_written_is_named(desk):
    desk.scheduler("sbatch")
    run = desk.folder / "runs/my"
    run.mkdir(parents=True)
    (run / "jobs.jsonl").symlink_to("/proc/no/such")
    done = desk.run("submit", "my.yaml")
    assert done.returncode == 2
    assert "cannot be written (No such file or directory: runs/my/jobs.jsonl)" in done.stderr
    assert not (desk.folder / "sbatch.calls").exists()


def test_a_script_is_replaced_with_the_rights_of_the_umask(desk):
    """It may be another group member's, who may not write into it."""
    desk.scheduler("sbatch")
    run = desk.folder / "runs/my"
    run.mkdir(parents=True)
    (run / "old").write_text("old")
    (run / "job.sh").hardlink_to(run / "old")
    before = os.umask(0o027)
    try:
        done = desk.run("submit", "my.yaml")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    assert (run / "old").read_text() == "old"
    assert (run / "job.sh").stat().st_mode & 0o777 == 0o750


def test_words_of_another_language_are_written_where_the_locale_lacks_their_letters(desk):
    desk.scheduler("sbatch")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["--scheduler", "slurm", "--run.dir", "r", "--", "python", "größe.py"]
    done = desk.run("submit", *words, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "command=(python 'größe.py')\n".encode() in (desk.folder / "r/job.sh").read_bytes()


def test_a_run_directory_that_cannot_be_written_is_named_and_nothing_is_queued(desk):
    desk.scheduler("qsub")
    run = desk.folder / "runs/my"
    (run / "job.yaml").mkdir(parents=True)
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs")
    assert done.returncode == 2
    line = "run.dir runs/my cannot be written (Is a directory: "
    assert line in done.stderr
    assert not (desk.folder / "qsub.calls").exists()


def test_a_job_loads_the_modules_of_the_submitting_shell(desk):
    """PBS gives a job no variable of that shell."""
    shell = {"LOADEDMODULES": "gcc/13:openmpi/5.0", "MODULEPATH": "/sw/a b:/me/modules"}
    words = ["submit", "my.yaml", "--scheduler", "pbs", "--dry_run"]
    text = desk.run(*words, **shell).stdout
    path, load = (
        "    export MODULEPATH='/sw/a b:/me/modules' || return\n",
        "    module load gcc/13 openmpi/5.0 || return\n",
    )
    assert text.index(path) < text.index(load)
    own = desk.run(*words, **shell, HPC_TRAIN_ROOT="/my own").stdout
    prefix = "    export HPC_TRAIN_PREFIX='/my own' || return\n"  # our module takes it again
    assert 0 < own.index(prefix) < own.index(load)
    assert load not in desk.run(*words, "--setup", "true", **shell).stdout
    assert (
        load
        not in desk.run(
            *words[:2], "--site", "polaris", "--account", "a", "--dry_run", **shell
        ).stdout
    )


@pytest.mark.parametrize("program", ["", "conda"])
def test_a_conda_environment_without_the_path_of_conda_comes_first_on_the_jobs_path(desk, program):
    shell = {"CONDA_PREFIX": sys.prefix, "CONDA_EXE": program}
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", "--dry_run", **shell)
    assert f"    export PATH={sys.prefix}/bin:$PATH || return\n" in done.stdout


def test_a_job_activates_the_conda_environment_of_the_submitting_shell(desk):
    base = desk.folder / "conda base"
    hook = base / "etc/profile.d/conda.sh"
    shell = {"CONDA_PREFIX": sys.prefix, "CONDA_EXE": str(base / "bin/conda")}
    words = ["submit", "my.yaml", "--scheduler", "pbs", "--dry_run"]
    assert f"    export PATH={sys.prefix}/bin:$PATH || return\n" in desk.run(*words, **shell).stdout
    hook.parent.mkdir(parents=True)
    hook.touch()
    text = desk.run(*words, **shell).stdout
    assert f"    . '{hook}' || return\n    conda activate {sys.prefix} || return\n" in text


def test_an_mpijob_brings_its_configuration_and_keeps_what_it_writes(desk):
    desk.command("kubectl", 'case "$1" in create) echo mpijob.kubeflow.org/my-x7f2a ;; esac')
    words = ["--scheduler", "mpijob", "--image", "x:1", "--nodes", "2", "--gpus", "4"]
    done = desk.run("submit", "my.yaml", *words, "--memory", "64")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "mpijob.kubeflow.org/my-x7f2a"
    run = desk.folder / "runs/my"
    apply, create = desk.calls("kubectl")
    assert apply == f"apply -f {run}/configmap.yaml"
    assert create == f"create -o name -f {run}/mpijob.yaml"
    config = yaml.safe_load((run / "configmap.yaml").read_text())
    assert config["data"]["job.yaml"] == (desk.folder / "my.yaml").read_text()
    spec = yaml.safe_load((run / "mpijob.yaml").read_text())["spec"]["mpiReplicaSpecs"]
    pod = spec["Launcher"]["template"]["spec"]
    assert pod["containers"][0]["args"][-2:] == ["--run.dir", "/data/runs/my"]
    assert pod["volumes"][-1]["configMap"]["name"] == config["metadata"]["name"]
    limits = spec["Worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["memory"]) == (4, "64G")
    done = desk.run("submit", "my.yaml", *words, "--run.dir", "/scratch/my")
    assert "not on the volume of the pods" in only_line(done.stderr)


def test_a_profiles_variables_are_the_texts_that_it_has(tmp_path):
    path = tmp_path / "my.yaml"
    variables = "{A: 16, B: true, C: 1:30, D: 1.10, E: 'x y', F: 2026-01-01}"
    path.write_text(
        f"scheduler: slurm\nenviron: {variables}\ncontainer: {{environ: {{A: 0x1f}}}}\n"
    )
    site = load_site(str(path))
    texts = ["16", "true", "1:30", "1.10", "x y", "2026-01-01"]
    assert list(site.environ.values()) == texts
    assert site.container.environ == {"A": "0x1f"}
    path.write_text("scheduler: slurm\nenviron:\nqueues:\n")
    assert (load_site(str(path)).environ, load_site(str(path)).queues) == ({}, [])
    shared = "environ: &all {A: 16, B: 1.10}\ncontainer: {environ: {<<: *all, C: off}}\n"
    path.write_text(f"scheduler: slurm\n{shared}")
    assert load_site(str(path)).container.environ == {"A": "16", "B": "1.10", "C": "off"}


def test_a_value_that_is_left_empty_in_a_profile_is_the_default(tmp_path):
    path = tmp_path / "my.yaml"
    queues = "queues: [{name: gpu, max_nodes: null, hours: }]"
    path.write_text(f"scheduler: slurm\nthreads:\n{queues}\ncontainer: {{options: , tool: }}\n")
    site = load_site(str(path))
    assert (site.queues, site.container) == ([Queue("gpu")], SiteContainers())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("queues: [gpu]", "queues[0] is 'gpu': write its keys below it, such as name:"),
        ("queues: [{name: , hours: 1}]", "queues[0]"),
        ("queues: {name: gpu}", "queues is {'name': 'gpu'}: write a list, such as [{name: gpu}]"),
        ("queues: [{name: a, hours: -1}]", "queues[0].hours is -1: it takes a number of 0 or more"),
        ("queues: [{name: a, min_nodes: 9, max_nodes: 3}]", "min_nodes 9 and max_nodes 3"),
        ("threads: 0", "threads is 0: it takes a whole number of 1 or more"),
        ("environ: {A: [1]}", "environ is {'A': [1]}: it takes text: put it in quotes"),
        ("needs: [x]", "needs is ['x']: it takes one of 'account', 'queue'"),
        ("launcher: srun", "launcher is 'srun': it takes a list, such as [a, b]"),
        ("launcher: [srun, '{rank}']", "launcher has {rank}: use {nodes}, {ranks}, "),
        ("launcher: [srun, '{ranks.x}']", "launcher has braces that cannot be filled ("),
        ("launcher: [srun, '{ranks[0]}']", "write {{ and }} for braces of your own"),
        ("environ: {1: a}", "environ has the name 1, which is no text"),
        ("threads: 1:30", "threads is '1:30': it takes a whole number of 1 or more"),
        ("queues: [{name: a, hours: 1:30}]", "queues[0].hours is '1:30': it takes a number"),
        ("queues: [{name: a, hours: 1:30.5}]", "queues[0].hours is '1:30.5': it takes a number"),
    ],
)
def test_a_wrong_value_in_a_profile_is_named(tmp_path, line, message):
    path = tmp_path / "my.yaml"
    path.write_text(f"scheduler: slurm\n{line}\n")
    with pytest.raises(UserError) as told:
        load_site(str(path))
    assert str(told.value).startswith(f"{path}: ")
    assert message in str(told.value)


def test_slots_of_torque_are_cores(desk):
    words = ["--scheduler", "torque", "--nodes", "4", "--ranks_per_node", "2", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words, "--threads", "3")
    assert "#PBS -l nodes=4:ppn=6\n" in done.stdout
    start = next(line for line in done.stdout.splitlines() if line.startswith("launcher="))
    assert "launch --ranks_per_node 2 --max_restarts 3" in start


def test_horovodrun_is_supervised_too(desk):
    words = ["--scheduler", "slurm", "--launcher", "horovodrun", "--max_restarts", "7", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert "launch --launcher horovodrun --max_restarts 7 --)" in done.stdout, done.stderr


SLURM_OPTIONS = {
    "--gpus": ("4", "--gpus-per-node=4"),
    "--memory": ("64GB", "--mem=64G"),
    "--qos": ("debug", "--qos=debug"),
    "--constraint": ("a100&nvme", "--constraint=a100&nvme"),
    "--reservation": ("r1", "--reservation=r1"),
    "--mail": ("me@x.org", "--mail-user=me@x.org\n#SBATCH --mail-type=END,FAIL"),
}


def test_slurm_is_asked_for_gpus_memory_and_the_like(desk):
    words = [word for option, (value, _) in SLURM_OPTIONS.items() for word in (option, value)]
    done = desk.run("submit", "my.yaml", "--scheduler", "slurm", *words, "--exclusive", "--dry_run")
    assert done.returncode == 0, done.stderr
    for _, line in [*SLURM_OPTIONS.values(), ("", "--exclusive")]:
        assert f"#SBATCH {line}\n" in done.stdout


def test_pbs_is_asked_for_gpus_and_memory_of_each_node_in_one_line(desk):
    words = ["--gpus", "4", "--memory", "64", "--nodes", "2", "--exclusive", "--mail", "me@x.org"]
    done = desk.run("submit", "my.yaml", "--scheduler", "pbs", *words, "--dry_run")
    line = "#PBS -l select=2:ncpus=1:mpiprocs=1:ompthreads=1:ngpus=4:mem=64gb\n"
    assert line in done.stdout, done.stderr
    for line in ("-l place=scatter:excl", "-m ae", "-M me@x.org"):
        assert f"#PBS {line}\n" in done.stdout
    words = ["--gpus", "4", "--memory", "64", "--nodes", "2", "--scheduler", "torque"]
    done = desk.run("submit", "my.yaml", *words, "--dry_run")
    assert "#PBS -l nodes=2:ppn=1:gpus=4\n" in done.stdout, done.stderr
    assert "#PBS -l mem=128gb\n" in done.stdout


def test_pbs_takes_resources_as_the_site_spells_them(desk):
    text = "select={nodes}:ncpus=32:ngpus=4:system=polaris"
    words = ["--scheduler", "pbs", "--nodes", "3", "--dry_run", "--resources"]
    done = desk.run("submit", "my.yaml", *words, text)
    assert "#PBS -l select=3:ncpus=32:ngpus=4:system=polaris\n" in done.stdout, done.stderr
    assert done.stdout.count("select=") == 1
    assert "place=" not in done.stdout, "ncpus=... alone goes with no place"
    for wrong in ("{foo}", "{nodes.x}"):
        done = desk.run("submit", "my.yaml", *words, wrong)
        assert done.returncode == 2
        assert "{memory_gb}" in only_line(done.stderr)
    done = desk.run("submit", "my.yaml", *words, text, "--gpus", "2")
    assert "give --resources with {gpus}" in only_line(done.stderr)
    done = desk.run("submit", "my.yaml", *words, "ngpus={gpus}", "--gpus", "2")
    assert "#PBS -l ngpus=6\n" in done.stdout, done.stderr
    polaris = ["--site", "polaris", "--account", "a", "--dry_run"]
    for words in ([], ["--exclusive"]):
        assert desk.run("submit", "my.yaml", *polaris, *words).stdout.count("-l place=") == 1


def test_nodes_of_a_pbs_job_are_different_ones(desk):
    words = ["submit", "my.yaml", "--scheduler", "pbs", "--dry_run", "--nodes"]
    assert "-l place=scatter\n" in desk.run(*words, "2").stdout
    assert "place=" not in desk.run(*words, "1").stdout
    own = ["--directive=-l place=pack:group=switch"]
    assert desk.run(*words, "2", *own).stdout.count("-l place=") == 1


@pytest.mark.parametrize(
    ("site", "words", "there", "absent"),
    [
        ("perlmutter", [], ["--qos=regular", "--constraint=gpu", "--gpus-per-node=4"], "partition"),
        ("perlmutter", ["--queue", "debug"], ["--qos=debug"], "regular"),
        ("perlmutter", ["--qos", "debug"], ["--qos=debug"], "regular"),
        ("perlmutter", ["--constraint", "cpu"], ["--constraint=cpu"], "--constraint=gpu"),
        ("juwels", ["--gpus", "2"], ["--gres=gpu:2", "--partition=booster"], "gres=gpu:4"),
        ("lumi", ["--gpus", "2"], ["--gpus-per-node=2", "--exclusive"], "gpus-per-node=8"),
        ("frontier", ["--qos", "debug"], ["--partition=batch", "--qos=debug"], "gpus-per-node"),
    ],
)
def test_queues_and_gpus_as_the_site_knows_them(desk, site, words, there, absent):
    done = desk.run("submit", "my.yaml", "--site", site, "--account", "a", *words, "--dry_run")
    assert done.returncode == 0, done.stderr
    for line in there:
        assert done.stdout.count(f"#SBATCH {line}\n") == 1
    assert not [line for line in done.stdout.splitlines() if "#SBATCH" in line and absent in line]
    assert "never run at that site" in done.stderr


def test_the_ranks_of_a_node_share_its_cores_by_default(desk):
    desk.scheduler("sbatch")
    desk.scheduler("sinfo", says="small 1 8 1 8\nlong* 2 32 2 128\nlong* 2+ 24+ 2 96+")
    words = ["--ranks_per_node", "4", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert "#SBATCH --cpus-per-task=12\n" in done.stdout, "of the smallest node"
    assert "#SBATCH --threads-per-core=1\n" in done.stdout, "cores, not hardware threads"
    assert "each rank has 12 of a node's 48 cores: --threads changes it" in done.stderr
    done = desk.run("submit", "my.yaml", *words, "--queue", "small")
    assert "#SBATCH --cpus-per-task=2\n" in done.stdout
    assert "threads-per-core" not in done.stdout
    for other in (["--threads", "3"], ["--site", "frontier", "--account", "a"]):
        assert "each rank has" not in desk.run("submit", "my.yaml", *words, *other).stderr


def test_cores_that_nobody_tells_are_one_for_each_rank_and_that_is_said(desk):
    for scheduler, cores in (("slurm", "--cpus-per-task=1\n"), ("pbs", ":ncpus=2:")):
        words = ["--scheduler", scheduler, "--ranks_per_node", "2", "--dry_run"]
        done = desk.run("submit", "my.yaml", *words)
        assert cores in done.stdout
        assert "each rank has 1 core: --threads N gives it more" in done.stderr


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_any_program_can_be_submitted(desk, scheduler):
    words = ["--scheduler", scheduler, "--nodes", "2", "--run.dir", "runs/loop", "--dry_run"]
    done = desk.run("submit", *words, "--", "python", "my_loop.py", "--gpus", "a b", "--help")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "command=(python my_loop.py --gpus 'a b' --help)" in lines
    assert "run_dir=runs/loop" in lines
    assert any(line.startswith("launcher=(") and line.endswith(" --)") for line in lines)


def test_the_script_of_another_program_stays_in_its_run_directory(desk):
    desk.scheduler("sbatch")
    done = desk.run("submit", "--run.dir", "runs/loop", "--", "python", "my_loop.py")
    assert done.returncode == 0, done.stderr
    assert desk.calls("sbatch") == [f"--parsable {desk.folder}/runs/loop/job.sh"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2"], "give CONFIG.yaml, or a command after --"),
        (["my.yaml", "--", "python"], "and not both"),
        (["--", "python", "x.py"], "give --run.dir DIR"),
        (["--run.dir", "r", "--run.seed", "3", "--", "python"], "no other key"),
        (["--run.dir", "r", "--sweep", "run.seed=1,2", "--", "python"], "no other key"),
        (["--", "train", "my.yaml"], "hpc-train submit my.yaml"),
        (["my.yaml", "--memory", "lots"], "'lots' is not an amount of memory"),
        (["my.yaml", "--mail", "a b"], "--mail is 'a b'"),
        (["my.yaml", "--resources", "x"], "--resources means nothing to slurm: give --gpus"),
        (["my.yaml", "--scheduler", "pbs", "--qos", "x"], "--qos means nothing to pbs"),
        (["my.yaml", "--scheduler", "pbs", "--reservation", "x"], "by --queue"),
        (["my.yaml", "--scheduler", "pbs", "--constraint", "x"], "give --resources"),
        (["my.yaml", "--scheduler", "mpijob", "--image", "x", "--qos", "1"], "--qos means"),
        (
            ["my.yaml", "--site", "perlmutter", "--account", "a", "--qos", "x", "--queue", "y"],
            "QOS",
        ),
    ],
)
def test_mistakes_in_what_is_asked_for_are_one_line(desk, words, message):
    scheduler = [] if {"--scheduler", "--site"} & {*words} else ["--scheduler", "slurm"]
    done = desk.run("submit", *scheduler, *words)
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)


def test_a_job_has_its_own_copy_of_the_configuration(desk):
    desk.scheduler("sbatch")
    desk.scheduler("squeue", says="")
    text = (desk.folder / "my.yaml").read_text()
    assert "train my.yaml" in desk.run("submit", "my.yaml", "--dry_run").stdout, "none is written"
    assert desk.run("submit", "my.yaml").returncode == 0
    (desk.folder / "my.yaml").write_text("an edit for the next run\n")
    script = (desk.folder / "runs/my/job.sh").read_text()
    copy = desk.folder / "runs/my/job.yaml"
    assert "train runs/my/job.yaml)" in script
    assert copy.read_text() == text
    done = desk.run("submit", "runs/my/job.yaml")  # the copy itself
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == text


SQUEUE_FORGOT = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(
    ("scheduler", "there"),
    [
        ("slurm", "echo '1|1|1|PENDING|Priority|0:00|'"),
        ("slurm", "echo '1_[0-3]|1|1|PENDING|Priority|0:00|'"),
        ("slurm", "echo '1_2|5|1|RUNNING|None|3:00|n1'"),
        ("pbs", f"echo {shlex.quote(QSTAT.format(id='1', state='R'))}"),
        ("pbs", f"echo {shlex.quote(QSTAT.format(id='1', state='Q'))}"),
    ],
)
def test_a_run_has_one_job_in_the_queue(desk, scheduler, there):
    submit, ask = {"slurm": ("sbatch", "squeue"), "pbs": ("qsub", "qstat")}[scheduler]
    desk.scheduler(submit)
    desk.command(ask, there)
    assert desk.run("submit", "my.yaml").returncode == 0, "nothing is recorded yet"
    script = (desk.folder / "runs/my/job.sh").read_text()
    done = desk.run("submit", "my.yaml", "--nodes", "7")
    assert done.returncode == 2
    assert "runs/my has a job already: 1" in only_line(done.stderr)
    assert "hpc-train cancel --now runs/my" in only_line(done.stderr)
    assert len(desk.calls(submit)) == 1
    assert (desk.folder / "runs/my/job.sh").read_text() == script, "the job may read it yet"
    done = desk.run("submit", "my.yaml", "--run.dir", "runs/other")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("scheduler", "gone"),
    [
        ("slurm", SQUEUE_FORGOT),
        ("slurm", "echo '11|11|11|PENDING|Priority|0:00|'"),
        ("pbs", "echo 'qstat: Unknown Job Id 1.pbs' >&2; exit 153"),
        ("pbs", "echo 'qstat: 1.pbs Job has finished, use -x or -H' >&2; exit 35"),
        ("torque", f"echo {shlex.quote(QSTAT.format(id='1', state='C'))}"),
    ],
)
def test_a_run_whose_job_is_over_can_be_submitted_again(desk, scheduler, gone):
    submit, ask = ("sbatch", "squeue") if scheduler == "slurm" else ("qsub", "qstat")
    desk.scheduler(submit)
    desk.command(ask, gone)
    for number in ("1", "2"):
        done = desk.run("submit", "my.yaml", "--scheduler", scheduler)
        assert done.stdout.strip() == number, done.stderr


@pytest.mark.parametrize(
    ("scheduler", "silent"),
    [
        ("slurm", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"),
        ("pbs", "echo 'Connection refused' >&2; exit 111"),
        ("pbs", None),
    ],
)
def test_without_the_schedulers_answer_a_run_is_not_submitted_twice(desk, scheduler, silent):
    submit, ask = {"slurm": ("sbatch", "squeue"), "pbs": ("qsub", "qstat")}[scheduler]
    desk.scheduler(submit)
    if silent:
        desk.command(ask, silent)
    assert desk.run("submit", "my.yaml").returncode == 0
    done = desk.run("submit", "my.yaml")
    assert done.returncode == 1
    assert "does not say" in only_line(done.stderr)
    assert len(desk.calls(submit)) == 1


def test_the_job_that_follows_one_counts_and_so_do_tasks(desk):
    """A job's script records the job that it submits."""
    desk.scheduler("sbatch")
    desk.command("squeue", "echo '9|9|9|PENDING|Priority|0:00|'")
    assert desk.run("submit", "my.yaml").returncode == 0
    record = desk.folder / "runs/my/jobs.jsonl"
    line = json.loads(record.read_text())
    assert (line["event"], line["job"], line["scheduler"]) == ("queued", "1", "slurm")
    with record.open("a") as file:
        file.write('{"time": 1, "event": "ended", "job": "1", "code": 75, "next": "9"}\n{"half')
    assert "has a job already: 9 (PENDING)" in only_line(desk.run("submit", "my.yaml").stderr)
    record.write_text(json.dumps(line))
    task = desk.folder / "runs/my/task-3/jobs.jsonl"
    task.parent.mkdir()
    task.write_text('{"event": "ended", "job": "1_3", "next": "9"}\n')
    assert "has a job already: 9 (PENDING)" in only_line(desk.run("submit", "my.yaml").stderr)


def test_of_two_submissions_at_once_one_is_refused(desk):
    desk.command("sbatch", "/bin/sleep 0.7; echo 1")
    desk.command("squeue", "echo '1|1|1|PENDING|Priority|0:00|'")
    words = hpc_train("submit", "my.yaml")
    environ = ENVIRON | {"PATH": f"{desk.folder}/bin"}
    started = [
        subprocess.Popen(words, cwd=desk.folder, env=environ, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=PATIENCE)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2], told
    assert len(desk.calls("sbatch")) == 1


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_cancel_now_ends_the_jobs_that_are_left(desk, scheduler):
    submit, ask, end = {
        "slurm": ("sbatch", "squeue", "scancel"),
        "pbs": ("qsub", "qstat", "qdel"),
    }[scheduler]
    desk.scheduler(submit)
    desk.command(
        ask,
        "echo '1|1|1|RUNNING|None|1:00|n1'"
        if scheduler == "slurm"
        else f"echo {shlex.quote(QSTAT.format(id='1', state='R'))}",
    )
    desk.scheduler(end, says="")
    assert desk.run("submit", "my.yaml").returncode == 0
    done = desk.run("cancel", "runs/my")
    assert done.returncode == 0
    assert not (desk.folder / f"{end}.calls").exists(), "a plain cancel lets the job save"
    done = desk.run("cancel", "--now", "runs/my")
    assert done.returncode == 0, done.stderr
    assert desk.calls(end) == ["1"]
    assert "ended or removed from the queue: 1" in done.stdout
    assert (desk.folder / "runs/my/STOP").exists(), "so no script queues it again"
    desk.command(ask, SQUEUE_FORGOT if scheduler == "slurm" else "exit 0")
    assert "no job of the run is in the queue" in desk.run("cancel", "--now", "runs/my").stdout
    assert len(desk.calls(end)) == 1


def test_a_job_that_the_stop_file_has_ended_is_named_by_cancel_now(desk):
    desk.scheduler("sbatch")
    desk.command(
        "squeue",
        f"test -e {desk.folder}/runs/my/STOP && exit 0; echo '1|1|1|RUNNING|None|1:00|n1'",
    )
    desk.scheduler("scancel", says="")
    assert desk.run("submit", "my.yaml").returncode == 0
    done = desk.run("cancel", "--now", "runs/my")
    assert done.returncode == 0, done.stderr
    assert "ended or removed from the queue: 1" in done.stdout
    assert not (desk.folder / "scancel.calls").exists()


def test_cancel_now_says_what_it_cannot_do(desk):
    (desk.folder / "runs/my/checkpoints").mkdir(parents=True)
    done = desk.run("cancel", "--now", "runs/my")
    assert done.returncode == 2
    assert "names no job to end now" in only_line(done.stderr)
    desk.scheduler("sbatch")
    (desk.folder / "runs/my/STOP").unlink()
    assert desk.run("submit", "my.yaml").returncode == 0
    desk.command("squeue", "echo '1|1|1|RUNNING|None|1:00|n1'")
    desk.scheduler("scancel", code=1)
    done = desk.run("cancel", "--now", "runs/my")
    assert done.returncode == 1
    assert "scancel 1: invalid account" in only_line(done.stderr)


def test_what_a_user_gives_wins_over_the_site(desk):
    words = ["--site", "frontier", "--account", "p1", "--threads", "3", "--dry_run"]
    done = desk.run("submit", "my.yaml", *words)
    assert "#SBATCH --cpus-per-task=3\n" in done.stdout
    assert "--cpus-per-task=3 " in done.stdout
    assert "export OMP_NUM_THREADS=3\n" in done.stdout
    words = ["--site", "gadi", "--account", "p1", "--directive", "-l storage=x", "--dry_run"]
    assert "#PBS -P p1\n" in desk.run("submit", "my.yaml", *words).stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: foo", "scheduler"),
        ("scheduler: slurm\nthreads: many", "threads"),
        ("scheduler: slurm\nranks_per_node: 0", "ranks_per_node"),
        ("scheduler: slurm\nneeds: account", "needs"),
        ("scheduler: slurm\nneeds: [foo]", "needs"),
        ("scheduler: slurm\nlauncher: srun -n 3", "launcher"),
        ("scheduler: slurm\nlauncher: ['{foo}']", "foo"),
        ("scheduler: pbs\nresources: '{nope}'", "nope"),
        ("scheduler: slurm\nresources: 'select=1'", "resources"),
        ("scheduler: slurm\naccount_option: -P", "account_option"),
        ("scheduler: slurm\nqueue_option: --cluster", "queue_option"),
        ("scheduler: pbs\nconstraint: gpu", "constraint means nothing to pbs: leave it out, or"),
        ("scheduler: lsf\nmemory_gb_per_node: 4", "memory_gb_per_node means nothing to lsf"),
        ("scheduler: mpijob\nsetup: [module load a]", "setup means nothing to mpijob: leave"),
        ("scheduler: mpijob\nqueues: [{name: a}]", "queues means nothing to mpijob"),
        ("scheduler: mpijob\ncontainer: {environ: {A: 1}}", "container means nothing to mpijob"),
        ("scheduler: local\ngpus_per_node: 4", "gpus_per_node means nothing to local"),
        ("scheduler: slurm\nqueue: a\nqueues: [{name: b}]", "here.yaml has queue and queues"),
        ("scheduler: slurm\nenviron: {'A B;id': '1'}", "variable"),
    ],
)
def test_mistakes_in_a_profile_are_one_line(desk, text, message):
    (desk.folder / "here.yaml").write_text(text + "\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--dry_run")
    assert done.returncode == 2, done.stderr
    assert message in only_line(done.stderr)


def test_what_the_scheduler_refuses_is_told(desk):
    desk.scheduler("qsub", code=1)
    done = desk.run("submit", "my.yaml")
    assert done.returncode == 1
    assert "qsub" in only_line(done.stderr)
    assert "invalid account" in only_line(done.stderr)


QUEUES = """
scheduler: slurm
queues:
  - {name: small, max_nodes: 4, hours: 24}
  - {name: large, min_nodes: 5, max_nodes: 16, hours: 12}
  - {name: large, min_nodes: 17, hours: 6}
  - {name: debug, max_nodes: 2, hours: 0.5}
"""


@pytest.mark.parametrize(
    ("words", "queue"),
    [
        ([], "small"),
        (["--nodes", "5", "--time", "12:00:00"], "large"),
        (["--nodes", "40", "--time", "06:00:00"], "large"),
        (["--queue", "debug", "--time", "00:30:00"], "debug"),
        (["--queue", "unknown", "--nodes", "99"], "unknown"),
    ],
)
def test_the_first_queue_that_takes_the_job_is_used(desk, words, queue):
    (desk.folder / "here.yaml").write_text(QUEUES)
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", *words, "--dry_run")
    assert f"#SBATCH --partition={queue}\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "17", "--time", "07:00:00"], "17 nodes for 07:00:00 do not fit any queue"),
        (["--queue", "debug", "--time", "01:00:00"], "do not fit the queue debug"),
        (["--queue", "large"], "large (5 to 16 nodes, 12 h), large (17 or more nodes, 6 h)"),
    ],
)
def test_a_job_that_fits_no_queue_is_refused(desk, words, message):
    (desk.folder / "here.yaml").write_text(QUEUES)
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", *words, "--dry_run")
    assert done.returncode == 2
    assert message in only_line(done.stderr)


def test_what_a_site_requires_is_told(desk):
    words = ["submit", "my.yaml", "--site", "gadi", "--account", "p1", "--dry_run"]
    assert "requires a directive -l storage=" in only_line(desk.run(*words).stderr)
    words += ["--directive", "-l storage=gdata/ab12"]
    assert "#PBS -l ncpus=48,ngpus=4," in desk.run(*words).stdout
    done = desk.run(*words, "--ranks_per_node", "2", "--threads", "6")
    assert "#PBS -l ncpus=48,ngpus=4," in done.stdout, "12 cores come with each GPU"
    done = desk.run(*words, "--threads", "24")
    assert "4 GPUs come with 48 cores" in only_line(done.stderr)
    for unseen, message in (
        (desk.folder.parent, "compute nodes of here.yaml do not see"),
        ("$HERE", "compute nodes of here.yaml do not see"),
        ("$NOWHERE", "unseen is '$NOWHERE', but the variable NOWHERE is not set"),
        ("home", "unseen has 'home': write the path of a folder from / on"),
    ):
        (desk.folder / "here.yaml").write_text(f"scheduler: slurm\nunseen: [{unseen}]\n")
        words = ["submit", "my.yaml", "--site", "here.yaml", "--dry_run"]
        done = desk.run(*words, HERE=str(desk.folder.parent))
        assert message in only_line(done.stderr)


def test_a_folder_that_compute_nodes_do_not_see_is_known_by_its_links_too(desk, tmp_path_factory):
    seen = tmp_path_factory.mktemp("seen")
    (seen / "hid").mkdir()
    (seen / "link").symlink_to(seen / "hid")
    words = ["submit", str(desk.folder / "my.yaml"), "--site", "here.yaml", "--dry_run"]
    for folder, run_dir in (("hid", "link/r"), ("link", "hid/r"), ("link", "link/r")):
        (desk.folder / "here.yaml").write_text(f"scheduler: slurm\nunseen: [{seen / folder}]\n")
        done = desk.run(*words, "--run.dir", str(seen / run_dir))
        assert done.returncode == 2
        assert f"{seen / run_dir} is in {seen / folder}, which" in only_line(done.stderr)
    (desk.folder / "here.yaml").write_text(f"scheduler: slurm\nunseen: [{desk.folder}]\n")
    done = desk.run(*words, "--run.dir", str(seen / "r"))
    assert f"{desk.folder} is in {desk.folder}, which" in only_line(done.stderr), "it works there"


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("needs: [queue]\nqueue_option: --qos", ["--qos", "q"]),
        ("needs: [queue]\nqueue: q", []),
        ("needs_directives: [--qos]", ["--qos", "q"]),
        ("bound: true\nthreads: 3\nranks_per_node: 2", ["--threads", "3"]),
    ],
)
def test_what_a_site_requires_can_be_given_in_any_way(desk, profile, words):
    (desk.folder / "here.yaml").write_text(f"scheduler: slurm\n{profile}\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", *words, "--dry_run")
    assert done.returncode == 0, done.stderr


def test_a_value_of_several_words_is_one_to_lsf(desk):
    text = "-R select[mem>1] rusage[mem=1] -q night-long"
    done = desk.run("submit", "my.yaml", "--scheduler", "lsf", "--directive", text, "--dry_run")
    assert '#BSUB -R "select[mem>1] rusage[mem=1]" -q night-long\n' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [("slurm", "--array=0-2%2"), ("pbs", "-J 0-2%2"), ("torque", "-t 0-2%2"), ("lsf", "my[1-3]%2")],
)
def test_tasks_at_once_can_be_limited(desk, scheduler, line):
    words = ["submit", "my.yaml", "--scheduler", scheduler, "--sweep", "run.seed=1,2,3"]
    done = desk.run(*words, "--tasks_at_once", "2", "--dry_run")
    assert line in done.stdout, done.stderr


def test_directives_may_keep_words_together(desk):
    words = ["--scheduler", "slurm", "--dry_run", "--directive", '--comment="two words"']
    assert '#SBATCH --comment="two words"\n' in desk.run("submit", "my.yaml", *words).stdout


def test_a_profile_of_ones_own(desk):
    (desk.folder / "here.yaml").write_text(
        "scheduler: pbs\nthreads: 4\nresources: 'nodes={nodes}:cores={cores}'\n"
        "launcher: [mpiexec, -n, '{ranks}']\n"
    )
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--nodes", "3", "--dry_run")
    assert "#PBS -l nodes=3:cores=12\n" in done.stdout
    assert "launcher=(mpiexec -n 3)\n" in done.stdout
    (desk.folder / "here.yaml").write_text("scheduler: pbs\nthread: 4\n")
    done = desk.run("submit", "my.yaml", "--site", "here.yaml", "--dry_run")
    assert done.returncode == 2
    assert "here.yaml: unknown key thread: did you mean threads?" in only_line(done.stderr)


def test_cancel_stops_a_run_for_good(program):
    """A run is not begun again while the file is there."""
    run_dir = program.root / "run"
    (run_dir / "task-0").mkdir(parents=True)
    assert run(*hpc_train("cancel", str(program.root / "none"))).returncode == 2
    done = run(*hpc_train("cancel", str(run_dir)))
    assert done.returncode == 0
    assert "STOP" in done.stdout
    assert (run_dir / "task-0/STOP").exists(), "of a sweep all tasks stop"
    assert "task-*/STOP" in done.stdout, "so that all of them are removed to resume"
    done = program.train("run")
    assert done.returncode == 2
    assert "remove it" in only_line(done.stderr)
    (run_dir / "STOP").unlink()
    assert run(*hpc_train("cancel", "/etc")).returncode == 2, "a folder, but no run"
    assert program.train("run", "--run.steps", "2").returncode == 0
