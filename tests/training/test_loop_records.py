"""What a user's own loop records, on several ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_train.errors import Stopped, UserError
from hpc_train.job import reporting
from hpc_train.monitoring.energy_sources import FoundEnergy
from hpc_train.monitoring.records import LOOP_KEYS
from hpc_train.monitoring.slow_ranks import SlowRank
from hpc_train.mpi.watch import Watch
from hpc_train.training import costs
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.training.test_costs import rising

BATCH = 12


def made(job, directory):
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Loop(job, directory, model, optimizer, LoopOptions(every=0)), model, optimizer


def steps(job, directory, epochs=2, last=None, every=1, leave=None):
    """Train; yields the loop after each step. Stops after step `last`, or leaves after `leave`."""
    loop, model, optimizer = made(job, directory)
    with loop:
        inputs = torch.arange(96, dtype=torch.float64).reshape(48, 2) / 96
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        for _, batches in loop.epochs(data, batch=BATCH, epochs=epochs, shuffle=False):
            for x, y in batches:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                if loop.step_number % every == 0:
                    yield loop, loss
                if loop.step_number == leave:
                    return
                if loop.step_number == last:
                    loop.stop()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.mpi
def test_records_have_means_over_the_ranks_and_measured_times(job, together):
    rank, size = job.world.rank, job.world.size
    for loop, loss in steps(job, together, every=2):
        found = loop.record(loss=loss, rank=rank, third=1 / 3)
        assert (found["rank"], found["third"]) == ((size - 1) / 2, pytest.approx(1 / 3, rel=1e-15))
        assert loop.mean(1 / 3) == pytest.approx(1 / 3, rel=1e-15)
        assert found["loss"] == pytest.approx(loop.mean(loss), rel=1e-12)
    job.world.barrier()
    records = lines(together / "metrics.jsonl")
    assert [(one["step"], one["epoch"], one["lr"]) for one in records] == [
        (step, 1 + (step > 4), 0.1) for step in (2, 4, 6, 8)
    ]
    for one in records:
        assert one["step_seconds"] >= one["data_seconds"] + one["comm_seconds"] >= 0
        assert one["samples_per_second"] == pytest.approx(BATCH / one["step_seconds"])
        assert {"loss", "memory_gb", "time"} <= one.keys()
        assert "forward_seconds" not in one  # nobody has measured it
    start, end = lines(together / "events.jsonl")
    assert (start["event"], start["layout"]) == ("start", {"dp": size, "tp": 1, "pp": 1})
    assert (end["event"], end["step"], end["reason"]) == ("end", 8, "finished")


@pytest.mark.mpi
def test_a_resumed_loop_adds_the_records_that_are_left(job, together):
    for last in (3, None):
        for loop, loss in steps(job, together, last=last):
            loop.record(loss=loss)
        if last and job.world.rank == 0:
            with (together / "metrics.jsonl").open("a") as file:
                file.write('{"step": 5, "time": 5.5}\n')  # as of a job that was killed later
        job.world.barrier()
    assert [one["step"] for one in lines(together / "metrics.jsonl")] == [*range(1, 9)]
    found = [(one["event"], one["step"]) for one in lines(together / "events.jsonl")]
    assert found == [("start", 0), ("end", 3), ("start", 3), ("end", 8)]
    starts = lines(together / "events.jsonl")[::2]
    told = [(one.get("reached"), one.get("reached_time")) for one in starts]
    assert told == [(None, None), (5, 5.5)]


@pytest.mark.mpi
def test_a_resumed_loop_counts_its_costs_on(job, together, monkeypatch):
    monkeypatch.setattr(costs, "find_energy", lambda: FoundEnergy([rising("rapl", "p", 5)]))
    for last in (3, None):
        for loop, loss in steps(job, together, last=last, every=2):
            time.sleep(0.1)  # costs are in whole milliseconds
            loop.record(loss=loss)
    job.world.barrier()
    told = [lines(together / name) for name in ("events.jsonl", "metrics.jsonl")]
    (start, end, again, finished), records = told
    for key in ("node_hours", "joules", "metered_node_hours"):
        spent = [one.get(key, 0) for one in (start, *records[:1], end, again, *records[1:])]
        assert spent == sorted(spent)
        assert end[key] < again[key] < finished[key]
    assert (start["energy"], records[0]["joules"], records[0]["samples_per_joule"]) == (
        *("rapl", 10),
        pytest.approx(2 * BATCH / 5, rel=0.3),
    )
    assert records[1]["samples_per_joule"] == pytest.approx(BATCH / 5, rel=0.3)  # since step 3


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("signal", ("stopped", "SIGUSR1")),
        ("break", ("stopped", "the program left the loop")),
        ("stop", ("finished", None)),
    ],
)
def test_the_last_event_says_how_the_loop_ended(job, together, how, end):
    at = {"stop": {"last": 3}, "break": {"leave": 3}}.get(how, {})
    with pytest.raises(Stopped) if how == "signal" else nullcontext():
        for loop, _ in steps(job, together, **at):
            if loop.step_number == 3 and how == "signal" and job.world.rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
    job.world.barrier()
    last = lines(together / "events.jsonl")[-1]
    assert (last["event"], last["step"], last["reason"], last.get("why")) == ("end", 3, *end)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_seconds": 1.0}, "was given step_seconds, which each record has by itself"),
        ({"loss": "abc"}, "loop.record was given loss of type str"),
        ({"loss": 10**400}, "loop.record was given loss of type int"),
        ({"loss": torch.ones(3)}, r"loop.record was given loss of shape \(3,\)"),
        ({"loss": torch.tensor(1j)}, "loop.record was given loss of type torch.complex64"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(job, together, values, message):
    running = steps(job, together)
    loop, _ = next(running)
    with pytest.raises(UserError, match=message):
        loop.record(**values)
    running.close()


@pytest.mark.mpi
def test_a_record_has_no_key_of_its_own_that_a_program_may_give(job, together, monkeypatch):
    monkeypatch.setattr(costs, "find_energy", lambda: FoundEnergy([rising("rapl", "p", 5)]))
    monkeypatch.setattr(reporting, "history", lambda *_: {"restarts": 1, "lost_steps": 2})
    running = steps(job, together)
    loop, loss = next(running)
    loop._records._slow.named = SlowRank(0, "load", 0.1, 0.2, "")
    loop.record(loss=loss)
    running.close()
    job.world.barrier()
    (record,) = lines(together / "metrics.jsonl")
    assert {"joules", "slow_rank", "restarts"} < record.keys()
    assert record.keys() - {"loss"} <= LOOP_KEYS


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", ["1", None, 10**400, torch.ones(2), torch.tensor(1j)], ids=str)
def test_a_mean_of_what_is_no_number_is_refused_on_all_ranks(job, together, wrong):
    loop, _, _ = made(job, together)
    last = job.world.size - 1
    with loop:
        with pytest.raises(
            UserError, match=rf"rank {last} \(.*\): loop.mean was given a value of "
        ):
            loop.mean(wrong if job.world.rank == last else 1.0)
        for value in (2, 2.0, torch.full((1, 1), 2.0, requires_grad=True)):
            assert loop.mean(value) == 2.0


@pytest.mark.mpi
def test_names_are_recorded_in_any_order(job, together):
    running = steps(job, together)
    loop, _ = next(running)
    first = job.world.rank == 0
    means = loop.record(**({"a": 1.0, "b": 2.0} if first else {"b": 2.0, "a": 1.0}))
    assert means == {"a": 1.0, "b": 2.0}
    running.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_record_other_names_are_told(job, together):
    running = steps(job, together)
    loop, _ = next(running)
    with pytest.raises(UserError, match=r"rank 1 .*the set of names that loop.record was given"):
        loop.record(**{"loss" if job.world.rank != 1 else "error": 1.0})
    running.close()


@pytest.mark.mpi
def test_a_step_has_one_record_and_there_is_none_outside_of_the_loop(job, together):
    loop, _, _ = made(job, together)
    with loop, pytest.raises(UserError, match="outside of the loop"):
        loop.record(loss=1.0)
    running = steps(job, together)
    loop, _ = next(running)
    loop.record(loss=1.0)
    with pytest.raises(UserError, match="called twice in step 1"):
        loop.record(loss=1.0)
    running.close()


@pytest.mark.mpi(min_size=2)
def test_a_call_that_other_ranks_do_not_make_is_named_in_the_wait_for_them(
    job, together, monkeypatch
):
    waits, name = [], Watch.__call__
    monkeypatch.setattr(
        Watch, "__call__", lambda self, what: waits.append(what) or name(self, what)
    )
    found = {}
    loop, model, optimizer = made(job, together)
    data = TensorDataset(torch.ones(BATCH, 2).double())
    calls = {
        "loop.record": lambda: loop.record(one=1.0),
        "loop.mean": lambda: loop.mean(1.0),
        "loop.evaluate": lambda: loop.evaluate(data, lambda batch: model(batch[0])[:, 0]),
    }
    with loop:
        waits.clear()
        loop.register("rate", torch.optim.lr_scheduler.StepLR(optimizer, 1))
        found["loop.register"] = waits[0]
        for _, batches in loop.epochs(data, batch=BATCH, epochs=1):
            for (inputs,) in batches:
                for call, make in calls.items():
                    waits.clear()
                    make()
                    found[call] = waits[0]
                model(inputs).sum().backward()
                optimizer.step()
    assert found == {call: call for call in found}
    assert {*calls} < {*found}
