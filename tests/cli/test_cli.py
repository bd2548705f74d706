"""The command line and the package's front door."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hpc_train
from hpc_train.checkpoint.fileformat import LocalTensor
from hpc_train.cli import main
from hpc_train.config.file import KEYS, load
from hpc_train.config.keys import from_yaml
from hpc_train.mpi.group import Group
from tests.checkpoint.states import save_tensors
from tests.programs import command as on_ranks
from tests.programs import hpc_train as command
from tests.programs import modules_of, only_line, run

HEAVY = ("torch", "mpi4py", "horovod", "h5py", "numpy")
UNUSED = {*HEAVY, "jsonargparse", "jinja2", "psutil", "yaml", "rich", "xxhash"}
LAUNCH = "hpc_train.launch."


@pytest.mark.parametrize(
    "program",
    [
        "import hpc_train",
        "from hpc_train.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from hpc_train.cli import main; main(['train', '--help'])",
        "import hpc_train.build.horovod",
    ],
)
def test_the_front_door_loads_neither_torch_nor_mpi(program):
    check = f"{program}\nimport sys\nassert not {{*{HEAVY}}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--help", "checkpoint"),
        ("", "required: VERB"),
        ("--version", hpc_train.__version__),
        ("trian", "invalid choice: 'trian'"),
        ("doctor --help", "--json"),
        ("prepare --help", "KIND"),
        ("prepare text --help", "--shard_mb"),
        ("launch --help", "--max_restarts"),
        ("launch -np 0 -- train my.yaml", "not a whole number of 1 or more"),
        ("submit --help", "--ranks_per_node"),
        ("cancel --help", "RUN"),
        ("status --help", "RUN"),
        ("logs --help", "--follow"),
        ("plan --help", "--measure"),
        ("topology --help", "--dp"),
        ("generate --help", "--prompt"),
        ("checkpoint --help", "ACTION"),
        ("checkpoint export --help", "--include"),
    ],
)
def test_help_version_and_usage_errors_load_no_libraries(words, shown):
    _, text, modules = modules_of(*words.split())
    assert shown in text
    assert not UNUSED & modules
    loaded = {name for name in modules if name.startswith(LAUNCH)}
    assert loaded <= {f"{LAUNCH}protocol"}, "which signals stop a job"


def test_cancel_loads_no_libraries(tmp_path):
    (tmp_path / "config.yaml").touch()
    _, text, modules = modules_of("cancel", tmp_path)
    assert "the run stops" in text
    assert not UNUSED & modules
    loaded = {name for name in modules if name.startswith(LAUNCH)}
    assert loaded == {f"{LAUNCH}cancel", f"{LAUNCH}protocol"}


def test_checkpoint_list_loads_no_library_but_xxhash(tmp_path):
    held = {"model.weight": LocalTensor.whole(torch.ones(3))}
    save_tensors(tmp_path / "step-000000007.safetensors", held, b"{}", Group())
    _, text, modules = modules_of("checkpoint", "list", tmp_path)
    assert "step-000000007.safetensors" in text
    assert "complete" in text
    assert UNUSED & modules == {"xxhash"}


def test_everything_that_is_exported_exists():
    assert all(getattr(hpc_train, name) for name in hpc_train.__all__)


def test_importing_the_package_is_enough_for_the_names_of_its_parts(monkeypatch):
    for name in ("data", "gradients", "jobs"):
        monkeypatch.delattr(hpc_train, name, raising=False)  # as if nothing had imported it
    assert hpc_train.data.Mixture
    assert hpc_train.gradients.average_gradients
    assert hpc_train.jobs.submit
    with pytest.raises(AttributeError, match="module 'hpc_train' has no attribute 'date'"):
        _ = hpc_train.date


def test_help_lists_the_verbs_and_the_exit_codes():
    text = run(*command("--help")).stdout
    for word in ("doctor", "prepare", "train", "generate", "predict", "75 stopped early"):
        assert word in text


def test_help_says_where_the_pages_are_that_messages_name():
    text = run(*command("--help")).stdout.rpartition("documentation: ")[2]
    folder = "".join(text.split())  # which may be longer than a line
    named = (
        page
        for source in Path(hpc_train.__file__).parent.rglob("*.py")
        for page in re.findall(r"docs(/how-to/[\w-]+\.md)", source.read_text())
    )
    assert all(Path(folder + page).is_file() for page in named)


def test_help_of_train_lists_every_key_with_its_meaning():
    text = run(*command("train", "--help")).stdout
    for key in KEYS:
        assert f"--{key} " in text
    assert "Samples per optimizer step over the whole job." in " ".join(text.split())


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("train", "no configuration is given: give CONFIG.yaml, or keys"),
        ("submit", "give CONFIG.yaml, or a command after --"),
        ("launch", "the number of ranks is not given"),
        ("scale", "the following arguments are required: --nodes"),
    ],
)
def test_a_verb_without_what_it_needs_says_so_in_one_line(tmp_path, verb, told):
    done = run(*command(verb), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hpc-train: error: {told}")
    assert done.stderr.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_the_version():
    assert hpc_train.__version__ in run(*command("--version")).stdout


def test_print_config_gives_a_file_that_means_the_same(tmp_path):
    options = ["--run.steps", "3", "--model.layers=2"]
    printed = run(*command("train", *options, "--print_config"))
    assert printed.returncode == 0
    (tmp_path / "all.yaml").write_text(printed.stdout)
    assert load(tmp_path / "all.yaml") == load(None, options)


def test_ranks_print_a_configuration_once():
    printed = run(*on_ranks("mpirun", 2, "train", "--run.steps", "3", "--print_config"))
    assert (printed.returncode, printed.stdout.count("steps: 3")) == (0, 1), printed.stderr
    assert from_yaml(printed.stdout)["run"]["steps"] == 3


@pytest.mark.parametrize("words", ["--help", "--version", "train --help", "predict -h"])
def test_help_is_printed_by_rank_0_only(monkeypatch, capfd, words):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(words.split()) == 0
    assert capfd.readouterr() == ("", "")


def test_print_config_refuses_what_training_refuses():
    done = run(*command("train", "--print_config", "--optimizer.lr", "-1"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpc-train: error: optimizer.lr is -1.0: give 0 or more\n"


def test_a_working_folder_that_is_gone_is_one_line(tmp_path):
    away = f"cd {tmp_path}/a && rmdir {tmp_path}/a && "
    (tmp_path / "a").mkdir()
    script = str(Path(sys.executable).with_name("hpc-train"))
    done = run("bash", "-c", away + shlex.join([script, "train", "--run.steps", "3"]))
    assert done.returncode == 2
    assert done.stderr.startswith("hpc-train: error: the working folder has been removed: ")
    assert done.stderr.count("\n") == 1


PLAN = ["plan", "--model.vocab", "100"]


@pytest.mark.parametrize(
    "words", [["--help"], ["topology", "--help"], ["topology"], PLAN, [*PLAN, "--json"]]
)
def test_a_reader_that_leaves_is_no_error(words):
    """As in `hpc-train plan | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command(*words), stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_a_reader_that_leaves_changes_no_exit_code_but_0():
    """75 lets a job script start again."""
    reader, writer = os.pipe()
    os.close(reader)
    found = []
    for code in (0, 75):
        text = (
            "from hpc_train import cli; from hpc_train.errors import print_line; "
            f"cli._run = lambda _: print_line('a line') or {code}; raise SystemExit(cli.main())"
        )
        done = subprocess.run([sys.executable, "-c", text], stdout=writer, check=False)
        found.append(done.returncode)
    os.close(writer)
    assert found == [141, 75]


@pytest.mark.parametrize(
    "words",
    [
        "status LONG",
        "logs LONG",
        "cancel LONG",
        "report LONG",
        "checkpoint list LONG",
        "log export --to csv LONG",
        "prepare text LONG --out o",
        "launch -np 1 --launcher mpirun -- train --run.dir LONG",
        "submit --scheduler local --run.dir LONG -- true",
    ],
)
def test_a_path_that_the_system_refuses_is_one_line(words, capfd):
    assert main(words.replace("LONG", "x" * 300).split()) == 2
    told = capfd.readouterr().err
    assert "File name too long" in told
    assert told.splitlines()[-1].startswith("hpc-train: error: ")


@pytest.mark.parametrize("streams", ["1", "2", "0 1 2"])
def test_closed_streams_are_no_error(streams):
    closed = " ".join(f"{number}>&-" for number in streams.split())
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command("--version")],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("cancel .", ""),
        ("topology", "1"),
        ("train --print_config", "1"),
        ("train --help", ""),  # longer than a buffer
        ("prepare text a.txt --out data", "1"),  # printed by rank 0, where no error ends a job
    ],
)
def test_output_that_finds_no_space_is_one_line(tmp_path, monkeypatch, words, unbuffered):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LATEST").touch()
    (tmp_path / "a.txt").write_text("a text\n")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words.split()),
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    told = "standard output cannot be written (No space left on device): free some space"
    assert told in only_line(done.stderr)
    assert done.stderr.count("\n") == 1
