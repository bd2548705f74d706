"""Jobs over hosts that die or are slow, without a scheduler."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.cluster.hosts import hosts
from tests.conftest import small_program
from tests.programs import LAUNCHED, hpc_train
from tests.waiting import wait_until

HOSTS = "node1:2,node2:2,node3:2"


@pytest.mark.long  # test_jobs.py has a host that dies, too.
@pytest.mark.slow("jobs over hosts, and a host whose death has to be noticed")
def test_a_spare_host_takes_the_place_of_one_that_dies(tmp_path: Path, text_data: Path):
    program = small_program(tmp_path, text_data)
    options = ["--run.steps", "80", "--checkpoint.every", "20", "--gradients.engine", "mpi"]
    options += ["--run.deterministic", "true"]  # not whichever way of averaging is faster now
    train = ["train", str(program.config), *options]
    metrics = tmp_path / "run/metrics.jsonl"
    with hosts(3, 2) as cluster:
        whole = cluster.run(program.command("whole", *options), 4)
        assert whole.returncode == 0, whole.stderr
        agent = LAUNCHED | {"OMPI_MCA_plm_rsh_agent": str(cluster.folder / "enter")}
        start = ["launch", "-np", "4", "-H", HOSTS, "--max_restarts", "2", "--"]
        words = hpc_train(*start, *train, "--run.dir", str(tmp_path / "run"))
        done = []
        thread = threading.Thread(
            target=lambda: done.append(cluster.on("node1", words, environ=agent))
        )
        thread.start()
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 21)
        cluster.power_off("node2")
        thread.join(150)
    assert done, "the job hangs"
    assert done[0].returncode == 0, done[0].stderr
    assert "host node2 does not answer; restart 1 of 2" in done[0].stderr
    lines = (tmp_path / "run/launch.jsonl").read_text().splitlines()
    starts = [record for line in lines if (record := json.loads(line))["event"] == "start"]
    assert [record["hosts"] for record in starts] == ["node1:2,node2:2", "node1:2,node3:2"]
    assert program.losses("run") == program.losses("whole")


def test_a_slow_link_is_named_before_the_first_step(tmp_path: Path, text_data: Path):
    program = small_program(tmp_path, text_data)
    options = ["--run.steps", "1", "--data.batch", "12", "--gradients.engine", "mpi"]
    slow = ["rate", "10mbit", "burst", "32kb", "latency", "50ms"]
    with hosts(3, 1) as cluster:
        shaped = cluster.on("node2", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow])
        assert shaped.returncode == 0, shaped.stderr
        done = cluster.run(program.command("run", *options), 3)
    assert done.returncode == 0, done.stderr
    between = [line for line in done.stdout.splitlines() if "between hosts" in line]
    assert "! between hosts" in between[0]
    assert "slower: node2 " in between[0]
    assert "node1" not in between[0]
    assert "node3" not in between[0]
