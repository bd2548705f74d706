"""Which launched commands are run by forks of a node's fork server."""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_train.launch.warm_start import warm_command
from hpc_train.warm.key import WARM


def test_another_python_of_the_same_folder_is_not_replaced_by_this_one(tmp_path, monkeypatch):
    this, alias, other = (tmp_path / name for name in ("python3", "python", "python3.99"))
    this.symlink_to(Path(sys.executable).resolve())
    alias.symlink_to(this)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(this))
    words = [str(other), "script.py"]
    assert warm_command(words, {WARM: "server"}) == words
    assert "-S" in warm_command([str(alias), "script.py"], {WARM: "server"})
