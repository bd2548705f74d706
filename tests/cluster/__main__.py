"""A cluster with SLURM on this machine, to try things on by hand; needs root.

    python -m tests.cluster up --hosts 4 --slots 2 --mbit 800

It stays until Ctrl-C, SIGTERM or the end of its input. Several can be up side by side.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.cluster.hosts import ON_HOSTS, hosts, write_script
from tests.cluster.slurm import Slurm, slurm, why_not
from tests.programs import ENVIRON

USAGE = """\
{names} are up, with {slots} slots each and a SLURM.

    {shell}                    a shell on the login host: sinfo, sbatch, srun
    {shell} node1              a shell on a host
    {shell} node1 COMMAND...   a command on a host

Logs are in {logs}. Ctrl-C takes all down.
"""
SHELL = """#!/bin/sh
export {variables}
host=${{1:-head}}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- bash
exec {inside} {enter} "$host" "$@"
"""


def shell(up: Slurm) -> Path:
    """Write the script that enters a host from outside of the cluster."""
    environ = {**ENVIRON, **ON_HOSTS, **up.environ}
    changed = [
        f"{name}={value}" for name, value in environ.items() if os.environ.get(name) != value
    ]
    folder = up.cluster.folder
    inside = shlex.join(up.cluster.inside)
    text = SHELL.format(variables=shlex.join(changed), inside=inside, enter=folder / "enter")
    write_script(folder / "shell", text)
    return folder / "shell"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("verb", choices=["up"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2, help="ranks that a host takes")
    parser.add_argument("--mbit", type=int, help="bandwidth of each host's link in Mbit/s")
    parser.add_argument("--pbs", action="store_true", help="jobs find PBS's variables as well")
    given = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with (
        suppress(KeyboardInterrupt),
        hosts(given.hosts, given.slots, given.mbit) as cluster,
        slurm(cluster, given.pbs) as up,
    ):
        names = f"{cluster.names[0]} to {cluster.names[-1]}"
        print(
            USAGE.format(names=names, slots=given.slots, shell=shell(up), logs=up.folder),
            flush=True,
        )
        sys.stdin.read()


if __name__ == "__main__":
    main()
