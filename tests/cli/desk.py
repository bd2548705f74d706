"""A login node, whose scheduler's commands only take notes."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.programs import hpc_train, run

QSTAT = """Job Id: {id}
    Job_Name = my
    job_state = {state}
    queue = workq
    exec_host = node1/0*2+node2/0*2
    comment = Not Running: Insufficient amount of resource
\t: ncpus
    resources_used.walltime = 00:10:00

"""


class Desk:
    """A folder with a configuration, and schedulers' commands in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "my.yaml").write_text("run: {dir: 'runs/my', steps: 5}\n")
        (folder / "bin").mkdir()

    def scheduler(self, name: str, code: int = 0, says: str | None = None) -> None:
        """Make a command that prints a text, or a new job's id, or that fails."""
        calls = f"{self.folder}/{name}.calls"
        prints = f"/usr/bin/wc -l < {calls}" if says is None else f"echo {shlex.quote(says)}"
        self.command(name, f"echo 'invalid account' >&2; exit {code}" if code else prints)

    def command(self, name: str, does: str) -> None:
        """Make a command that writes down how it is called, and does something in the shell."""
        made = self.folder / name
        made.write_text(f'#!/bin/sh\necho "$*" >> {self.folder}/{name}.calls\n{does}\n')
        made.chmod(0o755)
        made.replace(self.folder / "bin" / name)  # which a program may be running now

    def run(self, *words: str, **environ: str):
        environ = {"PATH": f"{self.folder}/bin", **environ}
        return run(*hpc_train(*words), cwd=self.folder, environ=environ)

    def calls(self, name: str) -> list[str]:
        return (self.folder / f"{name}.calls").read_text().splitlines()
