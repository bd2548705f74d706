"""The checks for a machine with a GPU, tried on processors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_lab import HIDDEN, Found, Lab, Skipped
from tests.programs import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow("four trainings in processes of their own")
def test_checks_pass_on_processors_and_say_what_they_left_out(tmp_path):
    result = tmp_path / "result.json"
    names = ["two ranks", "another layout", "host optimizer"]
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", *names]
    done = run(*words, "--json", str(result), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["device"] == "processors"
    states = {one["name"]: one["state"] for one in found["results"]}
    assert states == dict(zip(names, ["passed", "passed", "skipped"], strict=True))
    assert max(one["figures"].get("difference", 0) for one in found["results"]) < 1e-10


def test_without_a_gpu_a_line_says_so(tmp_path):
    done = run(sys.executable, "-m", "benchmarks.gpu", environ=HIDDEN, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout.splitlines() == [
        "torch finds no GPU here. To try the checks without one: python -m benchmarks.gpu "
        "--device cpu"
    ]


class Hours(Lab):
    def __init__(self, hours):
        self.hours = hours

    def left(self):
        return 3600 * self.hours


def passes(lab):
    return Found("all is well", {"one": 1.0})


def fails(lab):
    raise AssertionError("losses differ")


def breaks(lab):
    raise OSError("no such device")


def skips(lab):
    raise Skipped("it needs a GPU")


@pytest.mark.parametrize(
    ("check", "hours", "state", "text"),
    [
        (passes, 1, "passed", "all is well"),
        (fails, 1, "failed", "losses differ"),
        (breaks, 1, "failed", "OSError('no such device')"),
        (skips, 1, "skipped", "it needs a GPU"),
        (passes, 0, "skipped", "the time is over: give --minutes, or --only"),
    ],
)
def test_whatever_happens_in_a_check_is_a_result(monkeypatch, check, hours, state, text):
    monkeypatch.setattr(gpu, "CHECKS", {"a check": check})
    found = gpu.carry_out("a check", Hours(hours))
    assert (found.state, found.text) == (state, text)
