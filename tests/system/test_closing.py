"""Trainers are closed and made again in one process, as in a notebook or a sweep."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import pytest
import torch

from hpc_train.errors import NotFiniteError
from tests.programs import python, run
from tests.training.test_trainer import alone, config, make, records

LAYOUTS = {
    "dp": (),
    "zero": ("--memory.zero", "1"),
    "pp": ("--parallel.pp", "2", "--data.micro_batch", "3"),
}


def left_over() -> set[tuple[str, object]]:
    """What a Trainer could leave behind in its process."""
    handlers = {
        (number.name, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    threads = {("thread", t.name) for t in threading.enumerate() if t.is_alive()}
    logs = {("log", handler) for handler in logging.getLogger("hpc_train").handlers}
    return handlers | threads - {("thread", "checkpoint_0")} | logs


def test_a_sweep_leaves_nothing_behind(tmp_path):
    before = left_over()
    for number in range(3):
        options = ["--optimizer.lr", str(0.01 * (number + 1)), "--checkpoint.background", "true"]
        with make(config(tmp_path / str(number), *options), alone()) as trainer:
            trainer.train()
        trainer.close()  # once more costs nothing
        assert not trainer.optimizer._optimizer_step_pre_hooks
        assert left_over() <= before
    losses = [records(tmp_path / str(number))[-1]["loss"] for number in range(3)]
    assert len({*losses}) == 3


def test_a_trainer_that_failed_can_be_made_again(tmp_path):
    before = left_over()
    with (
        pytest.raises(NotFiniteError),
        make(
            config(tmp_path, "--optimizer.lr", "1e300", "--optimizer.name", "sgd"), alone()
        ) as one,
    ):
        one.train()
    assert left_over() <= before
    with make(config(tmp_path / "next"), alone()) as other:
        other.train()


@pytest.mark.mpi
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_several_ranks_make_one_trainer_after_the_other(job, together, options):
    if options and job.world.size % 2:
        return
    before, after, losses = left_over(), set(), []  # a thread of an earlier test may end meanwhile
    for number in range(3):
        torch.manual_seed(0)
        with make(config(together / str(number), *options), job) as trainer:
            trainer.train()
        after |= left_over()
        if job.world.rank == 0:
            losses.append([record["loss"] for record in records(together / str(number))])
    assert after <= before
    assert all(one == losses[0] for one in losses)


KEEPS = """
import torch
from torch import nn
import hpc_train
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions

def main(runtime):
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    averager = average_gradients(model, optimizer, runtime.world, AveragingOptions(zero=1))
    state = model.state_dict()
    main.weight = model.weight.detach().numpy()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    averager.close()
    assert (main.weight == model.weight.detach().numpy()).all()
    torch.save(state, f"PATH/{runtime.world.rank}.pt")

raise SystemExit(hpc_train.run(main))
"""


def test_a_job_ends_well_that_still_has_tensors_in_shared_memory(tmp_path):
    before = {*Path("/dev/shm").iterdir()}
    (tmp_path / "keeps.py").write_text(KEEPS.replace("PATH", str(tmp_path)))
    done = run("mpirun", "-np", "2", *python(str(tmp_path / "keeps.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    first, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert not [
        path for path in {*Path("/dev/shm").iterdir()} - before if "hpc_train-" in path.name
    ]
