"""The part of `hpc-train submit` that has a job copy its environment to its nodes before it starts.

`hpc_train/staging` does the copying, on the nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.resources import Resources


@dataclass(frozen=True)
class Staging:
    """What a job copies to its nodes' own disks before its ranks start.

    Args:
        launcher: the launcher's words that start a rank on each node.
        command: the words of `hpc-train stage`.
        environment: the environment that the job's programs are in.
    """

    launcher: Sequence[str]
    command: Sequence[str]
    environment: str


def made_staging(
    launcher: Sequence[str], asked: Resources, data: Sequence[str], to: str | None
) -> Staging:
    """What a job copies: the environment of this Python, and data sets.

    Args:
        launcher: the launcher's words, made for `one_per_node`.
        asked: what the job asks for.
        data: folders of data sets.
        to: a folder on the nodes' own disks; None for TMPDIR, or else /tmp.

    Raises:
        UserError: this Python is in no environment, a data set is no folder, or `to` is no full
            path.
    """
    if sys.prefix == sys.base_prefix and not Path(sys.prefix, "conda-meta").is_dir():
        raise UserError(
            "this Python is in no environment that could be copied",
            "install hpc_train into a virtual environment or a conda environment, or leave out "
            "--stage",
        )
    if to is not None and not to.startswith(("/", "$")):
        raise UserError(
            f"--stage_to is {to!r}", "give the full path of a folder on the nodes' own disks"
        )
    for path in data:
        if "$" not in path and not Path(path).is_dir():
            raise UserError(f"{path} is not a folder", "give --stage_data the folder of a data set")
    words = [*launcher]
    if words[0] == "srun":  # by itself it starts all ranks of the job
        nodes = str(asked.nodes)
        words += ["--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node=1"]
    command = [sys.executable, "-m", "hpc_train", "stage", *(["--to", to] if to else [])]
    if data:
        command += [
            "--data",
            *(path if path.startswith("$") else str(Path(path).absolute()) for path in data),
        ]
    return Staging(words, command, sys.prefix)


def one_per_node(asked: Resources) -> Resources:
    """The same nodes with a single rank on each."""
    return replace(asked, ranks_per_node=1, threads=1)
