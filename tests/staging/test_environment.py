from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from hpc_train.staging.environment import activation, remover, stays_behind
from tests.waiting import PATIENCE, wait_until

SETTINGS = "home = {home}\ninclude-system-site-packages = {system}\nversion = 3.11.7\n"


def installed(environment: Path, name: str, told: dict) -> None:
    folder = environment / f"lib/python3.11/site-packages/{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "direct_url.json").write_text(json.dumps(told))


def test_what_an_environment_loads_from_elsewhere_is_said(tmp_path):
    settings = tmp_path / "pyvenv.cfg"
    settings.write_text(SETTINGS.format(home="/usr/bin", system="false"))
    installed(tmp_path, "a_wheel", {"url": "file:///home/me/a.whl", "archive_info": {}})
    assert [*stays_behind(tmp_path)] == []
    settings.write_text(SETTINGS.format(home="/home/me/.pyenv/3.11/bin", system="true"))
    installed(tmp_path, "mine", {"url": "file:///home/me/mine", "dir_info": {"editable": True}})
    python, packages, editable = stays_behind(tmp_path)
    assert "still loaded from /home/me/.pyenv/3.11/bin" in python
    assert "packages that the environment takes from its Python are not in it" in packages
    assert editable == "mine is installed as editable, and is still loaded from /home/me/mine"


def test_a_conda_environment_has_all_it_needs(tmp_path):
    (tmp_path / "conda-meta").mkdir()
    assert [*stays_behind(tmp_path)] == []


def test_copies_are_removed_on_sigterm_once_nothing_uses_them(tmp_path):
    folder = tmp_path / "copies of a [job]"
    folder.mkdir()
    (folder / "remove_at_end").write_text(remover(folder))
    using = {**os.environ, "HPC_TRAIN_STAGED": str(folder)}
    with (
        subprocess.Popen(["sleep", "60"], env=using) as user,
        subprocess.Popen(["sh", str(folder / "remove_at_end")], process_group=0) as removing,
    ):
        shell = Path(f"/proc/{removing.pid}/task/{removing.pid}/children")
        wait_until(shell.read_text)  # it waits for SIGTERM
        os.killpg(removing.pid, signal.SIGUSR1)
        os.killpg(removing.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert folder.exists()
        user.kill()
        assert removing.wait(PATIENCE) == 0
    assert not folder.exists()


def test_the_script_changes_the_shells_environment(tmp_path):
    folder = tmp_path / "copies of a [job]"
    folder.mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    script = folder / "activate"
    shell = (
        '. "$1"; echo "$HPC_TRAIN_STAGED"; echo "$PATH"; echo "$VIRTUAL_ENV"; echo "$CONDA_PREFIX"'
    )

    def variables(environment: Path | None) -> list[str]:
        script.write_text(activation(folder, environment))
        words = ["sh", "-euc", shell, "sh", str(script)]
        environ = {"PATH": "/bin", "VIRTUAL_ENV": "v", "CONDA_PREFIX": "c"}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    copy = f"{folder}/environment"
    assert variables(None) == [str(folder), "/bin", "v", "c"]
    assert variables(tmp_path) == [str(folder), f"{copy}/bin:/bin", copy, "c"]
    (tmp_path / "pyvenv.cfg").unlink()
    (tmp_path / "conda-meta").mkdir()
    assert variables(tmp_path) == [str(folder), f"{copy}/bin:/bin", "v", copy]
