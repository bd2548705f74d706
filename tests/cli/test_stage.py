"""hpc-train stage, as it is run: in one process, and by the ranks of one node."""

from __future__ import annotations

import os
import shutil
import sys
import venv
from pathlib import Path

import pytest

from hpc_train.cli.stage import options
from hpc_train.errors import UserError
from hpc_train.staging.copy import lock
from tests.programs import command, hpc_train, only_line, run
from tests.waiting import wait_until

WHERE = "import sys, tool; print(sys.prefix); print(tool.__file__)"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package and its script."""
    made = tmp_path / "environment of mine"
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    (packages / "tool.py").write_text(f"def main():\n    {WHERE}\n")
    begin = f"#!/bin/sh\n'''exec' '{made}/bin/python' \"$0\" \"$@\"\n' '''\n"
    script = begin + "from tool import main\nmain()\n"
    (made / "bin/tool").write_text(script)
    (made / "bin/tool").chmod(0o755)
    return made


def test_programs_of_the_copy_need_the_original_no_more(tmp_path, environment):
    data, to = tmp_path / "text", tmp_path / "local"
    data.mkdir()
    to.mkdir()
    (data / "shard").write_text("tokens")
    words = ["--environment", str(environment), "--data", str(data), "--to", str(to)]
    done = run(*hpc_train("stage", *words))
    assert done.returncode == 0, done.stderr
    copies = to / f"hpc_train-user-{os.getuid()}"
    assert f"to use it in a job script: . {copies}/activate" in done.stdout
    assert f"{data} -> {copies}/data/text" in done.stdout
    shutil.rmtree(environment)
    use = f". {copies}/activate; tool; python -c '{WHERE}'; cat $HPC_TRAIN_STAGED/data/text/shard"
    used = run("sh", "-ec", use, environ={"PYTHONPATH": ""})
    copy = str(copies / "environment")
    package = next((copies / "environment").glob("lib/python*/site-packages/tool.py"))
    assert used.stdout.split("\n") == [copy, str(package), copy, str(package), "tokens"]
    held = lock(copies)
    refused = run(*hpc_train("stage", "--clean", "--to", str(to)))
    os.close(held)
    assert refused.returncode == 2
    assert f"another `hpc-train stage` uses {copies} now" in only_line(refused.stderr)
    cleaned = run(*hpc_train("stage", "--clean", "--to", str(to)))
    assert cleaned.stdout == f"{copies} is removed from 1 node\n"
    assert [*to.iterdir()] == []


def test_a_jobs_ranks_run_the_copy_which_is_removed_at_its_end(tmp_path, environment):
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join(path for path in sys.path if path))
    for name in ("text", "disk"):
        (tmp_path / name).mkdir()
    shows = f"import os; {WHERE}; print(os.listdir(os.environ['HPC_TRAIN_STAGED'] + '/data'))"
    words = ["submit", "--run.dir", "run", "--scheduler", "local", "--ranks_per_node", "1"]
    words += ["--stage", "--stage_data", "text", "--stage_to", "$DISK"]
    python = str(environment / "bin/python")
    submit = [python, "-m", "hpc_train", *words, "--", python, "-c", shows]
    done = run(*submit, cwd=tmp_path, environ={"DISK": str(tmp_path / "disk")})
    assert done.returncode == 0, done.stderr
    output = tmp_path / "run/run.out"
    wait_until(lambda: "removed from" in output.read_text())
    copy = f"{tmp_path}/disk/hpc_train-"
    lines = output.read_text().splitlines()
    assert any(line.startswith(copy) and line.endswith("/environment") for line in lines)
    assert any(line.startswith(copy) and line.endswith("/tool.py") for line in lines)
    assert "['text']" in lines
    assert [*(tmp_path / "disk").iterdir()] == []


def test_a_second_time_nothing_is_copied(tmp_path, environment):
    stage = command("mpirun", 2, "stage", "--to", str(tmp_path), "--environment", str(environment))
    first, second = run(*stage), run(*stage)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "copied in" in first.stdout
    assert "there already, on 1 node" in second.stdout


def test_this_environment_is_the_default(tmp_path, environment):
    """It has no packages, but their folder is in its search path."""
    python = str(environment / "bin/python")
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = ["-m", "hpc_train", "stage", "--to", str(tmp_path)]
    done = run(python, *words, environ=environ)
    assert f"{environment} -> " in done.stdout, done.stderr
    none = run(python, *words, "--environment", "none", environ=environ)
    assert none.returncode == 2
    assert only_line(none.stderr).startswith("there is nothing to copy")


@pytest.mark.parametrize("option", ["--to", "--data", "--environment"])
def test_a_path_that_cannot_be_expanded_is_one_line(option):
    with pytest.raises(UserError, match=f"argument {option}: .*: there is no user no_such_user"):
        options().parse_args([option, "~no_such_user/x"])


def test_the_environments_home_is_expanded(tmp_path, environment):
    words = ["stage", "--environment", f"~/{environment.name}", "--to", str(tmp_path)]
    done = run(*hpc_train(*words), environ={"HOME": str(tmp_path)})
    assert f"{environment} -> " in done.stdout, done.stderr


def test_ranks_load_neither_torch_nor_other_large_libraries():
    check = (
        "import sys; from hpc_train.cli import main; main(['stage', '--clean', '--to', '/none'])\n"
        "print(*({'torch', 'numpy', 'yaml', 'h5py', 'rich'} & sys.modules.keys()))"
    )
    done = run("mpirun", "-np", "2", sys.executable, "-c", check)
    of_rank_1 = [line for line in done.stdout.splitlines() if "hpc_train" not in line]
    assert "" in of_rank_1, done.stdout
