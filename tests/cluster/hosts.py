"""Several hosts on one machine: each has its own network and host name, a bridge joins them.

All of a cluster lives in one process namespace, whose first process waits on a pipe from here. When
it ends, even because this process was killed, the kernel ends every process on the hosts and with
them their networks and mounts. Nothing of it has a name outside, so clusters cannot collide.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests.programs import ENVIRON, run

ROOT = Path(__file__).parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mpirun")  # iproute2, util-linux, Open MPI

# The first process stands in the bridge's network, where the link to a host has the host's name.
# Daemons become its children: `wait` reaps them.
BOOT = """
ip link add switch type bridge
ip link set switch up
cd {folder}
while read -r address name; do
    mkdir $name
    unshare --net --uts --mount sh -ec '{host}' - $address $name
    ip link set $name master switch up
    {shape_in}
done < addresses
exec 3<&0
cat <&3 &
echo ready
wait $!
"""
# Made inside the host. `netns 1`: the network of process 1, above. The sleeping process keeps the
# host's namespaces, so that others can enter. Two clusters' shared memory may have the same names.
HOST = """
hostname $2
mount --bind hosts /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
ip link add eth0 type veth peer name $2 netns 1
ip address add $1/24 dev eth0
ip link set eth0 up
{shape_out}
sleep infinity &
echo $! > $2/pid
"""
SHAPE = "tc qdisc add dev {link} root tbf rate {mbit}mbit burst 256kb latency 50ms"
# Called as ssh is: HOST WORD..., which the host's shell reads as one line.
ENTER = """#!/bin/sh
host=$1
shift
exec nsenter --target "$(cat {folder}/$host/pid)" --net --uts --mount \\
    env --chdir={root} TMPDIR={folder}/$host sh -c "$*"
"""


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up.

    Args:
        names: the hosts' names, which resolve on each of them.
        slots: ranks that a host takes.
        folder: holds the script `enter`, and for each host a folder for temporary files.
        parent: the process whose child is the first of the cluster's process namespace.
    """

    names: list[str]
    slots: int
    folder: Path
    parent: int

    def run(
        self,
        command: Sequence[str],
        ranks: int,
        by: Literal["slot", "node"] = "slot",
        timeout: float = 180,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command's ranks over all hosts, by mpirun on the first one; output is text.

        Args:
            command: what each rank runs, in the project's root.
            ranks: how many; mpirun refuses more than all slots.
            by: "slot" fills one host after the other, "node" deals the ranks out one by one.
            timeout: seconds, after which all that was started is killed.
            environ: variables to add, for mpirun and the ranks.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        hosts = ",".join(f"{name}:{self.slots}" for name in self.names)
        agent = str(self.folder / "enter")
        options = ["--host", hosts, "--map-by", by, "--bind-to", "none"]
        # The hosts share this machine's cores and memory, which Open MPI and UCX cannot know.
        options += ["-mca", "mpi_yield_when_idle", "1", "-mca", "pml", "ob1"]
        options += ["-mca", "btl", "self,vader,tcp", "-mca", "plm_rsh_agent", agent]
        words = ["mpirun", "-np", str(ranks), *options, *command]
        return self.on(self.names[0], words, timeout, environ)

    def on(
        self,
        host: str,
        command: Sequence[str],
        timeout: float = 180,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on one host; arguments, result and errors as in `run`."""
        before = self.processes()
        enter = ["nsenter", f"--target={self.parent}", "--mount", f"--pid={self._processes}"]
        added = {"PYTHONPATH": str(ROOT), "OMPI_MCA_rmaps_base_oversubscribe": "0"}
        try:
            return run(
                *(*enter, str(self.folder / "enter"), host, shlex.join(command)),
                timeout=timeout,
                environ={**added, **(environ or {})},
            )
        except BaseException:
            self._kill_others(before)
            raise

    def bytes_sent(self) -> dict[str, int]:
        """Bytes that each host has sent to others since it came up, with Ethernet's headers.

        Large TCP segments cross the emulated links in one piece, with one header: on a real link
        there are up to 5 percent more.
        """
        # The bridge's side of the links: what was received there, the first number, left the host.
        links = Path(f"/proc/{self.parent}/net/dev").read_text()
        received = dict(re.findall(r"^ *(\w+): *(\d+)", links, re.MULTILINE))
        return {name: int(received[name]) for name in self.names}

    def processes(self) -> set[int]:
        """All processes on the hosts, by their numbers outside."""
        mine = self._processes.readlink()
        return {pid for pid in psutil.pids() if _process_namespace(pid) == mine}

    @property
    def _processes(self) -> Path:
        return Path(f"/proc/{self.parent}/ns/pid_for_children")

    def _kill_others(self, kept: set[int]) -> None:
        while others := self.processes() - kept:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _process_namespace(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:  # it has ended
        return None


@contextmanager
def hosts(count: int, slots: int, mbit: int | None = None) -> Iterator[Cluster]:
    """Bring hosts up; at the end, take down them and all that runs on them.

    Args:
        count: number of hosts, which are named node1, node2, ...; at most 254.
        slots: ranks that a host takes.
        mbit: bandwidth of each host's link in each direction, in Mbit/s; None does not limit it.

    Raises:
        RuntimeError: they cannot be made; the message is the failed tool's.
    """
    names = [f"node{i + 1}" for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        _write_files(folder, names)
        with _booted(_script(folder, mbit)) as parent:
            yield Cluster(names, slots, folder, parent)


def _write_files(folder: Path, names: Sequence[str]) -> None:
    addresses = "".join(f"10.0.0.{i + 1} {name}\n" for i, name in enumerate(names))
    (folder / "addresses").write_text(addresses)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + addresses)
    (folder / "enter").write_text(ENTER.format(folder=folder, root=ROOT))
    (folder / "enter").chmod(0o755)


def _script(folder: Path, mbit: int | None) -> str:
    into, out = (SHAPE.format(link=link, mbit=mbit) if mbit else "" for link in ("$name", "eth0"))
    return BOOT.format(folder=folder, host=HOST.format(shape_out=out), shape_in=into)


@contextmanager
def _booted(script: str) -> Iterator[int]:
    spaces = ("--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
    words = ["unshare", *spaces, "sh", "-ec", script]
    pipe = subprocess.PIPE  # leaving the context closes them, which ends the script
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(process.stderr.read().strip())
        yield process.pid


@functools.cache
def why_not() -> str:
    """Why no hosts can be made here; "" where they can, which is tried."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=ENVIRON["PATH"])]
    if missing:
        return f"emulated hosts need {', '.join(missing)}"
    if "(Open MPI) 4." not in run("mpirun", "--version").stdout:
        return "emulated hosts need the mpirun of Open MPI 4"
    try:
        with hosts(1, 1, mbit=100):
            return ""
    except RuntimeError as error:
        return f"no emulated hosts: {error}"
