"""A rank that stops answering, or stays away, ends the job with an error that names it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from hpc_train.job.heartbeat import HANG
from hpc_train.mpi import runtime
from tests.programs import ENVIRON, only_line, processes_of, python, read_until, run
from tests.waiting import PATIENCE

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
HOST = socket.gethostname()
ENDLESS = ("--run.steps", "1000000", "--checkpoint.every", "1000000")


def start(program, *options, ranks=4):
    """The training, its two outputs in one pipe."""
    return subprocess.Popen(
        program.command("run", *options, launcher="mpirun", ranks=ranks),
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_process(program, rank):
    """The process that computes, by its log: a launcher may have started another in its place."""
    for process in processes_of(program.root / "run"):
        if any(file.path.endswith(f"rank-{rank:03d}.log") for file in process.open_files()):
            return process
    raise AssertionError(f"no rank {rank}")


def has_ended(process):
    """Whether a process ends; mpirun does not wait for the last ones."""
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        process.wait(20)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("engine", "rank"),
    [("mpi", 0), pytest.param("horovod", 2, marks=[needs_horovod, pytest.mark.long])],
)
def test_a_stopped_rank_ends_the_job_with_an_error_that_names_it(program, engine, rank):
    options = ["--run.hang_timeout", "5", "--gradients.engine", engine]
    with start(program, *ENDLESS, *options) as process:
        read_until(process, "step 3 ")
        stopped = rank_process(program, rank)
        stopped.suspend()
        text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1, text
    assert has_ended(stopped)
    line = only_line(text)
    asker = 1 if rank == 0 else 0
    assert line.startswith(f"rank {rank} ({HOST}) does not answer")
    assert f"rank {asker} ({HOST}) has waited " in line
    assert " s for " in line
    for other in {0, 1, 2, 3} - {rank}:
        log = (program.root / f"run/logs/rank-{other:03d}.log").read_text()
        assert line in log
        assert "trainer.py" in log, "the stack of its main thread"


@pytest.mark.long
def test_a_stopped_rank_is_noticed_by_what_steps_usually_take(program):
    """Within a minute, though `run.hang_timeout` is left at its half hour."""
    with start(program, *ENDLESS) as process:
        read_until(process, "step 100 ")
        begin = time.monotonic()
        rank_process(program, 2).suspend()
        text = process.communicate(timeout=PATIENCE)[0]
        noticed = time.monotonic() - begin
    assert process.returncode == 1, text
    assert only_line(text).startswith(f"rank 2 ({HOST}) does not answer")
    assert noticed < HANG + 15


CUBE = ("--parallel.tp", "2", "--parallel.pp", "2", "--model.vocab", "264")


@pytest.mark.long
def test_a_stopped_rank_of_2_x_2_x_2_is_named_too(program):
    with start(program, *ENDLESS, *CUBE, "--run.hang_timeout", "8", ranks=8) as process:
        read_until(process, "step 3 ")
        rank_process(program, 5).suspend()
        text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1, text
    line = only_line(text)
    assert line.startswith(f"rank 5 ({HOST}) does not answer")
    assert f"({HOST}) has waited " in line
    assert " s for " in line


def test_a_rank_that_is_stopped_for_less_than_the_timeout_holds_nobody_up(program):
    # As many steps as take some seconds: the rank has to be found before it ends.
    # Checkpoints are left out, as other tests keep the disk busy.
    how = ("--run.steps", "70", "--checkpoint.every", "1000", "--run.hang_timeout", "12")
    with start(program, *how) as process:
        text = read_until(process, "step 3 ")
        stopped = rank_process(program, 1)
        stopped.suspend()
        time.sleep(6)  # the others have asked by now, and wait for an answer
        stopped.send_signal(signal.SIGCONT)
        text += process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text
    assert program.metrics("run")[-1]["step"] == 70
    assert "error" not in text


def test_a_job_that_is_suspended_as_a_whole_goes_on(program):
    with start(program, "--run.steps", "60", "--run.hang_timeout", "4") as process:
        text = read_until(process, "step 3 ")
        ranks = [rank_process(program, rank) for rank in range(4)]
        for rank in ranks:
            rank.suspend()
        time.sleep(6)
        for rank in ranks:
            rank.resume()
        text += process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text


ASTRAY = """
import sys, time, torch, hpc_train

def main(runtime):
    model = MODEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = hpc_train.GradientsSection(engine=sys.argv[2])
    options = hpc_train.LoopOptions(gradients=gradients, hang_timeout=4)
    loop = hpc_train.Loop(runtime, sys.argv[1], model, optimizer, options)
    if BEFORE and runtime.world.rank in WHO:
        DOES
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    for _, batches in loop.epochs(data, batch=4, epochs=2):
        for number, (inputs,) in enumerate(batches):
            if number == 3 and runtime.world.rank in WHO:
                DOES
            optimizer.zero_grad()
            model(inputs).sum().backward()
            loop.step()

raise SystemExit(hpc_train.run(main))
"""


def astray(folder, who, does, engine="mpi", *, before=False, model="torch.nn.Linear(2, 1)"):
    """A loop of 4 ranks in which some do something else; returns the error line."""
    text = ASTRAY.replace("BEFORE", repr(before)).replace("WHO", repr(who)).replace("DOES", does)
    text = text.replace("MODEL", model)
    (folder / "astray.py").write_text(text)
    words = [*python(str(folder / "astray.py")), str(folder / "checkpoints"), engine]
    done = run("mpirun", "-np", "4", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    return only_line(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "engine",
    [pytest.param("mpi", marks=pytest.mark.long), pytest.param("horovod", marks=needs_horovod)],
    ids="engine-{}".format,
)
def test_a_rank_that_stays_away_in_the_users_code_is_named(tmp_path, engine):
    line = astray(tmp_path, (2,), "time.sleep(1000)", engine)
    assert line.startswith(f"rank 2 ({HOST}) does not come (busy elsewhere or stuck)")
    # Any of the others may be the first to give up.
    assert any(f"rank {rank} ({HOST}) has waited " in line for rank in (0, 1, 3))
    assert (" s for the sums of the gradients by Horovod" in line) == (engine == "horovod")


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        pytest.param("loop.mean(1.0)", "ranks 0-1 (HOST) for loop.mean", marks=pytest.mark.long),
        pytest.param(
            "loop.register('it', torch.optim.swa_utils.AveragedModel(model))",
            "ranks 0-1 (HOST) for ",
            marks=pytest.mark.long,
        ),
        ("loop.evaluate([0.0], lambda batch: batch)", "they took different paths"),
    ],
    ids=["mean", "register", "evaluate"],
)
def test_ranks_that_call_the_loop_too_often_are_named(tmp_path, call, operation):
    line = astray(tmp_path, (0, 1), call, before=True)
    assert line.startswith("all ranks wait for each other: ")
    assert operation.replace("HOST", HOST) in line


def test_ranks_that_wait_in_different_operations_are_told_apart(tmp_path):
    line = astray(tmp_path, (1, 2), "runtime.node.barrier()")
    assert line.startswith("all ranks wait for each other: rank 0 ")
    assert f"ranks 1-2 ({HOST}) for a barrier" in line


def test_a_rank_that_leaves_while_others_wait_in_a_layer_is_named(tmp_path):
    line = astray(tmp_path, (2,), "return", model="torch.nn.BatchNorm1d(2)")
    assert f"rank 2 ({HOST}) for the other ranks, after it left its loop" in line


BARE = """
import torch, hpc_train
from hpc_train.gradients import AveragingOptions, average_gradients

def main(runtime):
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    averagers = [
        average_gradients(model, optimizer, runtime.world, AveragingOptions(hang_timeout=4))
        for model, optimizer in zip(models, optimizers)
    ]
    for step in range(9):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(torch.ones(4, 2)).sum() for model in models).backward()
        if step == 3:
            DOES
        for optimizer in optimizers:
            optimizer.step()
    for averager in averagers:
        averager.close()

raise SystemExit(hpc_train.run(main))
"""


@pytest.mark.parametrize(
    ("does", "shown"),
    [
        pytest.param(
            "if runtime.world.rank == 2: averagers[0].close()",
            f"; rank 2 ({HOST}) for ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "if runtime.world.rank == 2: optimizers.reverse()",
            "they took different paths",
            marks=pytest.mark.long,
        ),
        ("if runtime.world.rank == 2: break", f"rank 2 ({HOST}) "),
    ],
    ids=["closes", "other-order", "leaves"],
)
def test_ranks_that_average_without_a_loop_do_not_wait_for_ever(tmp_path, does, shown):
    (tmp_path / "bare.py").write_text(BARE.replace("DOES", does))
    done = run("mpirun", "-np", "4", *python(str(tmp_path / "bare.py")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert shown in only_line(done.stdout + done.stderr)
