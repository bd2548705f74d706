"""Training that ends once the validation loss has stopped falling."""

from __future__ import annotations

import math
import os
import signal

import pytest

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.config.file import load
from hpc_train.errors import ConfigError, Stopped
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.patience import Patience
from tests.training.test_trainer import config, make, records

MANY = 60  # steps, of which the run takes a part: the tokens are random, so it soon learns by heart
EARLY = ["--run.steps", str(MANY), "--run.patience", "3", "--data.validation_every", "2"]
EARLY += ["--checkpoint.every", "2", "--checkpoint.keep", "1", "--checkpoint.keep_best", "1"]


def noted(limit, losses):
    patience = Patience(limit)
    best = [patience.note(step, loss) for step, loss in enumerate(losses, 1)]
    return patience, best


def test_it_counts_validations_since_the_lowest_loss():
    patience, best = noted(2, [3.0, 2.0, 2.5])
    assert best == [True, True, False]
    assert not patience.over
    assert not patience.note(4, math.nan)
    assert patience.over
    assert (patience.best, patience.best_step) == (2.0, 2)


def test_an_equal_loss_is_as_good_but_no_progress():
    patience, best = noted(2, [2.0, 2.0, 2.0])
    assert best == [True, True, True]
    assert patience.over
    assert patience.best_step == 3


@pytest.mark.parametrize("losses", [[3.0, 2.0, 2.5], [math.nan], []])
def test_a_checkpoint_holds_the_count(losses):
    patience, _ = noted(5, losses)
    resumed = Patience(5)
    resumed.take(patience.values())
    assert vars(resumed) == vars(patience)


def test_without_a_validation_before_the_last_step_patience_is_refused():
    with pytest.raises(ConfigError, match=r"run.patience is 2, .*set data.validation_every"):
        load(None, ["--run.patience", "2"])


def check_ended(directory):
    """Check that a run ended three validations after its lowest loss, which was kept."""
    losses = {r["step"]: r["validation_loss"] for r in records(directory) if "validation_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert max(losses) == best + 6 < MANY
    left = sorted(map(step_of, find_checkpoints(directory / "checkpoints", "auto")))
    assert left == [best, best + 6]
    return best + 6


@pytest.mark.ranks(1, 4, later=(2,))
@pytest.mark.parametrize("layout", [[], ["--parallel.pp", "2", "--data.micro_batch", "3"]])
def test_every_layout_ends_after_the_same_step(group, together, layout):
    if layout and group.size == 1:
        return
    make(config(together / "run", *EARLY, *layout), Runtime(group, group)).train()
    alone = together / "alone"
    if group.rank == 0:
        make(config(alone, *EARLY), Runtime(Group(), Group())).train()
        assert check_ended(together / "run") == check_ended(alone)
    group.barrier()


@pytest.mark.mpi
def test_a_stopped_run_ends_where_an_uninterrupted_one_does(job, together):
    make(config(together / "whole", *EARLY), job).train()
    trainer = make(config(together / "cut", *EARLY), job)
    last = records(together / "whole")[-1]["step"]
    original = trainer._train_step

    def stop_while_it_waits(step, report):
        original(step, report)
        if step.number == last - 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._train_step = stop_while_it_waits
    with pytest.raises(Stopped):
        trainer.train()
    for _ in range(2):  # the second time there is nothing to do
        make(config(together / "cut", *EARLY), job).train()
        if job.world.rank == 0:
            assert check_ended(together / "cut") == check_ended(together / "whole")
            names = [f"checkpoints/step-{step:09d}.safetensors" for step in (last - 6, last)]
            pairs = [[(together / w / n).read_bytes() for w in ("whole", "cut")] for n in names]
            assert [one == other for one, other in pairs] == [True, True]
        job.world.barrier()
