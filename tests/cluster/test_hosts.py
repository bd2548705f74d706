"""The emulated hosts: separate for MPI, counted truly, gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import ROOT, hosts
from tests.programs import run

PLACE = "from tests.cluster import place; place.main()"
MIB = 4
ALLREDUCE = f"""
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
values = np.full({MIB} << 18, world.rank, np.float32)
world.Allreduce(MPI.IN_PLACE, values)
assert (values == 28).all()
"""
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}
HELD = """
import sys
from tests.cluster.hosts import hosts
with hosts(2, 1) as cluster:
    cluster.on("node2", ["sh", "-c", "sleep 1000 > /dev/null 2>&1 &"])
    print(*cluster.processes(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster():
    with hosts(4, 2) as up:
        yield up


def ranks(cluster, program, by, environ=None):
    done = cluster.run([sys.executable, "-c", program], 8, by, environ=environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_ranks_are_packed_or_dealt_and_share_memory_only_inside_a_host(cluster):
    packed = [(f"node{rank // 2 + 1}", 2) for rank in range(8)]
    dealt = [(f"node{rank % 4 + 1}", 2) for rank in range(8)]
    assert ranks(cluster, PLACE, "slot") == str(packed)
    assert ranks(cluster, PLACE, "node") == str(dealt)


@pytest.mark.parametrize(("by", "leaving"), [("slot", 1), ("node", 2)])
def test_an_allreduce_sends_what_its_ring_has_to(cluster, by, leaving):
    """In a ring of p ranks each sends 2 (p-1) / p of the data to the next one; `leaving` of a
    host's ranks have their next one on another host."""
    before = cluster.bytes_sent()
    ranks(cluster, ALLREDUCE, by, RING)
    after = cluster.bytes_sent()
    payload = leaving * 2 * 7 / 8 * (MIB << 20)
    for name in cluster.names:
        assert payload <= after[name] - before[name] <= 1.1 * payload


def test_hosts_know_each_other_and_do_not_share_temporary_files(cluster):
    script = 'getent hosts node4; touch "$TMPDIR/mine" /dev/shm/mine'
    assert cluster.on("node1", ["sh", "-c", script]).stdout.split() == ["10.0.0.4", "node4"]
    done = cluster.on("node2", ["sh", "-c", 'pwd; hostname; ls "$TMPDIR" /dev/shm | grep mine'])
    assert done.stdout.split() == [str(ROOT), "node2"]


def test_the_status_and_the_environment_pass(cluster):
    done = cluster.run(["sh", "-c", "exit $STATUS"], 8, environ={"STATUS": "75"})
    assert done.returncode == 75
    refused = cluster.run(["true"], 9)
    assert refused.returncode != 0
    assert "not enough slots" in refused.stderr


def test_a_host_that_was_powered_off_comes_back_empty(cluster):
    before = cluster.processes()
    hold = "sleep 1000 > /dev/null 2>&1 & touch /dev/shm/mine $TMPDIR/mine"
    cluster.on("node2", ["sh", "-c", hold]).check_returncode()
    cluster.power_off("node2")
    assert len(cluster.processes() - before) == 0
    assert cluster.on("node2", ["true"]).returncode != 0
    cluster.boot("node2")
    done = cluster.on("node2", ["sh", "-c", "hostname; ls /dev/shm $TMPDIR | grep mine"])
    assert done.stdout == "node2\n"
    assert ranks(cluster, PLACE, "node") == str([(f"node{rank % 4 + 1}", 2) for rank in range(8)])


def test_a_run_over_its_time_is_killed_on_all_hosts(cluster):
    before = cluster.processes()
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run(["sleep", "1000"], 8, timeout=3)
    assert cluster.processes() <= before  # some of another test may have ended since
    assert cluster.run(["hostname"], 1).stdout == "node1\n"


def test_links_have_the_bandwidth_asked_for():
    with hosts(2, 1, mbit=50) as cluster:
        show = ["tc", "qdisc", "show", "dev"]
        out = cluster.on("node2", [*show, "eth0"])
        into = run("nsenter", f"--target={cluster.parent}", "--net", *show, "node2")
        for end in (out, into):
            assert "tbf" in end.stdout
            assert "rate 50Mbit" in end.stdout


def test_clusters_stand_side_by_side_and_leave_nothing():
    links = set(Path("/sys/class/net").iterdir())
    with hosts(2, 1) as one, hosts(2, 1) as other:
        for cluster in (one, other):
            cluster.on("node2", ["sh", "-c", "sleep 1000 > /dev/null 2>&1 &"])
            assert set(cluster.run(["hostname"], 2).stdout.split()) == {"node1", "node2"}
        running = [psutil.Process(pid) for up in (one, other) for pid in up.processes()]
        assert set(Path("/sys/class/net").iterdir()) == links
    assert not [process for process in running if process.is_running()]
    assert not one.folder.exists()
    assert not other.folder.exists()
    assert set(Path("/sys/class/net").iterdir()) == links


def test_hosts_end_with_a_process_that_is_killed(tmp_path: Path):
    held = subprocess.Popen(
        [sys.executable, "-c", HELD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with held:
        running = [psutil.Process(int(pid)) for pid in held.stdout.readline().split()]
        assert len(running) > 4
        held.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(running, timeout=30)[1]


def test_a_cluster_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr("tests.cluster.hosts.SHAPE", "tc qdisc add dev {link} root no_such_kind")
    with pytest.raises(RuntimeError, match="no_such_kind|qdisc"), hosts(1, 1, mbit=100):
        pass
