"""`hpc-train profile`: a running job is asked for a profile."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.launch import profile_request
from hpc_train.launch.profile_request import ProfileRequest, read_profile_request
from tests.programs import ENVIRON, hpc_train, only_line, run, wait_for_end
from tests.waiting import PATIENCE, wait_until

ENDLESS = ("--run.steps", "1000000", "--checkpoint.every", "1000000", "--run.preflight", "false")


@pytest.fixture
def running(program):
    """The directory of a run with two ranks, which has taken its first steps."""
    command = program.command("run", *ENDLESS, launcher="mpirun", ranks=2)
    metrics = program.root / "run/metrics.jsonl"
    with subprocess.Popen(
        command, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_until(
            lambda: (
                process.poll() is not None
                or (metrics.exists() and metrics.read_text().count("\n") > 2)
            )
        )
        assert process.poll() is None
        yield program.root / "run"
        (program.root / "run/STOP").touch()
        process.wait(PATIENCE)
    wait_for_end(program.root / "run", 20)


def profile(directory, *options):
    return run(*hpc_train("profile", str(directory), *options))


def test_a_running_job_writes_a_profile(running):
    done = profile(running, "--steps", "3", "--ranks", "all")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    first, last = map(int, path.parent.name.removeprefix("steps-").split("-"))
    assert path == running / f"profile/steps-{first}-{last}/trace.json.gz"
    assert last == first + 2
    trace = json.loads(gzip.decompress(path.read_bytes()))
    steps = {(e["pid"], e["name"]) for e in trace["traceEvents"] if e.get("cat") == "step"}
    assert steps == {(r, f"step {n}") for r in range(2) for n in range(first, last + 1)}
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "rank-000.torch.json.gz",
        "rank-001.torch.json.gz",
        "trace.json.gz",
    ]
    assert not (running / "profile/request.json").exists()
    refused = profile(running, "--ranks", "1-2")
    assert refused.returncode == 2
    assert "the job has ranks 0 to 1" in only_line(refused.stderr)


def claimed(directory):
    """A directory with the claim of a job that does not run."""
    (directory / ".claim").mkdir(parents=True)
    (directory / ".claim/000001").touch()
    return directory


def test_a_job_that_does_not_run_or_does_not_answer_is_told(tmp_path):
    free = claimed(tmp_path / "free")
    (free / ".claim/000001.free").touch()
    for directory, message in (
        (tmp_path / "none", "is not a run directory: give the run.dir of a job"),
        (free, "no job runs in"),
    ):
        done = profile(directory)
        assert done.returncode == 2
        assert message in only_line(done.stderr)
    silent = claimed(tmp_path / "silent")
    done = profile(silent, "--timeout", "1")
    assert done.returncode == 2
    assert "has not answered for 1 s" in only_line(done.stderr)
    assert list((silent / "profile").iterdir()) == [], "the request is withdrawn"
    assert profile(silent, "--no_wait").returncode == 0
    assert "another request" in only_line(profile(silent).stderr)
    os.utime(silent / ".claim/000001", (1e9, 1e9))
    (silent / "profile/request.json").unlink()
    assert "so it does not run" in only_line(profile(silent).stderr)
    for options, message in (
        (("--steps", "101"), "torch.profiler records 100 at most"),
        (("--timeout", "3", "--no_wait"), "not allowed with argument"),
    ):
        done = profile(silent, *options)
        assert done.returncode == 2
        assert message in only_line(done.stderr)
    assert "'x'" in only_line(profile(silent, "--ranks", "x").stderr)


def test_a_request_that_is_removed_without_an_answer_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_request, "GONE_SECONDS", 0.3)
    run = claimed(tmp_path)
    (run / "profile").mkdir()
    former = json.dumps({"request": "it", "claim": "000000", "steps": 5, "ranks": "0"})
    (run / "profile/request.json").write_text(former)
    asked = ProfileRequest(run, 500, "none")  # instead of the former one
    assert read_profile_request(run)["claim"] == "000001"
    (run / "profile/request.json").write_text(former)
    with pytest.raises(UserError, match="the request was removed, and the job of"):
        asked.wait(PATIENCE)
    assert read_profile_request(run)["request"] == "it", "another's request stays"
