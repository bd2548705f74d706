"""When a run writes checkpoints, and which are left."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hpc_train.checkpoint import Checkpoints
from hpc_train.checkpoint.background import Snapshot
from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.errors import CheckpointError, UserError
from hpc_train.mpi.group import Group
from hpc_train.training.saving import Saving, finishing_saves
from tests.checkpoint import states
from tests.programs import hpc_train, run


def steps_left(program, name, *options, **how) -> list[int]:
    """The steps of a run's checkpoints."""
    done = program.train(name, "--checkpoint.every", "0", *options, **how)
    assert done.returncode == 0, done.stderr
    return sorted(map(step_of, find_checkpoints(program.root / name / "checkpoints", "auto")))


@pytest.mark.parametrize(
    ("agreed", "ranks", "finished"), [(True, 4, 1), (True, 0, 1), (True, 2, 0), (False, 0, 0)]
)
def test_an_error_of_some_ranks_waits_for_no_checkpoint_that_needs_all(agreed, ranks, finished):
    calls = []
    checkpoints = SimpleNamespace(
        group=SimpleNamespace(size=4), finish=lambda: calls.append("finish")
    )
    error = UserError("a cause")
    error.agreed, error.agreed_ranks = agreed, ranks
    with pytest.raises(UserError), finishing_saves(checkpoints):
        raise error
    assert len(calls) == finished


@pytest.mark.mpi
def test_ranks_whose_clocks_differ_save_together(job):
    made = Saving(minutes=1.0)
    made._since = time.monotonic() - (90 if job.world.rank == 0 else 0)
    assert made.due(1, 0.0, job.world)
    made._since = time.monotonic() - (0 if job.world.rank == 0 else 90)
    assert not made.due(1, 0.0, job.world)


@pytest.mark.parametrize("background", [False, True])
def test_a_first_checkpoint_that_fails_is_not_tried_again_after_each_step(
    tmp_path, monkeypatch, background
):
    tried = []

    def missing(self, nbytes):
        raise CheckpointError("there is no memory")

    def counted(checkpoints, step, **how):
        tried.append(step)
        save(checkpoints, step, **how)

    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", counted)
    monkeypatch.setattr(Snapshot, "reserve", missing)  # fails before a thread begins
    (tmp_path / "text").touch()
    made = states.store(tmp_path / "text", Group())  # no folder
    saving = Saving(mtbf_hours=1e9, on_error="warn", background=background)
    for step in range(1, 5):
        saving.after(made, step)
    assert tried == [1]


def test_checkpoints_by_time_on_several_ranks(program):
    often = ["--checkpoint.minutes", "1e-6"]
    assert steps_left(program, "often", *often, launcher="mpirun", ranks=2) == [*range(1, 13)]
    assert steps_left(program, "seldom", "--checkpoint.minutes", "60") == [12]


def test_with_mtbf_hours_a_save_at_step_1_measures_the_cost(program):
    assert steps_left(program, "run", "--checkpoint.mtbf_hours", "1000") == [1, 12]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_every_fifth_and_the_best_are_kept_for_good(program, ranks):
    options = ["--checkpoint.minutes", "1e-6", "--data.validation_every", "3"]
    options += ["--checkpoint.keep", "1", "--checkpoint.keep_every", "5"]
    options += ["--checkpoint.keep_best", "2"]
    left = steps_left(program, "run", *options, launcher="mpirun", ranks=ranks)
    losses = {r["step"]: r["validation_loss"] for r in program.metrics("run") if r["step"] % 3 == 0}
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert left == sorted({5, 10, 12, *best})
    lines = run(*hpc_train("checkpoint", "list", str(program.root / "run"))).stdout.splitlines()
    for step, line in zip(reversed(left), lines, strict=True):
        told = f"  validation loss {losses[step]:.5g}" if step in losses else ""
        assert line.endswith(f"complete{told}" + "  best" * (step == best[0]))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.long),
        (2, ("--parallel.tp", "2")),
        pytest.param(2, ("--memory.zero", "1"), marks=pytest.mark.long),
    ],
    ids=["alone", "dp", "tp", "zero"],
)
def test_a_run_that_saves_in_the_background_has_the_same_checkpoints(program, ranks, options):
    how = {"launcher": "mpirun", "ranks": ranks} if ranks > 1 else {}
    words = ["--run.steps", "6", "--checkpoint.every", "2", *options]
    for name in ("background", "foreground"):
        background = str(name == "background").lower()
        done = program.train(name, *words, "--checkpoint.background", background, **how)
        assert done.returncode == 0, done.stderr
    for step in (2, 4, 6):
        pair = [program.checkpoint(name, step) for name in ("background", "foreground")]
        assert pair[0].read_bytes() == pair[1].read_bytes()
    assert program.metrics("background")[-1]["loss"] == program.metrics("foreground")[-1]["loss"]


def test_what_is_kept_free_before_the_time_limit_follows_the_longest_save():
    for longest, earlier, seconds in ((3, 0, 6), (3, 10, 6), (0, 4, 6), (0, 0, 0)):
        times = SimpleNamespace(longest_save=longest, earlier_save=earlier)
        assert Saving().reserve(times) == seconds
