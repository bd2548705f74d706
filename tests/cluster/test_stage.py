"""Copies on hosts with disks of their own: each host's /dev/shm is one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts
from tests.programs import hpc_train, only_line
from tests.waiting import wait_until

FILES, KB = 40, 100
TOTAL = FILES * KB * 1000
COPIES = f"/dev/shm/hpc_train-user-{os.getuid()}"
SUMS = f"cd {COPIES}/data/source && sha256sum *"

KILL = """
for process in /proc/[0-9]*; do
    if grep -qz ^OMPI_COMM_WORLD_RANK=2 "$process/environ"; then
        kill -{} "${{process#/proc/}}"
    fi
done
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(4, 2, mbit=40) as up:
        yield up


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "source"
    folder.mkdir()
    for number in range(FILES):
        (folder / str(number)).write_bytes(os.urandom(KB * 1000))
    return folder


def copying(source: Path, to: Path = Path("/dev/shm")) -> list[str]:
    return hpc_train("stage", "--environment", "none", "--data", str(source), "--to", str(to))


def clean(cluster) -> str:
    done = cluster.run(hpc_train("stage", "--clean", "--to", "/dev/shm"), 8)
    assert done.returncode == 0, done.stderr
    return done.stdout


def left(cluster, inside: str = "") -> list[str]:
    """The hosts that have a copy, or a part of one, with something inside."""
    words = ["ls", f"{COPIES}/{inside}"]
    return [name for name in cluster.names if not cluster.on(name, words).returncode]


def same_on_all(cluster) -> bool:
    """Whether all hosts have the same files."""
    copies = [cluster.on(name, ["sh", "-c", SUMS]).stdout for name in cluster.names]
    return len(copies[0].splitlines()) == FILES and len({*copies}) == 1


def test_each_host_gets_a_copy_and_each_link_carries_it_once(cluster, source):
    before = cluster.bytes_sent()
    done = cluster.run(copying(source), 8)
    assert done.returncode == 0, done.stderr
    sent = {name: count - before[name] for name, count in cluster.bytes_sent().items()}
    for name in cluster.names[:-1]:
        assert TOTAL <= sent[name] <= 1.1 * TOTAL, sent
    assert sent[cluster.names[-1]] < 0.1 * TOTAL
    assert same_on_all(cluster)
    assert clean(cluster) == f"{COPIES} is removed from 4 nodes\n"
    assert left(cluster) == []


def test_a_host_without_room_is_named_and_no_host_keeps_a_part(cluster, source):
    missing = cluster.run(copying(source, Path("/dev/shm/disk")), 4, "node")
    assert missing.returncode == 2
    assert "/dev/shm/disk is not a folder on this node" in only_line(missing.stderr)
    for name in cluster.names:
        assert cluster.on(name, ["mkdir", "/dev/shm/disk"]).returncode == 0
    disk = "mount -t tmpfs -o size=1m tmpfs /dev/shm/disk"
    assert cluster.on("node3", ["sh", "-c", disk]).returncode == 0
    done = cluster.run(copying(source, Path("/dev/shm/disk")), 4, "node")
    assert done.returncode == 2
    line = only_line(done.stderr)
    assert line.startswith("rank 2 (node3): /dev/shm/disk/hpc_train-user-")
    assert "has 1.049 MB free, and 4." in line
    for name in cluster.names:
        assert cluster.on(name, ["ls", "/dev/shm/disk"]).stdout == ""


@pytest.mark.parametrize("signal", [pytest.param("TERM", marks=pytest.mark.long), "KILL"])
def test_a_rank_that_is_killed_leaves_nothing_that_counts(cluster, source, signal):
    """The launcher ends the others by SIGTERM: they remove their parts. If MPI itself ends one, as
    when it loses a connection, its part stays there and is replaced."""
    done = []
    thread = threading.Thread(target=lambda: done.append(cluster.run(copying(source), 4, "node")))
    thread.start()
    wait_until(lambda: left(cluster, "data") == cluster.names)
    cluster.on("node3", ["sh", "-c", KILL.format(signal)])
    thread.join(60)
    assert done, "the ranks hang"
    assert done[0].returncode != 0
    if signal == "TERM":
        assert left(cluster) == []
        return
    again = cluster.run(copying(source), 4, "node")
    assert "copied in" in again.stdout
    assert same_on_all(cluster)
    clean(cluster)
