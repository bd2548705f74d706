"""Compiled blocks compute what those of Python compute."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from torch import nn

from hpc_train.config.file import load
from hpc_train.errors import ConfigError, SetupError, UserError
from hpc_train.models import GPT
from hpc_train.models.kinds import SHAPES
from hpc_train.models.tabular.sizes import TableSizes
from hpc_train.parallel.compiled import compile_blocks
from hpc_train.parallel.recompute import recompute
from tests.programs import hpc_train as command
from tests.programs import run

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.slow("torch.compile loads, and compiles a block for training and for validation")
def test_blocks_of_a_kind_share_their_code(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr("hpc_train.models.dropout.SampleDropout.dropped", _undropped)
    counters.clear()
    models = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(vocab=11, sequence=8, layers=5, hidden=16, heads=2, dropout=0.0).double()
        if compiled:
            compile_blocks(model, CPU)
        recompute(model, "full")
        models.append(model)
    tokens = torch.randint(11, (2, 4, 9))
    for batch in tokens:
        losses = [model(batch[:, :-1], batch[:, 1:]) for model in models]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)
    for plain, compiled in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(plain.grad, compiled.grad, rtol=1e-11, atol=1e-13)
    assert counters["stats"]["unique_graphs"] == 2  # of a block, and of the loss
    assert not counters["graph_break"]


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow("torch.compile loads, and compiles blocks")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("tabular_mlp", {"members": 3}),
        pytest.param("tabular_resnet", {}, marks=pytest.mark.long),
        pytest.param("tabular", {"heads": 2}, marks=pytest.mark.long),
    ],
)
def test_blocks_of_models_of_tables_compute_the_same(kind, more):
    sizes = TableSizes(edges=((-1.0, 0.0, 2.0), (-0.5, 0.5)), codes=(4, 3), outputs=3)
    models = []
    for compiled in (False, True):
        torch.manual_seed(0)
        shape = SHAPES[kind](layers=2, hidden=16, dropout=0.3, sizes=sizes, **more)
        model = shape.build().double()
        if compiled:
            compile_blocks(model, CPU)
        models.append(model)
    numbers = torch.randn(5, 2, dtype=torch.float64)
    codes = torch.randint(3, (5, 2))
    for model in models:
        model.seed_samples(range(5))
        model(numbers, codes).square().sum().backward()
    for plain, compiled in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(plain.grad, compiled.grad, rtol=1e-10, atol=1e-12)


def _undropped(self, x):
    raise AssertionError("no element is dropped")


def test_a_model_without_blocks_is_told_which_key_needs_them():
    with pytest.raises(UserError, match="run.compile needs blocks, and Linear names none"):
        compile_blocks(nn.Linear(2, 2), CPU)


def test_a_machine_without_a_compiler_is_told_before_the_start(monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/no/such/c++",))
    model = GPT(vocab=11, sequence=8, layers=1, hidden=16, heads=2)
    with pytest.raises(SetupError, match="there is no C.. compiler .*: load a module that has one"):
        compile_blocks(model, CPU)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--parallel.tp", "2"], "parallel.tp is 2"),
        (["--memory.recompute", "selective"], "memory.recompute is selective"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, named):
    with pytest.raises(ConfigError, match=f"run.compile is on, but {named}"):
        load(None, ["--run.compile", "true", *options])


@needs_compiler
@pytest.mark.slow("two programs; the second one compiles")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_losses_of_compiled_blocks_are_those_of_others(tmp_path, ranks):
    (tmp_path / "text.txt").write_text("of hosts and ranks, " * 400)
    assert (
        run(*command("prepare", "text", "text.txt", "--out", "data"), cwd=tmp_path).returncode == 0
    )
    keys = {"run.steps": 3, "run.log_every": 1, "run.preflight": "false", "data.path": "data"}
    keys |= {"model.layers": 4, "model.hidden": 16, "model.heads": 2, "model.sequence": 16}
    keys |= {"model.dropout": 0.2, "precision.dtype": "float64", "data.batch": 8}
    more = {"run.compile": "true", "parallel.pp": ranks, "data.micro_batch": 4}
    more |= {"memory.recompute": "full"}
    losses = []
    for name, added in (("plain", {}), ("compiled", more)):
        words = [w for key, value in (keys | added).items() for w in (f"--{key}", str(value))]
        launcher = ["mpirun", "-np", "2"] if added and ranks == 2 else []
        done = run(*launcher, *command("train", "--run.dir", name, *words), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


OWN = """
import json, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hpc_train

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.relu(self.layer(x)))

class Net(nn.Module):
    memory_blocks = ("blocks.*",)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def main(runtime):
    options = ["--run.steps", "3", "--run.log_every", "1", "--data.batch", "8", *sys.argv[1:]]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 8).double())
    task = hpc_train.TrainingTask(Net(), data, lambda model, batch: model(batch[0]).square().mean())
    hpc_train.Trainer(hpc_train.load_config(options=options), task, runtime).train()
    from torch._dynamo.utils import counters
    print("graphs", counters["stats"]["unique_graphs"])

sys.exit(hpc_train.run(main))
"""


@needs_compiler
@pytest.mark.slow("two programs of a user; the second one compiles")
def test_a_module_of_ones_own_is_compiled_and_draws_the_same_dropout(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    losses, graphs = [], []
    for compiled in ("false", "true"):
        words = ["own.py", "--run.compile", compiled, "--run.dir", compiled]
        done = run(sys.executable, *words, "--precision.dtype", "float64", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        graphs.append(int(done.stdout.split("graphs ")[1]))
        lines = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert graphs == [0, 2]  # the input of the first block has no gradient
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)


def test_a_list_of_modules_is_no_block():
    model = nn.Module()
    model.memory_blocks, model.blocks = ("blocks",), nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError, match=r"blocks is a list of modules.*: blocks\.\*"):
        compile_blocks(model, CPU)
