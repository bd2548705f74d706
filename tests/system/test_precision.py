"""Training in 16-bit numbers: every layout near float32, skipped steps, and what a resume needs."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.restore import CheckpointReader, load_state
from hpc_train.config import RunConfig
from hpc_train.config.file import load
from hpc_train.errors import HpcTrainError
from hpc_train.gradients import LossScaler, scaling
from hpc_train.gradients.scaling import INITIAL_SCALE
from hpc_train.models import GPT
from hpc_train.models import linear as linears
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.linear import Linear
from hpc_train.monitoring.console import describe_record
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.generate import load_language_model
from hpc_train.training.loop import Loop
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.conftest import records
from tests.system.test_train import assert_succeeded

several = pytest.mark.mpi
needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
needs_onednn = pytest.mark.skipif(not linears.onednn_works(), reason="this torch has no oneDNN")
DTYPES = ["bfloat16", "float16"]
NEAR = {"bfloat16": 2e-2, "float16": 4e-3}  # relative, of losses
STEPS = 6


def config(directory, dtype, *options) -> RunConfig:
    fixed = ["--run.dir", str(directory), "--run.steps", str(STEPS), "--run.log_every", "1"]
    fixed += ["--data.batch", "24", "--data.validation_every", "3", "--precision.dtype", dtype]
    fixed += ["--optimizer.lr", "0.01", "--optimizer.clip_norm", "0.8", "--checkpoint.every", "3"]
    fixed += ["--run.preflight", "false", "--run.deterministic", "true"]
    return load(None, [*fixed, *options])


def text(samples, seed):
    tokens = torch.randint(12, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def gpt_loss(gpt, batch):
    return gpt(*batch)


def make(settings, started, loss=gpt_loss) -> Trainer:
    torch.manual_seed(0)
    model = GPT(vocab=12, sequence=8, layers=2, hidden=16, heads=2)
    task = TrainingTask(model, text(60, 1), loss, validation=text(11, 2))
    return Trainer(settings, task, started)


def values(directory, key):
    return [record[key] for record in records(directory) if key in record]


def alone():
    return Runtime(Group(), Group())


def last_checkpoint(directory):
    return directory / "checkpoints" / f"step-{STEPS:09d}.safetensors"


def state(directory):
    return load_state(CheckpointReader.open(last_checkpoint(directory)), Group())


def assert_near(directory, reference, tolerance):
    for key in ("loss", "validation_loss"):
        assert values(directory, key) == pytest.approx(values(reference, key), rel=tolerance)
    norms = values(directory, "grad_norm"), values(reference, "grad_norm")
    assert norms[0] == pytest.approx(norms[1], rel=10 * tolerance)


@pytest.fixture(scope="module")
def references(job, tmp_path_factory):
    """Runs of one rank, by number format, where rank 0 finds them."""
    root = tmp_path_factory.mktemp("references")
    if job.world.rank == 0:
        for dtype in ("float32", *DTYPES):
            make(config(root / dtype, dtype), alone()).train()
    job.world.barrier()
    return root


@pytest.mark.ranks(1, 2, 3, 4, everywhere=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_train_as_one_rank_and_nearly_as_in_float32(
    job, group, together, references, dtype
):
    if group:
        make(config(together / "run", dtype), Runtime(group, group)).train()
    job.world.barrier()
    if job.world.rank == 0:
        assert_near(together / "run", references / dtype, NEAR[dtype])
        assert_near(together / "run", references / "float32", NEAR[dtype])


def layout(dp, tp, pp, *more):
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    return [word for key, size in sizes.items() for word in (f"--parallel.{key}", str(size))] + [
        *more,
        "--data.micro_batch",
        "3",
    ]


CUT = ["--parallel.sequence_parallel", "true"]
SCHEDULE = "--parallel.schedule"
LAYOUTS = {
    "local": ["--gradients.average_every", "2"],
    "zero": ["--memory.zero", "1"],
    "tp": layout(2, 2, 1),
    "cut": layout(2, 2, 1, *CUT),
    "gpipe": layout(2, 1, 2, SCHEDULE, "gpipe"),
    "1f1b": layout(1, 1, 4),
    "interleaved": layout(2, 1, 2, SCHEDULE, "interleaved"),
    "zero-bubble": layout(1, 1, 4, SCHEDULE, "zero_bubble"),
    "tp-zero-bubble": layout(1, 2, 2, SCHEDULE, "zero_bubble"),
    "cut-interleaved": layout(1, 2, 2, SCHEDULE, "interleaved", *CUT),
    "horovod": layout(4, 1, 1, "--gradients.engine", "horovod"),
}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in ("zero", "1f1b", "tp-zero-bubble")),
        ("cut-interleaved", "float16"),
        pytest.param("horovod", "float16", marks=needs_horovod),
        *(
            pytest.param(name, dtype, marks=pytest.mark.long)
            for name, dtype in (
                *((name, "bfloat16") for name in ("tp", "cut", "gpipe", "interleaved")),
                ("zero-bubble", "bfloat16"),
                ("cut-interleaved", "bfloat16"),
                ("tp-zero-bubble", "float16"),
            )
        ),
    ],
)
def test_every_layout_is_near_float32(job, together, references, name, dtype):
    trainer = make(config(together / "run", dtype, *LAYOUTS[name]), job)
    trainer.train()
    tensors = [
        *trainer.model.parameters(),
        *(part for _, part in trainer.averager.parts()),
    ]
    assert all(tensor.dtype is torch.float32 for tensor in tensors)
    if job.world.rank == 0:
        assert_near(together / "run", references / "float32", NEAR[dtype])


class Chain(nn.Module):
    """Hands on what its linear layers make: 16-bit activations."""

    stages = ("0", "1", "2", "3")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for number in range(4):
            self.add_module(str(number), nn.Linear(6, 6))

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def square(module, batch):
    return (module(batch[0]).float() - batch[0]).square().mean()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_16_bit_activations_cross_ranks_as_they_are(job, together, schedule):
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(3)))
    options = ["--data.validation_every", "0", "--data.micro_batch", "6"]
    if job.world.rank == 0:
        settings = config(together / "one", "bfloat16", *options)
        Trainer(settings, TrainingTask(Chain(), data, square), alone()).train()
    job.world.barrier()
    options += ["--parallel.pp", "4", SCHEDULE, schedule]
    settings = config(together / "run", "bfloat16", *options)
    trainer = Trainer(settings, TrainingTask(Chain(), data, square), job)
    trainer.train()
    forms = set(trainer.layout.pipeline.transport._forms.values())
    assert forms == {((6, 6), torch.bfloat16)}
    if job.world.rank == 0:
        assert values(together / "run", "loss") == values(together / "one", "loss")


@several
@pytest.mark.parametrize("dtype", DTYPES)
def test_master_weights_and_all_that_is_saved_are_float32(job, together, dtype):
    trainer = make(config(together / "run", dtype), job)
    trainer.train()
    slots = [s for of_one in trainer.optimizer.state.values() for s in of_one.values()]
    held = [
        *trainer.model.parameters(),
        *(s for s in slots if isinstance(s, torch.Tensor)),
    ]
    assert all(tensor.dtype is torch.float32 for tensor in held)
    if job.world.rank == 0:
        entries = CheckpointReader.open(last_checkpoint(together / "run")).entries.values()
        assert {entry.dtype for entry in entries} == {"F32"}


class Poison:
    """A loss that is not finite in some steps, on one rank.

    Args:
        steps: which.
        here: whether this is the rank.
    """

    def __init__(self, *steps, here=True, value=math.nan):
        self.steps, self.here, self.value, self.step = steps, here, value, 0

    def __call__(self, model, batch):
        loss = model(*batch)
        return loss * self.value if self.strikes and model.training else loss

    @property
    def strikes(self):
        return self.here and self.step in self.steps

    def watch(self, trainer):
        """Learn of the steps that a trainer begins; returns the parameters before each of them."""
        original, before = trainer._train_step, {}

        def step(step, report):
            self.step = step.number
            before[step.number] = [p.detach().clone() for p in trainer.model.parameters()]
            original(step, report)

        trainer._train_step = step
        return before


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dp", "float16"),
        ("local", "float16"),
        ("zero", "float16"),
        ("tp-zero-bubble", "bfloat16"),
        pytest.param("dp", "bfloat16", marks=pytest.mark.long),
        pytest.param("tp", "float16", marks=pytest.mark.long),
        pytest.param("cut", "bfloat16", marks=pytest.mark.long),
        pytest.param("gpipe", "float16", marks=pytest.mark.long),
    ],
)
def test_nan_on_one_rank_skips_the_step_on_all(job, together, caplog, name, dtype):
    loss = Poison(3, here=False)
    settings = config(together / "run", dtype, *LAYOUTS.get(name, []))
    trainer = make(settings, job, loss)
    place, grid = trainer.grid.coordinate, trainer.grid
    last = (grid.dp - 1, grid.tp - 1, grid.pp - 1)
    loss.here = (place.dp, place.tp, place.pp) == last
    before = loss.watch(trainer)
    with caplog.at_level(logging.WARNING, "hpc_train"):
        trainer.train()
    changed = [
        not all(torch.equal(a, b) for a, b in zip(before[n], before[n + 1], strict=True))
        for n in range(1, STEPS)
    ]
    assert changed == [True, True, False, True, True]
    assert trainer.scaler.scale == (INITIAL_SCALE / 2 if dtype == "float16" else 1)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert "step 3 skipped: its gradients are not finite (1 skipped so far" in caplog.text
    if job.world.rank == 0:
        assert values(together / "run", "skipped_steps") == [0, 0, 1, 1, 1, 1]
        assert values(together / "run", "step") == [1, 2, 3, 4, 5, 6]
        norms = values(together / "run", "grad_norm")
        assert [norm is None for norm in norms] == [False, False, True, False, False, False]


@several
def test_an_infinity_in_any_ranks_copy_of_a_parameter_is_noticed(job, together):
    """Layer norms are on all ranks of a tensor group, and one of them counts for the norm."""
    trainer = make(
        config(together / "run", "bfloat16", "--parallel.tp", str(min(2, job.world.size))), job
    )
    parts = {p: torch.ones_like(p) for p in trainer.model.parameters()}
    if job.world.rank == job.world.size - 1:
        parts[trainer.model.head.norm.weight][0] = math.inf
    averager = SimpleNamespace(parts=parts.items, shards=trainer.averager.shards)
    norm = trainer.layout.gradients.norm(averager)
    alike = trainer.grid.coordinate.dp == trainer.grid.dp - 1
    assert bool(norm.isfinite()) != alike


@several
@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_a_run_goes_on_bit_for_bit_with_its_scale(job, together, monkeypatch, engine):
    monkeypatch.setattr(scaling, "GOOD_STEPS", 3)  # grows after step 5, in the middle at step 4
    options = ["--gradients.engine", engine, "--data.micro_batch", "3"]
    for name, stops in (("whole", [STEPS]), ("cut", [4, STEPS])):
        for stop in stops:
            loss = Poison(2, here=job.world.rank == 0)
            settings = config(together / name, "float16", *options, "--run.steps", str(stop))
            trainer = make(settings, job, loss)
            loss.watch(trainer)
            trainer.train()
    assert trainer.scaler.state_dict() == {
        "dtype": "float16",
        "scale": INITIAL_SCALE,
        "good_steps": 1,
        "skipped_steps": 1,
        "skipped_in_a_row": 0,
    }
    if job.world.rank == 0:
        for key in ("step", "loss", "grad_norm", "skipped_steps"):
            assert values(together / "whole", key) == values(together / "cut", key)
        files = [last_checkpoint(together / name).read_bytes() for name in ("whole", "cut")]
        assert files[0] == files[1]


@pytest.mark.mpi(min_size=4)
def test_the_scale_in_a_checkpoint_is_the_same_from_every_layout(job, together):
    found = []
    for name in ("dp", "cut", "zero-bubble"):
        loss = Poison(2)
        trainer = make(config(together / name, "float16", *LAYOUTS.get(name, [])), job, loss)
        loss.watch(trainer)
        trainer.train()
        found.append(state(together / name)["scaler"] if job.world.rank == 0 else None)
    assert found[0] == found[1] == found[2]
    last = together / "cut"
    trainer = make(config(last, "float16", "--run.steps", str(STEPS + 1)), job)
    trainer.train()
    assert trainer.scaler.good_steps == STEPS - 2 + 1


@several
@pytest.mark.parametrize("dtype", DTYPES)
def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks(
    job, together, monkeypatch, dtype
):
    monkeypatch.setattr(scaling, "MOST_SKIPPED", 3)
    loss = Poison(*range(2, 9), here=job.world.rank == 0, value=math.inf)
    trainer = make(config(together / "run", dtype), job, loss)
    loss.watch(trainer)
    with pytest.raises(HpcTrainError, match="3 steps in a row were NaN or infinite") as caught:
        trainer.train()
    assert caught.value.agreed
    assert loss.step == 4


def test_training_and_validation_run_under_autocast(tmp_path):
    seen = []

    def loss(model, batch):
        on = torch.is_autocast_enabled("cpu")
        seen.append((model.training, on and torch.get_autocast_dtype("cpu")))
        return model(*batch)

    make(config(tmp_path, "bfloat16", "--run.steps", "1"), alone(), loss).train()
    assert set(seen) == {(True, torch.bfloat16), (False, torch.bfloat16)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wider_numbers_have_no_scaler_and_skip_nothing(tmp_path, dtype):
    loss = Poison(3)
    trainer = make(config(tmp_path, dtype, "--run.nonfinite", "warn"), alone(), loss)
    before = loss.watch(trainer)
    trainer.train()
    assert trainer.scaler is None
    assert values(tmp_path, "skipped_steps") == []
    assert "scaler" not in state(tmp_path)
    assert before[1][0].dtype is getattr(torch, dtype)
    assert before[4][0].isnan().any(), "as it was asked for"


def test_a_run_may_go_on_in_another_number_format(tmp_path):
    for steps, dtype in ((2, "bfloat16"), (4, "float32"), (STEPS, "float16")):
        trainer = make(config(tmp_path, dtype, "--run.steps", str(steps)), alone())
        trainer.train()
    assert values(tmp_path, "step") == list(range(1, STEPS + 1))
    assert trainer.scaler.scale == INITIAL_SCALE


def own_loop(directory, epochs):
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop = Loop(alone(), directory, model, optimizer)
    scaler = LossScaler(torch.float16)
    loop.register("scaler", scaler)
    for _, batches in loop.epochs(TensorDataset(torch.ones(24, 6)), batch=6, epochs=epochs):
        for (x,) in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scaled(loss).backward()
            assert scaler.step(loop.averager, clip_norm=1.0)
    return scaler


def test_a_loop_of_ones_own_keeps_the_scale_in_its_checkpoints(tmp_path):
    assert own_loop(tmp_path, 1).good_steps == 4
    assert own_loop(tmp_path, 2).good_steps == 8


def test_the_console_shows_how_many_steps_were_skipped():
    assert describe_record({"step": 7, "loss": 1.25, "skipped_steps": 2}).endswith("2 skipped")
    assert "skipped" not in describe_record({"step": 7, "loss": 1.25, "skipped_steps": 0})


@pytest.mark.parametrize("way", ["torch", pytest.param("onednn", marks=needs_onednn)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_linear_layers_whatever_library_they_use(monkeypatch, dtype, way):
    monkeypatch.setattr(linears, "_used", None)  # it is put back afterwards
    linears.use(way)
    layer, x = Linear(6, 5), torch.randn(2, 3, 6).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert y.dtype is dtype
    y.sum().backward()
    assert layer.weight.grad.dtype is x.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_16_bit_logits_is_computed_in_float32(dtype):
    torch.manual_seed(0)
    model = GPT(vocab=12, sequence=8, layers=1, hidden=16, heads=2)
    tokens, targets = text(4, 1).tensors
    with torch.autocast("cpu", dtype):
        loss, logits = model(tokens, targets), model(tokens)
    assert (loss.dtype, logits.dtype) == (torch.float32, dtype)
    wide = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(wide.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_keeps_the_mean_of_16_bit_numbers(dtype):
    dropout = SampleDropout(0.1, place=1)  # 1 / 0.9 in bfloat16 is 0.15 % too small
    dropout.seeds = [3]
    x = torch.rand(1, 1000, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = dropout(x).double()
    share = (kept != 0).double().mean() / (x != 0).double().mean()
    assert (kept.mean() / share).item() == pytest.approx(x.double().mean().item() / 0.9, rel=1e-3)


def test_the_program_trains_in_bfloat16_and_generate_reads_the_result(program):
    done = program.train("run", "--precision.dtype", "bfloat16", launcher="mpirun", ranks=2)
    assert_succeeded(done)
    assert program.losses("run")[-1] < program.losses("run")[0]
    assert all(record["skipped_steps"] == 0 for record in program.metrics("run"))
    model, *_ = load_language_model(program.root / "run")
    assert model.embedding.token.weight.dtype is torch.float32
