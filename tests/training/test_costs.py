"""Costs of a run: summed over ranks, each source once, and kept over restarts and kills."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.restore import Tensors
from hpc_train.monitoring.energy_sources import EnergySource, FoundEnergy
from hpc_train.monitoring.spent import costs_in
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import costs
from hpc_train.training.costs import RunCosts
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.conftest import records
from tests.programs import ENVIRON, ranks_of
from tests.system.test_train import assert_succeeded
from tests.training.test_trainer import alone, config, make
from tests.waiting import wait_until


def rising(reader, name, by):
    """A counter that rises by so many joules between two reads."""
    values = iter(range(0, 10**9, by))
    return EnergySource(reader, name, lambda: float(next(values)))


@pytest.mark.ranks(1, 2, 4)
def test_each_source_of_a_node_counts_once(group, together):
    runtime = Runtime(group, group)
    spent = RunCosts(runtime, 3, saved=True)
    seen = [rising("rapl", "package", 100), rising("nvml", f"GPU-{group.rank}", 10)]
    with spent.counting(together, FoundEnergy(seen)):
        spent.unify()
        assert spent.total.joules == 100 + 10 * group.size
        assert spent.reader == "nvml + rapl"
        time.sleep(0.002)  # costs are in whole milliseconds
        spent.unify()
        assert spent.total.joules == 2 * (100 + 10 * group.size)
        assert 0 < spent.total.node_hours < 1
        assert spent.total.metered_node_hours <= spent.total.node_hours
        every = group.gathered(spent.total)
        assert every == [every[0]] * group.size  # what a checkpoint holds is the same on all ranks


def test_a_failure_before_the_first_sum_keeps_the_energy_of_earlier_jobs(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 10, "node_hours": 5.0, "joules": 4e6, "metered_node_hours": 4.5}\n'
    )
    spent = RunCosts(Runtime(Group(), Group()), 3, saved=True)
    with spent.counting(tmp_path, FoundEnergy()):
        assert spent.now().joules == 4e6
        spent.take({"costs": {"node_hours": 6.0, "joules": 5e6, "metered_node_hours": 5.5}})
        assert spent.now().joules == 5e6
        assert spent.now().metered_node_hours == 5.5


@pytest.mark.ranks(2)
def test_a_node_without_counters_is_told(group, together, caplog):
    with caplog.at_level("INFO"):
        apart = RunCosts(Runtime(group, Group()), 2, saved=True)  # each rank is a node of its own
        found = FoundEnergy([rising("rapl", "p", 1)] if group.rank else [], [])
        with apart.counting(together, found):
            time.sleep(0.05)  # costs are in whole milliseconds
            apart.at_start()
            time.sleep(0.2)
            record = apart.of_record(12, 10)
    assert apart.reader == ""
    assert apart.total.joules == 2
    # The other node, whose energy nobody reads, is taken to have used as much: 2 joules, not 1.
    assert record["samples_per_joule"] == pytest.approx(6, rel=0.1)
    assert record["tokens_per_joule"] == pytest.approx(60, rel=0.1)
    if group.rank == 0:
        assert "by nothing" in caplog.text


@pytest.fixture
def metered(monkeypatch):
    """A machine whose energy rises by 5 J between two reads."""
    monkeypatch.setattr(costs, "find_energy", lambda: FoundEnergy([rising("rapl", "p", 5)]))


def as_after_a_kill(run, step):
    """Make a finished run look as if it had been killed; the checkpoint of a step is its last."""
    (run / "checkpoints" / "LATEST").unlink()
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
    lines = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join(lines[:-1]) + "\n")


@pytest.mark.parametrize("deterministic", ["true", "false"])
def test_a_resumed_run_counts_on_from_what_the_killed_job_has_recorded(
    tmp_path, metered, deterministic
):
    options = ["--run.deterministic", deterministic]
    make(config(tmp_path, "--run.steps", "5", *options), alone()).train()
    before = records(tmp_path)
    for path in (tmp_path / "checkpoints").glob("step-*"):  # whose bytes are to be repeatable
        more = Tensors(path).state().get("more", {})
        assert ("costs" in more) == (deterministic == "false")
    as_after_a_kill(tmp_path, 3)
    make(config(tmp_path, *options), alone()).train()
    after = records(tmp_path)
    assert after[2] == before[2]
    for key in ("joules", "node_hours", "metered_node_hours"):
        assert after[3][key] > before[4][key] > before[2][key] > 0
    # Killed again before its first record: the dropped records are not forgotten.
    as_after_a_kill(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text("")
    assert costs_in(tmp_path).joules >= before[4]["joules"]


def test_weights_of_another_run_do_not_bring_its_costs(tmp_path, metered):
    make(config(tmp_path / "one", "--run.deterministic", "false"), alone()).train()
    spent = records(tmp_path / "one")[-1]["joules"]
    other = config(tmp_path / "other", "--checkpoint.weights", str(tmp_path / "one"))
    make(other, alone()).train()
    assert records(tmp_path / "other")[0]["joules"] < spent


@pytest.mark.slow("a training is killed and resumed")
def test_a_killed_program_has_its_hours_counted(program):
    options = ["--run.steps", "40", "--run.deterministic", "false", "--checkpoint.every", "15"]
    metrics = program.root / "run" / "metrics.jsonl"
    how = {"launcher": "mpirun", "ranks": 2}
    command = program.command("run", *options, **how)
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20)
        ranks_of(process)[-1].kill()
    before = program.metrics("run")[-1]
    done = program.train("run", *options, **how)
    assert_succeeded(done)
    assert "this run has cost 0.0" in done.stdout
    after = [one for one in program.metrics("run") if one["time"] > before["time"]]
    assert after[0]["node_hours"] > before["node_hours"]
    assert all(one["mfu"] > 0 and one["tflops"] > 0 for one in after)


class Own(nn.Module):
    """A module of a user; one that looks at numbers cannot be counted."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.looks = looks

    def forward(self, x):
        """The mean square of the last layer."""
        factor = 2.0 if self.looks and float(x.sum()) > 0 else 1.0
        return factor * self.layers(x).double().square().mean()


@pytest.mark.parametrize("looks", [False, True])
def test_operations_of_a_users_module_are_counted_or_left_out(tmp_path, caplog, looks):
    data = TensorDataset(torch.randn(48, 6))
    task = TrainingTask(Own(looks=looks), data)
    options = ["--run.preflight", "true", "--precision.dtype", "float32"]
    settings = config(tmp_path, *options, "--data.validation_every", "0", "--data.micro_batch", "4")
    with caplog.at_level("INFO"):
        Trainer(settings, task, alone()).train()
    last = records(tmp_path)[-1]
    if looks:
        assert "tflops" not in last
        assert "operations are not counted: DataDependentOutputException" in caplog.text
    else:
        # The first layer's input needs no gradient.
        flops = 2 * (2 * 6 * 8 + 3 * 8)
        assert last["tflops"] == pytest.approx(last["samples_per_second"] * flops / 1e12)
        assert last["mfu"] > 0


@pytest.mark.ranks(2)
def test_layers_that_wait_for_other_ranks_are_not_run_by_one(group, together, caplog):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    task = TrainingTask(model, data, lambda one, batch: one(*batch).square().mean())
    options = ["--run.preflight", "true", "--precision.dtype", "float32", "--run.steps", "2"]
    settings = config(together, *options, "--data.validation_every", "0")
    with caplog.at_level("INFO"):
        Trainer(settings, task, Runtime(group, group)).train()
    if group.rank == 0:
        assert "its BatchNorm layers add up over the ranks" in caplog.text
        assert {"node_hours"} < {*records(together)[-1]}
