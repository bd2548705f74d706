"""The words that run a command in an image: what arrives at each tool, and what is refused before.

Stand-ins take the tools' places and tell their words. tests/system/test_containers.py has the real
Apptainer.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from hpc_train.errors import HpcTrainError, SetupError, UserError
from hpc_train.launch import IMAGE_TOOLS, containers
from hpc_train.launch.containers import Container
from hpc_train.launch.hosts import Host
from hpc_train.launch.lines import LaunchedJob, open_mpi

SIF = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + b"01\0"
SQUASH = b"hsqs" + bytes(60)
TELLS = """#!/bin/sh
printf '%s\\n' "${0##*/}" "$@"
env | grep -E '^(OPAL|PMIX_INSTALL)_PREFIX' >&2 || :
"""
COMMAND = ["python3", "x.py", "--lr", "1e-3", "two words", "$HOME"]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is first on the PATH, and a function that makes programs in it."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(*names: str, does: str = TELLS) -> None:
        for name in names:
            (folder / name).write_text(does)
            (folder / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(containers.shutil, "which", which_in(folder))
    return make


def which_in(folder: Path):
    """`shutil.which` that does not see what this machine has."""
    return lambda name: str(folder / name) if (folder / name).exists() else None


def told(container: Container, **environ: str) -> list[str]:
    """The words that arrive at the tool."""
    done = subprocess.run(
        container.command(COMMAND, 4),
        env={"PATH": os.environ["PATH"], "OPAL_PREFIX": "/x", "PMIX_INSTALL_PREFIX": "/x"}
        | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr, "the host's Open MPI is not named in the image"
    return done.stdout.splitlines()


# With --nv among the options no GPU of this machine is looked for.
@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("apptainer", "exec --bind {d} --nv --bind /a --bind /b --pwd /a --env {n} IMAGE"),
        ("singularity", "exec --bind {d} --nv --bind /a --bind /b --pwd /a --env {n} IMAGE"),
        ("podman-hpc", "run --rm --volume {d}:{d} --nv --volume /a:/a --volume /b:/b --workdir /a"),
        ("shifter", "--image=IMAGE --nv --workdir=/a --env={n}"),
        (
            "enroot",
            "start --env MPI_LOCALRANKID --env OMP_X --mount {d}:{d}:none:x-create=dir,bind --nv "
            "--mount /a:/a:none:x-create=auto,bind --mount /b:/b:none:x-create=auto,bind "
            "--env {n} IMAGE sh -c",
        ),
    ],
)
def test_each_tool_gets_its_own_words_and_the_whole_command(tool, words, tools, tmp_path):
    tools(tool)
    container = Container(tool, "IMAGE", ["--nv"], ["/a", "/b"], "/a")
    environ = {"TMPDIR": str(tmp_path), "OMP_X": "1", "MPI_LOCALRANKID": "0", "HOSTS_OWN": "1"}
    name, *arrived = told(container, **environ)
    wanted = words.format(d=tmp_path, n="HPC_TRAIN_RANKS=4").split()
    if tool == "enroot":  # in the order of the environment
        assert sorted(arrived[1:5]) == sorted(wanted[1:5])
        arrived[1:5] = wanted[1:5]
    assert name == tool
    assert arrived[: len(wanted)] == wanted
    assert arrived[-len(COMMAND) :] == COMMAND


def test_podman_is_told_what_ranks_need(tools):
    tools("podman-hpc")
    words = told(Container("podman-hpc", "IMAGE"))
    assert {"HPC_TRAIN_*", "PMI*", "SLURM_*", "HPC_TRAIN_RANKS=4"} <= {*words}
    assert words[words.index("IMAGE") - 1] == "HPC_TRAIN_RANKS=4"


def test_folders_that_a_rank_does_not_have_are_not_bound(tools):
    tools("apptainer")
    words = told(
        Container("apptainer", "IMAGE", ["--nv"]), TMPDIR="/no/such", PMIX_SERVER_TMPDIR="/usr"
    )
    assert words[:4] == ["apptainer", "exec", "--bind", "/usr"]
    assert "/no/such" not in words


def test_enroot_runs_the_command_in_its_directory(tmp_path):
    words = Container("enroot", "IMAGE", directory=str(tmp_path)).command(["pwd"], 1)
    inside = words[words.index("IMAGE") + 1 :]
    done = subprocess.run(inside, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == str(tmp_path)


def test_a_launcher_starts_the_words_and_each_attempt_tells_its_own_number_of_ranks():
    container = Container("apptainer", "/i.sif")
    for ranks in (4, 2):
        job = LaunchedJob(COMMAND, ranks, [Host("n1", ranks)], container=container)
        words = open_mpi("mpirun", job).words
        assert words[-len(COMMAND) :] == COMMAND
        assert f"HPC_TRAIN_RANKS={ranks}" in words


def test_launch_gets_an_image_from_a_batch_script_as_it_was():
    container = Container("apptainer", "/i.sif", ["--bind", "/with space"])
    *words, options = container.as_options
    assert words == ["--image", "/i.sif", "--image_tool", "apptainer"]
    assert options.startswith("--image_options=")
    assert containers.split_options([options.partition("=")[2]]) == container.options


def test_paths_are_seen_once_and_where_links_lead_to(tmp_path):
    for name in ("work/runs", "data", "big/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "big")
    folders = [tmp_path / "work", tmp_path / "work/runs", tmp_path / "new"]
    others = [str(tmp_path / name) for name in ("data", "link/x", "data", "missing")]
    found = containers.seen_paths(folders, [*others, "auto", "none"])
    assert found == [str(tmp_path / name) for name in ("big/x", "data", "link/x", "new", "work")]
    assert containers.seen_paths([Path("/")]) == []


@pytest.mark.parametrize("path", ["/a:b", "/a,b"])
def test_paths_that_no_tool_can_bind_are_refused(path):
    with pytest.raises(UserError, match="without colons and commas"):
        Container("apptainer", "IMAGE", binds=[path]).command(COMMAND, 2)


@pytest.mark.parametrize("tool", IMAGE_TOOLS)
@pytest.mark.parametrize(("head", "kind"), [(SIF, "SIF"), (SQUASH, "SquashFS"), (b"\x7fELF", "")])
def test_files_are_looked_at_before_a_job_starts(tool, head, kind, tmp_path):
    file = tmp_path / "it.sif"
    file.write_bytes(head)
    assert containers.kind_of_image(file) == kind
    takes = {"apptainer": ("SIF", "SquashFS"), "enroot": ("SquashFS",)}
    takes["singularity"] = takes["apptainer"]
    if kind in takes.get(tool, ()):
        assert containers.find_image(str(file), tool) == str(file)
        return
    with pytest.raises(UserError, match="takes an image's name|is no image that"):
        containers.find_image(str(file), tool)


def test_images_that_are_no_files(tmp_path):
    assert containers.find_image("docker://a/b:1", "apptainer") == "docker://a/b:1"
    assert containers.find_image("docker:a/b:1", "shifter") == "docker:a/b:1"
    assert containers.find_image("a/b:1", "podman-hpc") == "a/b:1"
    assert containers.find_image("made", "enroot") == "made"
    assert containers.find_image(str(tmp_path), "apptainer") == str(tmp_path)
    with pytest.raises(UserError, match="there is no image it.sif"):
        containers.find_image("it.sif", "apptainer")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_image_that_cannot_be_read(tmp_path):
    (tmp_path / "it.sif").touch(stat.S_IWUSR)
    with pytest.raises(UserError, match="cannot be read"):
        containers.find_image(str(tmp_path / "it.sif"), "apptainer")


def test_the_first_tool_that_is_here_is_taken(tools, tmp_path):
    file = tmp_path / "it.sif"
    file.write_bytes(SIF)
    with pytest.raises(SetupError, match="looked for apptainer, singularity, podman-hpc"):
        containers.container_for(str(file), None, [], [])
    tools("shifter", "enroot")
    assert containers.find_tool(None, "a/b:1") == "shifter"
    assert containers.find_tool(None, str(file)) == "enroot", "shifter takes no files"
    tools("singularity")
    assert containers.find_tool(None, str(file)) == "singularity"
    assert containers.find_tool("enroot", str(file)) == "enroot"
    with pytest.raises(SetupError, match="looked for podman-hpc"):
        containers.container_for("a/b:1", "podman-hpc", [], [])


@pytest.mark.parametrize("tool", ["podman-hpc", "enroot"])
def test_tools_with_a_tmp_of_their_own_get_the_hosts(tool):
    assert "/tmp" in containers.made_container("made", tool, [], []).binds


def test_a_quote_that_is_not_closed():
    with pytest.raises(UserError, match="--image_options: No closing quotation"):
        containers.split_options(["--env 'A=1"])


@pytest.mark.parametrize(
    ("does", "kind", "text"),
    [
        ("echo 'No module named '\"'hpc_train'\" >&2; exit 1", UserError, "not in the image"),
        ("echo 'INFO: x' >&2; echo 'FATAL: no python3' >&2; exit 255", HpcTrainError, "no python3"),
        ("exit 3", HpcTrainError, "exit code 3"),
    ],
)
def test_an_image_without_the_package_is_noticed_before_ranks_start(tools, does, kind, text):
    tools("apptainer", does=f"#!/bin/sh\n{does}\n")
    with pytest.raises(kind, match=text):
        containers.check_package(Container("apptainer", "/i.sif"))
