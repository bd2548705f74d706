"""The Python environment to copy: which it is, what is not in it, how a job switches to it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from hpc_train.errors import UserError

ENVIRONMENT = "environment"  # the folder of its copy
ACTIVATE = "activate"  # the script for job scripts
REMOVE = "remove_at_end"  # the program that removes a node's copies when SLURM ends the job
STAGED = "HPC_TRAIN_STAGED"  # the variable with the folder of the copies
REMOVER_WAITS = ".remover_waits"  # the mark of such a program in the folder of the copies
CONDA = "conda-meta"
VENV = "pyvenv.cfg"

# SLURM sends SIGTERM to all steps of a job that it ends, and SIGKILL 30 seconds later as it is
# installed (KillWait). Until then ranks may save, and load what they need for it from the copies.
# In the grace time of a preemption SIGKILL comes much later, so SLURM is asked.
_REMOVE = """#!/bin/sh
# Removes the copies from this node when SLURM ends the job. Start it on each node.
#   srun --overlap --mem=0 --gres=none --mpi=none --ntasks-per-node=1 {program} & disown
# Do this before {activate} is read. What has read that file uses the copies.
folder={folder}
cd / || exit
end=
trap '' HUP INT USR1 USR2
trap 'end=1' TERM
: >"$folder/{waits}"
until [ "$end" ]; do
    sleep 5 & # not for long: a signal that comes now is noticed after it
    wait $!
done
tries=0
while grep -qszxF "{staged}=$folder" /proc/[0-9]*/environ; do
    tries=$((tries + 1))
    if [ $((tries % 30)) -eq 0 ] &&
        timeout 5 squeue -h -j "$SLURM_JOB_ID" -o '%A %T' |
        grep -qx "$SLURM_JOB_ID COMPLETING"; then
        break # SIGKILL comes soon
    fi
    sleep 0.5
done
rm -rf "$folder"
"""


def own_environment() -> Path | None:
    """The environment of this Python; None if it is in none."""
    prefix = Path(sys.prefix)
    return prefix if sys.prefix != sys.base_prefix or (prefix / CONDA).is_dir() else None


def check_environment(path: Path) -> None:
    """Check that a folder is an environment.

    Raises:
        UserError: it is neither a virtual environment nor one of conda.
    """
    if not ((path / VENV).is_file() or (path / CONDA).is_dir()):
        raise UserError(
            f"{path} is not a Python environment",
            "give --environment the folder of a virtual environment or of a conda environment",
        )


def stays_behind(path: Path) -> Iterator[str]:
    """What programs of an environment load from elsewhere, one sentence each."""
    settings = _settings(path)
    home = settings.get("home", "")
    if home and home not in ("/bin", "/usr/bin"):
        yield (
            f"the environment's Python is not in it, and is still loaded from {home} (a conda "
            "environment has its own)"
        )
    if settings.get("include-system-site-packages", "").lower() == "true":
        yield "packages that the environment takes from its Python are not in it"
    for about in sorted(path.glob("lib/python*/site-packages/*.dist-info/direct_url.json")):
        # https://packaging.python.org/en/latest/specifications/direct-url
        told = json.loads(about.read_text(encoding="utf-8"))
        if told.get("dir_info", {}).get("editable"):
            package = about.parent.name.partition("-")[0]
            folder = told["url"].removeprefix("file://")
            yield f"{package} is installed as editable, and is still loaded from {folder}"


def _settings(path: Path) -> dict[str, str]:
    if not (path / VENV).is_file():
        return {}
    lines = (line.partition("=") for line in (path / VENV).read_text(encoding="utf-8").splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def remover(folder: Path) -> str:
    """The text of the program that removes a node's copies when SLURM ends the job.

    Args:
        folder: the folder of the copies.
    """
    program, activate, quoted = (
        shlex.quote(str(path)) for path in (folder / REMOVE, folder / ACTIVATE, folder)
    )
    return (
        _REMOVE.replace("{program}", program)
        .replace("{activate}", activate)
        .replace("{folder}", quoted)
        .replace("{staged}", STAGED)
        .replace("{waits}", REMOVER_WAITS)
    )


def activation(folder: Path, environment: Path | None) -> str:
    """The text of the script that makes a shell use the copies.

    Args:
        folder: the folder of the copies.
        environment: the environment that was copied; None if there is none.
    """
    lines = [
        "# A job script reads this file: its programs then come from the copies on this node.",
        f"export {STAGED}={shlex.quote(str(folder))}",
    ]
    if environment is not None:
        kind = "CONDA_PREFIX" if (environment / CONDA).is_dir() else "VIRTUAL_ENV"
        lines += [
            f'export {kind}="${STAGED}/{ENVIRONMENT}"',
            f'export PATH="${kind}/bin:$PATH"',
            "unset PYTHONHOME",
            "hash -r",
        ]
    return "\n".join([*lines, ""])
