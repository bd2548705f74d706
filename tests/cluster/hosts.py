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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests.programs import ENVIRON, run
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mpirun")  # iproute2, util-linux, Open MPI

# What programs on the hosts have to be told: Open MPI cannot know that they share cores and memory.
ON_HOSTS = {
    "PYTHONPATH": str(ROOT),
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "0",
}

# The first process stands in the bridge's network, where the link to a host has the host's name.
# Daemons become its children: `wait` reaps them.
FIRST = """
ip link add switch type bridge
ip link set switch up
for name in {names}; do
    {folder}/boot $name
done
exec 3<&0
cat <&3 &
echo ready
wait $!
"""
# boot NAME, in the bridge's network.
BOOT = """#!/bin/sh -e
cd {folder}
rm -rf $1
mkdir $1
unshare --net --uts --mount sh -ec '{host}' - $(sed -n "s/ $1$//p" hosts) $1
ip link set $1 master switch up
{shape_in}
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
sleep infinity > /dev/null 2>&1 &
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
        timeout: float = PATIENCE,
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
        options = ["--host", hosts, "--map-by", by, "-mca", "plm_rsh_agent", agent]
        words = ["mpirun", "-np", str(ranks), *options, *command]
        return self.on(self.names[0], words, timeout, environ)

    def on(
        self,
        host: str,
        command: Sequence[str],
        timeout: float = PATIENCE,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on one host; arguments, result and errors as in `run`."""
        before = self.processes()
        words = [*self.inside, str(self.folder / "enter"), host, shlex.join(command)]
        try:
            return run(*words, timeout=timeout, environ={**ON_HOSTS, **(environ or {})})
        except BaseException:
            self.kill_all_but(before)
            raise

    def kill_all_but(self, kept: set[int]) -> None:
        """Kill all processes on the hosts but these."""
        _kill(lambda: self.processes() - kept)

    def power_off(self, host: str) -> None:
        """End a host and all that runs on it; its link goes first, so no other hears of the end."""
        place = self.on(host, ["readlink", "/proc/self/ns/net"]).stdout.strip()
        (self.folder / host / "pid").unlink()
        run(*self.inside, "ip", "link", "delete", host).check_returncode()
        _kill(lambda: {pid for pid in self.processes() if _namespace(pid, "net") == place})

    def boot(self, host: str) -> None:
        """Bring a host up, empty, one that was powered off or the one named `head`.

        Raises:
            RuntimeError: it cannot be made; the message is the failed tool's.
        """
        done = run(*self.inside, str(self.folder / "boot"), host)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())

    def bytes_sent(self) -> dict[str, int]:
        """Bytes that each host has sent to others since it was booted, with Ethernet's headers.

        Large TCP segments cross the emulated links in one piece, with one header: on a real link
        there are up to 5 percent more.
        """
        # The bridge's side of the links: what was received there, the first number, left the host.
        links = Path(f"/proc/{self.parent}/net/dev").read_text()
        received = dict(re.findall(r"^ *(\w+): *(\d+)", links, re.MULTILINE))
        return {name: int(received[name]) for name in self.names}

    def processes(self) -> set[int]:
        """All processes on the hosts, by their numbers outside."""
        mine = str(self._processes.readlink())
        return {pid for pid in psutil.pids() if _namespace(pid, "pid") == mine}

    @property
    def inside(self) -> list[str]:
        """The words before a command that is to run where the bridge is, beside the hosts."""
        spaces = ("--net", "--mount", f"--pid={self._processes}")
        return ["nsenter", f"--target={self.parent}", *spaces]

    @property
    def _processes(self) -> Path:
        return Path(f"/proc/{self.parent}/ns/pid_for_children")


def _kill(found: Callable[[], set[int]]) -> None:
    while left := found():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _namespace(pid: int, kind: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:  # it has ended
        return ""


@contextmanager
def hosts(count: int, slots: int, mbit: int | None = None) -> Iterator[Cluster]:
    """Bring hosts up; at the end, take down them and all that runs on them.

    Args:
        count: number of hosts, which are named node1, node2, ...; at most 253.
        slots: ranks that a host takes.
        mbit: bandwidth of each host's link in each direction, in Mbit/s; None does not limit it.

    Raises:
        RuntimeError: they cannot be made; the message is the failed tool's.
    """
    names = [f"node{i + 1}" for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        _write_files(folder, names, mbit)
        with _started(FIRST.format(folder=folder, names=" ".join(names))) as parent:
            yield Cluster(names, slots, folder, parent)


def _write_files(folder: Path, names: Sequence[str], mbit: int | None) -> None:
    addresses = {f"10.0.0.{i + 1}": name for i, name in enumerate([*names, "head"])}
    known = {"127.0.0.1": "localhost", **addresses}
    (folder / "hosts").write_text("".join(f"{at} {name}\n" for at, name in known.items()))
    into, out = (SHAPE.format(link=link, mbit=mbit) if mbit else "" for link in ("$1", "eth0"))
    host = HOST.format(shape_out=out)
    write_script(folder / "boot", BOOT.format(folder=folder, host=host, shape_in=into))
    write_script(folder / "enter", ENTER.format(folder=folder, root=ROOT))


def write_script(path: Path, text: str) -> None:
    """Write a program."""
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def _started(script: str) -> Iterator[int]:
    spaces = ("--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
    words = ["unshare", *spaces, "sh", "-ec", script]
    pipe = subprocess.PIPE  # leaving the context closes them, which ends the script
    how = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
    # A session of its own: Ctrl-C is for this process, which then takes the hosts down.
    with subprocess.Popen(words, **how, start_new_session=True) as process:
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
