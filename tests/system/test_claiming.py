"""Loops and trainers claim their directory, on several ranks."""

from __future__ import annotations

import shutil

import pytest

from hpc_train.checkpoint import claim as claims
from hpc_train.checkpoint.claim import take_claim
from hpc_train.checkpoint.owner import NOWHERE, Owner
from hpc_train.errors import ClaimError
from hpc_train.host.process import begun_ticks
from tests.job.test_leaving import Job
from tests.training.test_trainer import config, make, records


def give_to_another(directory) -> None:
    """As the command does that is named to the user, and a job that starts then."""
    shutil.rmtree(directory / ".claim")
    take_claim(directory, Owner.here(NOWHERE, 1800.0))


@pytest.fixture(autouse=True)
def look_at_each_step(monkeypatch):
    monkeypatch.setattr(claims, "CLAIM_CHECK_SECONDS", 0.0)


@pytest.mark.mpi
def test_a_loop_whose_directory_is_taken_stops_on_all_ranks(job, together):
    mine = Job(job, together, every=2)
    with pytest.raises(ClaimError, match=r"^rank 0 \(.*\): .* was taken over by process \d+ on"):
        for batch in mine.batches():
            mine.step(batch)
            if mine.seen == 5 and job.world.rank == 0:
                give_to_another(together)
    assert mine.seen == 5
    assert mine.saved()[-1] == 4
    job.world.barrier()


@pytest.mark.mpi
def test_a_trainer_whose_directory_is_taken_writes_no_more_to_it(job, together):
    trainer = make(config(together), job)
    original = trainer._train_step

    def taken_in_the_fifth(step, report):
        if step.number == 5 and job.world.rank == 0:
            give_to_another(together)
        original(step, report)

    trainer._train_step = taken_in_the_fifth
    with pytest.raises(ClaimError, match="was taken over by process"):
        trainer.train()
    job.world.barrier()
    assert [record["step"] for record in records(together)] == [1, 2, 3, 4]


@pytest.mark.mpi
def test_a_directory_that_is_in_use_is_refused_to_all_ranks(job, together, monkeypatch):
    monkeypatch.setattr(claims, "OWNER_PATIENCE", 0.2)
    parent = begun_ticks(1)
    if job.world.rank == 0:
        living = Owner.here(NOWHERE, 1800.0).__dict__ | {"process": 1, "begin": parent}
        held = take_claim(together, Owner(**living))
    job.world.barrier()
    with pytest.raises(ClaimError, match=r"is in use by process 1 on .*rm -r .*/\.claim`"):
        make(config(together), job).train()
    if job.world.rank == 0:
        held.release()
    job.world.barrier()
    make(config(together, "--run.steps", "1"), job).train()
