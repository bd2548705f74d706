"""A program leaves its own loop, on all ranks or on one of them."""

from __future__ import annotations

import socket

import pytest

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from tests.programs import only_line, python, run

HOST = socket.gethostname()
SCRIPT = """
import sys

import torch
from torch.utils.data import TensorDataset

import hpc_train

folder, how = sys.argv[1:]


def main(runtime):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = hpc_train.LoopOptions(background=True, hang_timeout=6)
    loop = hpc_train.Loop(runtime, folder, model, optimizer, options)
    torch.manual_seed(0)  # the same data on all ranks
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    for epoch, batches in loop.epochs(data, batch=4, epochs=3):
        for number, (inputs, targets) in enumerate(batches, start=1):
            odd = number == 3 and runtime.world.rank == 1
            if odd and how == "break":
                break
            if odd and how == "raise":
                raise KeyError("what the user did")
            if number == 3 and (odd or how == "all exit") and "exit" in how:
                sys.exit(0)
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            loop.step()
        if number == 3 and how == "break":
            break
        if epoch == 2 and how == "return":
            return
    print("the end")


raise SystemExit(hpc_train.run(main))
"""


@pytest.fixture
def leave(tmp_path):
    """Run the script so on two ranks; its result and the folder."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(how):
        words = ["mpirun", "-np", "2", *python(str(script), str(tmp_path / "run"), how)]
        return run(*words), tmp_path / "run"

    return start


@pytest.mark.parametrize(("how", "step"), [("all exit", 2), ("return", 20)])
def test_all_ranks_leave_with_a_checkpoint_and_without_an_error(leave, how, step):
    done, folder = leave(how)
    assert done.returncode == 0, done.stderr
    assert [*map(step_of, find_checkpoints(folder, "auto"))][:1] == [step]
    assert "the end" not in done.stdout


def test_a_rank_that_breaks_while_others_are_in_the_step_ends_all_with_one_line(leave):
    done, _ = leave("break")
    assert done.returncode == 2, done.stderr
    line = only_line(done.stderr)
    assert f"rank 0 ({HOST}) averages gradients, rank 1 ({HOST}) has left the step" in line


def test_a_rank_that_fails_alone_shows_its_traceback_at_once(leave):
    done, _ = leave("raise")
    assert done.returncode != 0
    assert f"rank 1 ({HOST}) failed" in done.stdout
    assert "KeyError: 'what the user did'" in done.stdout


def test_a_rank_that_exits_alone_is_named(leave):
    done, _ = leave("exit")
    assert done.returncode != 0
    assert (
        f"rank 1 ({HOST}) left the program by SystemExit(0), but other ranks did not" in done.stdout
    )


RETRY = """
import sys

import torch
from torch.utils.data import TensorDataset

import hpc_train

folder, where = sys.argv[1:]


def main(runtime):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)  # the same data on all ranks
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    for attempt in range(2):
        try:
            with hpc_train.Loop(runtime, folder, model, optimizer) as loop:
                for epoch, batches in loop.epochs(data, batch=4, epochs=3):
                    for inputs, targets in batches:
                        odd = runtime.world.rank == 1 and loop.step_number == 3 and not attempt
                        if odd and where == "before":
                            raise KeyError("what the user did")
                        optimizer.zero_grad()
                        (model(inputs) - targets).square().mean().backward()
                        loop.step()
                        if odd:
                            raise KeyError("what the user did")
        except KeyError:
            continue


raise SystemExit(hpc_train.run(main))
"""


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("before", "averages gradients, rank 1 ({}) has left the step"),
        ("after", "rank 1 ({}) left the loop before its end, but the other ranks did not"),
    ],
)
def test_a_rank_that_fails_alone_and_tries_again_ends_all_with_one_line(tmp_path, where, text):
    script = tmp_path / "script.py"
    script.write_text(RETRY)
    words = python(str(script), str(tmp_path / "run"), where)
    done = run("mpirun", "-np", "2", *words)
    assert done.returncode == 2, done.stderr
    assert text.format(HOST) in only_line(done.stderr)


GATHERED = """
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpc_train
from hpc_train.mpi.levels import Levels

Levels.of = lambda whole: Levels.join(whole, whole.split(whole.rank, 0), whole.split(0, whole.rank))


class Blocks(nn.Sequential):
    stages = ["0", "1", "2"]


def main(runtime):
    model = Blocks(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = hpc_train.MemorySection(zero=3)
    options = hpc_train.LoopOptions(memory=memory, private_parameters=True, hang_timeout=60)

    def losses(batch):
        if runtime.world.rank == 1:
            raise KeyError("what the user did")
        return model(batch[0]).square().sum(1)

    with hpc_train.Loop(runtime, sys.argv[1], model, optimizer, options) as loop:
        loop.evaluate(TensorDataset(torch.ones(8, 3)), losses)


raise SystemExit(hpc_train.run(main))
"""


@pytest.mark.long
def test_a_rank_that_fails_in_an_evaluation_with_gathered_parameters_ends_the_job(tmp_path):
    """Each rank counts as a node, so the other one waits in a gather."""
    script = tmp_path / "script.py"
    script.write_text(GATHERED)
    done = run("mpirun", "-np", "2", *python(str(script), str(tmp_path / "run")))
    assert done.returncode != 0
    assert f"rank 1 ({HOST}) failed" in done.stdout
    assert "KeyError: 'what the user did'" in done.stdout


SOME = """
from hpc_train import run
from hpc_train.errors import UserError
from hpc_train.mpi.agreement import agreed


def main(runtime):
    some = runtime.world.split(int(runtime.world.rank > 0), runtime.world.rank)
    with agreed(some):
        if runtime.world.rank == 2:
            raise UserError("the file is missing", "make it")
    runtime.world.barrier()


raise SystemExit(run(main))
"""


def test_an_error_of_some_ranks_that_agree_on_it_ends_all(tmp_path):
    """Although it comes to an end on none of the ranks that print for all."""
    script = tmp_path / "script.py"
    script.write_text(SOME)
    done = run("mpirun", "-np", "3", *python(str(script)))
    assert done.returncode == 2, done.stderr
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    assert {line.partition("error: ")[2] for line in told} == {
        f"rank 1 ({HOST}): the file is missing: make it"
    }
