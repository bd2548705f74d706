"""A model whose training no host could hold as a whole, on hosts whose memory is limited."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import limited
from tests.cluster.hosts import hosts, why_not
from tests.programs import hpc_train, only_line, python, run

HOSTS, RANKS = 4, 2
PARAMETERS_MB = 4 * 12 * 12 * 768**2 / 1e6  # 12 blocks of 768 channels, in float32
LIMIT_MB = 1200
MODEL = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 32}


@pytest.fixture(scope="module")
def cluster():
    if reason := why_not() or limited.why_not():
        pytest.skip(reason)
    with hosts(HOSTS, RANKS, mbit=8000) as up:
        yield up
    for host in up.names:
        with suppress(OSError):
            limited.group_of(str(os.getpid()), host).rmdir()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("the same line again and again\n" * 2000)
    run(
        *hpc_train("prepare", "text", str(text), "--out", str(folder / "shards"))
    ).check_returncode()
    return folder / "shards"


@pytest.mark.long
@pytest.mark.slow("three jobs of eight ranks with 85 million parameters")
def test_a_state_that_no_host_holds_is_trained_saved_and_resumed(cluster, data, tmp_path):
    assert 4 * PARAMETERS_MB > LIMIT_MB

    def train(directory: str, *more: str):
        fixed = {"run.dir": tmp_path / directory, "data.path": data, "data.batch": 8}
        fixed |= {"run.log_every": 1, "run.hang_timeout": 120, "checkpoint.keep": 1}
        fixed |= {f"model.{key}": value for key, value in MODEL.items()}
        words = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
        program = python("-m", "tests.cluster.limited", str(os.getpid()), str(LIMIT_MB))
        command = [*program, "train", "--cold", *words, *more]
        return cluster.run(command, HOSTS * RANKS, environ={"OMP_NUM_THREADS": "1"})

    refused = train("whole", "--memory.zero", "0", "--run.steps", "2")
    assert refused.returncode == 2, refused.stderr
    line = only_line(refused.stderr)
    assert "the training needs" in line
    assert "give --memory.zero" in line

    first = train("run", "--memory.zero", "3", "--run.steps", "2")
    assert first.returncode == 0, first.stderr
    second = train("run", "--memory.zero", "3", "--run.steps", "4")
    assert second.returncode == 0, second.stderr
    assert "resumed from" in second.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(text)["loss"] for text in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
