"""Profiles of a Trainer's steps: what is in them, and what happens where they cannot be written."""

from __future__ import annotations

import errno
import gzip
import json
import time

import pytest
import torch

from hpc_train.config import ProfileSection
from hpc_train.errors import ConfigError
from hpc_train.job import profiling
from hpc_train.monitoring import gzip_parts
from hpc_train.monitoring.trace import MAIN, THREADS
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.parallel.schedule import build
from tests.mpi_layer.test_clocks import DRIFT, OFFSET, WITHIN, WrongClock
from tests.training import test_loop as loop_test
from tests.training.test_trainer import STEPS, check_equal, config, make, needs_horovod


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def threads(trace, rank):
    """A rank's events with a duration, by the name of their thread."""
    events = [event for event in trace["traceEvents"] if event["pid"] == rank]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def events_of(run):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "profile"]


PIPELINE = ["--parallel.pp", "2", "--data.micro_batch", "3", "--checkpoint.background", "true"]


@pytest.mark.mpi(min_size=4)
def test_a_profile_has_what_all_ranks_did_on_one_clock(job, together, reference, monkeypatch):
    """Each process has a wrong clock of its own, and is a host of its own."""
    world, truly, size = job.world, time.perf_counter, job.world.size
    since = world.from_first(truly)
    signs = [1, -1, 0.5, -0.3]
    clocks = [WrongClock(sign * OFFSET, -sign * DRIFT, since) for sign in signs]
    mine = clocks[world.rank]
    monkeypatch.setattr(time, "perf_counter", lambda: mine.of(truly()))
    options = [*PIPELINE, "--run.profile.steps", "2-5", "--run.profile.ranks", "1,3"]
    trainer = make(config(together / "run", *options), Runtime(world, Group(waiting=world.waiting)))
    trues = {}
    original = trainer._train_step

    def noted(step, report):
        world.barrier()
        trues[step.number] = truly()
        with trainer.phases("evaluation", f"mark {step.number}"):
            pass
        original(step, report)

    trainer._train_step = noted
    trainer.train()
    monkeypatch.undo()
    everyone = world.gathered(trues)
    folder = together / "run/profile/steps-2-5"
    if world.rank:
        return
    check_equal(together / "run", reference)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-001.torch.json.gz",
        "rank-003.torch.json.gz",
        "trace.json.gz",
    ]
    assert "aten::mm" in {
        e.get("name") for e in read(folder / "rank-003.torch.json.gz")["traceEvents"]
    }
    (event,) = events_of(together / "run")
    assert (event["step"], event["steps"], event["folder"]) == (5, [2, 5], "profile/steps-2-5")
    trace = read(folder / "trace.json.gz")
    assert trace["otherData"]["steps"] == "2-5"
    assert trace["otherData"]["lost_marks"] == 0
    marks = {}
    for rank in range(size):
        found = threads(trace, rank)
        assert [e["name"] for e in found[THREADS["step"]]] == [f"step {n}" for n in range(2, 6)]
        main = [e["name"] for e in found[MAIN]]
        actions = [e["name"] for e in found[MAIN] if e["cat"] in ("forward", "backward")]
        planned = build("1f1b", 2, 4, 1)[rank % 2]
        assert actions == 4 * [
            f"{a.kind.value} of micro-batch {a.micro_batch + 1}, stage {rank % 2}" for a in planned
        ]
        assert {"data", "optimizer", "save", "an agreement"} <= set(main)
        sums = [e["name"] for name in found for e in found[name] if name.startswith("sums")]
        assert "sum of bucket 0" in sums
        assert "bucket 0 waits for other ranks" in sums
        assert any(
            name.startswith("phase 1") for name in (e["name"] for e in found["background saves"])
        )
        for one in found[MAIN]:
            if one["name"].startswith("mark"):
                marks[rank, int(one["name"].split()[1])] = one["ts"] / 1e6
    # The trace has rank 0's clock, whose drift over these seconds is below a microsecond.
    begin = {rank: marks[rank, 2] - everyone[rank][2] for rank in range(size)}
    assert max(abs(begin[rank] - begin[0]) for rank in range(size)) < WITHIN
    for rank, number in marks:
        assert abs(marks[rank, number] - everyone[rank][number] - begin[0]) < WITHIN


@pytest.mark.mpi
def test_a_profile_that_cannot_be_written_is_a_warning(
    job, together, reference, monkeypatch, caplog
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if job.world.rank == 0:
        monkeypatch.setattr(gzip_parts, "GzipWriter", full)
    if job.world.rank == job.world.size - 1:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    options = ["--run.profile.steps", "3", "--run.profile.ranks", "all"]
    make(config(together / "run", *options), job).train()
    if job.world.rank == 0:
        check_equal(together / "run", reference)
        assert "the profile of steps 3-3 cannot be written" in caplog.text
        assert "No space left on device" in caplog.text
        assert "training goes on" in caplog.text
        assert events_of(together / "run") == []


@needs_horovod
@pytest.mark.mpi
def test_horovods_own_timeline_is_written_with_it(job, together, caplog, monkeypatch):
    if runtime.running_horovod():  # it was started without a timeline
        job.world.barrier()
        runtime.running_horovod().shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", "")  # so that it is unset again at the end
    monkeypatch.delenv("HOROVOD_TIMELINE")
    caplog.set_level("INFO")
    options = ["--gradients.engine", "horovod", "--run.profile.steps", "3-5"]
    make(config(together / "run", *options), job).train()
    if job.world.rank == 0:
        path = together / "run/profile/horovod-steps-3-5.json"
        assert f"Horovod's timeline of these steps: {path}" in caplog.text
        assert "ALLREDUCE" in path.read_text()
    monkeypatch.delenv("HOROVOD_TIMELINE")
    caplog.clear()
    make(config(together / "run2", *options), job).train()
    if job.world.rank == 0:
        assert "no timeline of Horovod" in caplog.text
        assert "start the job with run.profile" in caplog.text
        assert (together / "run2/profile/steps-3-5/trace.json.gz").exists()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run.profile.steps", "5-8"], f"but the run ends with step {STEPS}"),
        (["--run.profile.steps", "5", "--run.profile.ranks", "2-9"], "but the job has ranks 0 to"),
    ],
)
def test_steps_and_ranks_that_there_are_not_are_refused_on_all_ranks(
    job, together, options, message
):
    with pytest.raises(ConfigError, match=message):
        make(config(together / "run", *options), job)


@pytest.mark.mpi
def test_a_loop_is_profiled_too_until_it_is_left(job, together):
    whole, weights = loop_test.train(job, together / "plain")
    profile = ProfileSection(steps="2-3")
    profiled, same = loop_test.train(job, together / "run", profile=profile)
    assert profiled == whole
    assert all(map(torch.equal, same, weights))
    with pytest.raises(ConfigError, match="the run ends with step 15"):
        loop_test.train(job, together / "long", profile=ProfileSection(steps="9-16"))
    if job.world.rank == 0:
        trace = read(together / "run/profile/steps-2-3/trace.json.gz")
        for rank in range(job.world.size):
            found = threads(trace, rank)
            assert [e["name"] for e in found[THREADS["step"]]] == ["step 2", "step 3"]
            assert "data" in {e["name"] for e in found[MAIN]}
        (event,) = events_of(together / "run")
        assert (event["steps"], event["folder"]) == ([2, 3], "profile/steps-2-3")


@pytest.mark.parametrize(
    ("claim", "steps", "state"),
    [("000001", 2, "written"), ("000001", 101, "refused"), ("000000", 2, None)],
)
def test_only_a_request_to_a_former_job_is_forgotten_at_the_start(
    tmp_path, monkeypatch, caplog, claim, steps, state
):
    monkeypatch.setattr(profiling, "REQUEST_SECONDS", 0.0)
    caplog.set_level("INFO")
    folder = tmp_path / "run/profile"
    folder.mkdir(parents=True)
    asked = {"request": "me", "claim": claim, "steps": steps, "ranks": "0"}
    (folder / "request.json").write_text(json.dumps(asked))
    how = ["--run.steps", "200"] if steps > STEPS else []
    make(config(tmp_path / "run", *how), Runtime(Group(), Group())).train()
    assert not (folder / "request.json").exists()
    answer = folder / "answer.json"
    assert (json.loads(answer.read_text())["state"] if answer.exists() else None) == state
    said = [line for line in caplog.messages if line.startswith("the profile of steps 2-3 ")]
    assert len(said) == (2 if state == "written" else 0), "its begin, and that it is written"


def test_only_what_is_left_is_profiled_after_a_resume(tmp_path):
    how = ["--run.profile.steps", "2-6", "--run.profile.ranks", "none"]
    alone = Runtime(Group(), Group())
    make(config(tmp_path / "run", "--run.steps", "4"), alone).train()
    make(config(tmp_path / "run", *how), alone).train()
    (event,) = events_of(tmp_path / "run")
    assert event["steps"] == [5, 6]
    assert [path.name for path in (tmp_path / "run" / event["folder"]).iterdir()] == [
        "trace.json.gz"
    ]


@pytest.mark.parametrize(
    ("step", "steps", "profiled"), [(2, 2, [[4, 5], [6, 7]]), (3, 1, [[5, 5], [6, 7]])]
)
def test_a_request_is_taken_once_and_a_broken_one_is_removed(
    tmp_path, monkeypatch, step, steps, profiled
):
    monkeypatch.setattr(profiling, "REQUEST_SECONDS", 0.0)
    run = tmp_path / "run/profile"
    options = ["--run.profile.steps", "5-7", "--run.profile.ranks", "none"]
    trainer = make(config(tmp_path / "run", *options), Runtime(Group(), Group()))
    original = trainer._train_step

    def asked(taken, report):
        if taken.number == 1:
            run.mkdir()
            (run / "request.json").write_text('{"steps": ')
        if taken.number == step:
            assert not (run / "request.json").exists()
            text = json.dumps({"request": "me", "steps": steps, "ranks": "none"})
            (run / "request.json").write_text(text)
        original(taken, report)

    trainer._train_step = asked
    trainer.train()
    # The configuration's profile has what the request has left of it.
    assert [event["steps"] for event in events_of(tmp_path / "run")] == profiled
    assert json.loads((run / "answer.json").read_text()) == {
        "request": "me",
        "state": "written",
        "steps": profiled[0],
        "folder": "steps-{}-{}".format(*profiled[0]),
        "note": "",
    }
