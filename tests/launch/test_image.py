"""`submit --image`: behind which launcher who runs the image, and the site's part in it."""

from __future__ import annotations

import shlex

import pytest

from hpc_train.errors import UserError
from hpc_train.launch import compose, containers, sites
from hpc_train.launch.request import SubmitRequest

SITE = """
scheduler: slurm
launcher: [srun, --cpu-bind=cores]
setup: [module load site]
container:
  tool: singularity
  options: [--rocm, --bind, /opt/cray]
  setup: [module load bindings]
  environ: {SLURM_MPI_TYPE: pmi2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(containers, "find_tool", lambda wanted, image: wanted)
    (tmp_path / "my.yaml").write_text("run: {dir: runs/my}\ndata: {path: shards}\n")
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "it.sif").write_bytes(bytes(32) + b"SIF_MAGIC")
    (tmp_path / "shards").mkdir()
    return tmp_path


def made(**options):
    given = {"config": "my.yaml", "image": "it.sif", "nodes": 2, "ranks_per_node": 2}
    return compose.make(SubmitRequest(**{"scheduler": "slurm", **given, **options}))


def site(**options):
    return made(scheduler=None, site="site.yaml", **options)


def test_launch_is_told_the_image_and_runs_the_images_python(folder, capsys):
    batch = made(image_options=["--bind /a"])
    words = ["--image", f"{folder}/it.sif", "--image_tool", "apptainer"]
    assert batch.launcher[-6:] == [*words, "--image_options=--bind /a", "--"]
    assert batch.command == ["python3", "-m", "hpc_train", "train", "runs/my/job.yaml"]
    assert "the job will use apptainer" in capsys.readouterr().err, "none is on this login node"


def test_a_commands_run_directory_is_bound_as_launch_does_not_know_it(folder):
    options = {"config": None, "command": ["python", "x.py"], "options": ["--run.dir", "/s/my"]}
    batch = made(image_tool="apptainer", **options)
    assert f"--image_options=--bind /s/my --bind {folder}" in batch.launcher
    assert batch.command == ["python", "x.py"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_behind_another_launcher_the_command_itself_is_run_in_the_image(folder, launcher):
    batch = made(launcher=launcher, image_tool="apptainer")
    assert "--image" not in batch.launcher
    assert batch.command[:2] == ["sh", "-c"]
    after = batch.command[3:]
    assert after[:5] == ["apptainer", "--bind", str(folder), "--pwd", str(folder)]
    assert "HPC_TRAIN_RANKS=4" in after
    assert after[-5:] == ["python3", "-m", "hpc_train", "train", "runs/my/job.yaml"]
    assert batch.environ["HPC_TRAIN_WARM"] == "off"


def test_the_sites_part_counts_with_an_image_only(folder):
    batch = site(setup=["module load mine"], image_options=["--bind /a"])
    assert batch.setup == ["module load site", "module load bindings", "module load mine"]
    assert batch.environ["SLURM_MPI_TYPE"] == "pmi2"
    words = ["singularity", "--rocm", "--bind", "/opt/cray", "--bind", "/a"]
    assert batch.command[3 : 3 + len(words)] == words
    batch = site(image="", setup=["module load mine"])
    assert batch.setup == ["module load site", "module load mine"]
    assert "SLURM_MPI_TYPE" not in batch.environ
    assert "singularity" not in batch.command
    batch = site(launcher="launch", image_tool="apptainer")
    assert shlex.join(batch.launcher).count("--image_tool apptainer") == 1, "the user's tool"
    assert "--image_options=--rocm --bind /opt/cray" in batch.launcher


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"image": "no.sif"}, "there is no image no.sif"),
        ({"image": "my.yaml"}, "my.yaml is no image"),
        ({"image": "", "image_tool": "apptainer"}, "no image"),
        ({"image": "", "image_options": ["--nv"]}, "no image"),
        ({"scheduler": "mpijob", "image_options": ["--nv"]}, "--image_options means nothing"),
    ],
)
def test_what_cannot_work_is_refused(folder, options, text):
    with pytest.raises(UserError, match=text):
        made(**options)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("{tols: apptainer}", "unknown key container.tols: did you mean container.tool"),
        ("{tool: docker}", "docker"),
        ("[apptainer]", "container is"),
    ],
)
def test_a_profile_with_a_wrong_section(tmp_path, section, text):
    (tmp_path / "site.yaml").write_text(f"scheduler: slurm\ncontainer: {section}\n")
    with pytest.raises(UserError, match=text):
        sites.load_site(str(tmp_path / "site.yaml"))
