"""What a loop can be asked for, against a plain loop of one process; stopped and resumed."""

from __future__ import annotations

import math
import time

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from hpc_train.checkpoint.catalogue import find_checkpoints, step_of
from hpc_train.checkpoint.exchange import Exchange
from hpc_train.config import GradientsSection, MemorySection
from hpc_train.data.order import SampleOrder
from hpc_train.errors import ConfigError, RankError, UserError
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.group_values import load_in_place
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.cases import cases

ZERO = MemorySection(zero=1)
EPOCHS, BATCH, SAMPLES = 2, 24, 100  # four steps per epoch, four samples left over
ENGINES = ["mpi", *(["horovod"] if runtime.horovod_built() else [])]


def alone():
    return Runtime(Group(), Group())


@pytest.fixture(params=[1, 2, 4], ids="{}-ranks".format)
def part(request, job):
    """A job of the first 1, 2 or 4 ranks; None on the others."""
    if request.param > job.world.size:
        pytest.skip(f"needs {request.param} ranks")
    inside = job.world.rank < request.param
    if job.world.comm is None:
        yield alone()
        return
    comm = job.world.comm.Split(0 if inside else 1, job.world.rank)
    group = Group(comm.rank, comm.size, comm)
    yield Runtime(group, group) if inside else None
    comm.Free()


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.abs().argmax(1) % 3)


def make_model(kind="plain"):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(8) if kind == "norm" else torch.nn.Identity()
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), norm, torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)


def plain(*, clip=0.0, accumulate=1, skipped=(), schedule=None, optimizer=sgd, kind="plain"):
    """The weights that one process without this package comes to."""
    model, samples = make_model(kind), data()
    stepper = optimizer(model.parameters())
    scheduler = schedule(stepper) if schedule else None
    order = SampleOrder(SAMPLES, BATCH)
    for step in range(1, EPOCHS * order.steps_per_epoch + 1):

        def closure(step=step):
            stepper.zero_grad()
            for micro in range(accumulate):
                size = BATCH // accumulate
                inputs, targets = samples[order.indices(step, micro * size, size)]
                loss = cross_entropy(model(inputs), targets) / accumulate
                loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        if isinstance(stepper, torch.optim.LBFGS):
            stepper.step(closure)
        else:
            closure()
            if step not in skipped:
                stepper.step()
        if scheduler:
            scheduler.step()
    return list(model.state_dict().values())


class Job:
    """A loop with what belongs to it."""

    def __init__(
        self,
        started,
        directory,
        *,
        optimizer=sgd,
        schedule=None,
        ema=False,
        kind="plain",
        **options,
    ):
        self.started, self.model = started, make_model(kind)
        self.optimizer = optimizer(self.model.parameters())
        self.loop = Loop(
            started, directory, self.model, self.optimizer, LoopOptions(**{"every": 3} | options)
        )
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.ema = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema else None
        )
        if schedule:
            self.loop.register("scheduler", self.scheduler)
        if ema:
            self.loop.register("ema", self.ema)
        self.rates, self.steps = [], 0

    def train(self, *, accumulate=1, skipped=(), stop_at=0, step=None, dropout=False):
        """Train; in the steps of `skipped` the last rank's loss is infinite."""
        world, loop = self.started.world, self.loop
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=EPOCHS, accumulate=accumulate):
            self.optimizer.zero_grad()
            for inputs, targets in batches:
                with loop.autocast():
                    outputs = self.model(inputs)
                    if dropout:
                        outputs = torch.nn.functional.dropout(outputs, 0.2)
                    loss = cross_entropy(outputs, targets)
                if loop._given in skipped and world.rank == world.size - 1:
                    loss = loss * math.inf
                loop.backward(loss)
                if not loop.step_due:
                    continue
                (step or loop.step)()
                self.optimizer.zero_grad()
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                if self.scheduler:
                    self.scheduler.step()
                if self.ema:
                    self.ema.update_parameters(self.model)
                self.steps += 1
                if self.steps == stop_at and world.rank == world.size - 1:
                    loop.stop()
        return self

    def state(self):
        found = list(self.model.state_dict().values())
        if self.ema:
            found += self.ema.state_dict().values()
        return [tensor.clone() for tensor in found]


def close(mine, reference):
    for one, other in zip(mine, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def equal(mine, reference):
    assert all(torch.equal(one, other) for one, other in zip(mine, reference, strict=True))


SAME = {  # options of the loop, of its training, and what the plain loop does
    "clip": ({"clip_norm": 0.05}, {}, {"clip": 0.05}),
    "accumulate": ({"clip_norm": 0.05}, {"accumulate": 3}, {"clip": 0.05, "accumulate": 3}),
    "accumulate-norm": ({"kind": "norm"}, {"accumulate": 2}, {"accumulate": 2, "kind": "norm"}),
    "zero": ({"memory": ZERO, "clip_norm": 0.05}, {}, {"clip": 0.05}),
    "zero-accumulate": ({"memory": ZERO}, {"accumulate": 2}, {"accumulate": 2}),
    "two-level": ({"gradients": GradientsSection(engine="mpi", two_level="on")}, {}, {}),
    "flat": ({"gradients": GradientsSection(engine="mpi", two_level="off", bucket_mb=1)}, {}, {}),
    "schedule": ({"schedule": one_cycle}, {}, {"schedule": one_cycle}),
    "float16": (
        {"precision": "float16", "clip_norm": 0.05},
        {"accumulate": 2, "skipped": (2, 5)},
        {"clip": 0.05, "accumulate": 2, "skipped": (2, 5)},
    ),
    "bfloat16": ({"precision": "bfloat16"}, {"skipped": (3,)}, {"skipped": (3,)}),
}


@pytest.mark.mpi
@pytest.mark.parametrize(("options", "training", "same"), SAME.values(), ids=SAME)
def test_a_loop_comes_to_the_weights_of_a_plain_one(part, together, options, training, same):
    if part is not None:
        reference = plain(**same)
        with Job(part, together / "run", **options).train(**training).loop as loop:
            mine = [tensor.clone() for tensor in loop.checkpoints.state.model.state_dict().values()]
        close(mine, reference)


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES[1:], ids="engine-{}".format)
@pytest.mark.parametrize("case", ["accumulate", "accumulate-norm", "float16"])
def test_every_engine_comes_to_the_same_weights(job, together, engine, case):
    options, training, same = SAME[case]
    with (
        mine := Job(
            job, together / "run", gradients=GradientsSection(engine=engine), **options
        ).train(**training)
    ).loop:
        close(mine.state(), plain(**same))


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES, ids="engine-{}".format)
def test_the_optimizers_own_step_does_as_the_loops(job, together, engine):
    reference = plain(clip=0.05, accumulate=3, schedule=one_cycle)
    mine = Job(
        job,
        together / "run",
        gradients=GradientsSection(engine=engine),
        clip_norm=0.05,
        schedule=one_cycle,
    )
    mine.train(accumulate=3, step=mine.optimizer.step)
    close(mine.state(), reference)


@pytest.mark.mpi
def test_a_closure_is_clipped_each_time(job, together):
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.01, max_iter=2, history_size=1)

    job_ = Job(job, together / "run", optimizer=lbfgs, clip_norm=0.05)
    for _, batches in job_.loop.epochs(data(), batch=BATCH, epochs=EPOCHS):
        for inputs, targets in batches:

            def closure(inputs=inputs, targets=targets):
                job_.optimizer.zero_grad()
                loss = cross_entropy(job_.model(inputs), targets)
                loss.backward()
                return loss

            job_.optimizer.step(closure)
    close(job_.state(), plain(clip=0.05, optimizer=lbfgs))


def search_then_step(model, searching, stepping, batch, number):
    """Train one layer by a line search, then the other one by a step."""
    inputs, targets = batch

    def closure():
        searching.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.item() if number else loss

    searching.step(closure)
    stepping.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    stepping.step()


@pytest.mark.mpi
@pytest.mark.parametrize("number", [False, True])
def test_the_closure_of_another_optimizer_returns_the_mean_too(job, together, number):
    def made():
        model = make_model("plain")
        search = {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"}
        return model, torch.optim.LBFGS(model[3].parameters(), **search), sgd(model[0].parameters())

    model, searching, stepping = made()
    with Loop(job, together / "run", model, stepping, LoopOptions()) as loop:
        loop.register("searching", searching)
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=2):
            for batch in batches:
                search_then_step(model, searching, stepping, batch, number)
    alone, searching, stepping = made()
    samples, order = data(), SampleOrder(SAMPLES, BATCH)
    for step in range(1, 2 * order.steps_per_epoch + 1):
        batch = samples[order.indices(step, 0, BATCH)]
        search_then_step(alone, searching, stepping, batch, number)
    close(list(model.state_dict().values()), list(alone.state_dict().values()))


def contrast(ours, others, first=0):
    """A contrastive loss: each of our samples is to be nearest to its own one of the others."""
    target = torch.arange(first, first + len(ours))
    return cross_entropy(ours @ others.T, target)


@pytest.mark.mpi
@pytest.mark.parametrize("rows", ["own", "all"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loss_may_compare_the_samples_of_all_ranks(job, together, rows, accumulate):
    model = make_model()
    optimizer = sgd(model.parameters())
    size = BATCH // accumulate // job.world.size
    with Loop(job, together / "run", model, optimizer) as loop:
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=1, accumulate=accumulate):
            for inputs, labels in batches:
                outputs = model(inputs)
                assert torch.equal(loop.gather(labels)[job.world.rank * size :][:size], labels)
                others = loop.gather(outputs.sin())
                ours = outputs if rows == "own" else loop.gather(outputs)
                first = job.world.rank * size if rows == "own" else 0
                loop.backward(contrast(ours, others, first))
                if loop.step_due:
                    loop.step()
                    optimizer.zero_grad()
    alone = make_model()
    stepper = sgd(alone.parameters())
    samples, order = data(), SampleOrder(SAMPLES, BATCH)
    for step in range(1, order.steps_per_epoch + 1):
        stepper.zero_grad()
        for micro in range(accumulate):
            inputs, _ = samples[
                order.indices(step, micro * BATCH // accumulate, BATCH // accumulate)
            ]
            outputs = alone(inputs)
            (contrast(outputs, outputs.sin()) / accumulate).backward()
        stepper.step()
    close(model.state_dict().values(), alone.state_dict().values())


def steepness(model, inputs, gather, ranks):
    """A penalty for the gradient of a loss of all samples, which each rank computes."""
    loss = gather(model(inputs.requires_grad_())).logsumexp(0).sum()
    (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return (slopes / ranks).square().sum(1).mean()


@pytest.mark.mpi
def test_a_loss_of_the_samples_of_all_ranks_has_second_derivatives(job, together):
    mine, expected, inputs = Job(job, together / "run"), make_model(), data()[:BATCH][0]
    size = job.world.size
    own = inputs.chunk(size)[job.world.rank].clone()
    steepness(mine.model, own, mine.loop.gather, size).backward()
    steepness(expected, inputs, lambda rows: rows, 1).backward()
    weights = [(p, q) for p, q in zip(mine.model.parameters(), expected.parameters(), strict=True)]
    close(*zip(*((p.grad, q.grad) for p, q in weights if q.grad is not None), strict=True))


@pytest.mark.mpi(min_size=2)
def test_a_gather_of_other_shapes_or_in_a_transform_is_refused(job, together):
    mine = Job(job, together / "run")
    with pytest.raises(UserError, match=r"what loop.gather was given \(shape and dtype\)"):
        mine.loop.gather(torch.ones(1 + job.world.rank))
    assert mine.loop.gather(torch.ones(2, dtype=torch.complex64)).shape == (2 * job.world.size,)
    with pytest.raises(UserError, match="without dimensions: give it a first dimension"):
        mine.loop.gather(torch.tensor(1.0))
    with pytest.raises(UserError, match=r"loop.gather needs the samples .*autograd\.grad"):
        torch.func.grad(lambda x: mine.loop.gather(x).sum())(torch.ones(2))


@pytest.mark.mpi
def test_local_steps_with_a_closure_are_saved(job, together):
    """Ranks drop gradients differently often in it, and a history of steps is not saved."""
    made = {"optimizer": torch.optim.LBFGS, "gradients": GradientsSection(average_every=3)}

    def train(epochs):
        run = Job(job, together / "run", **made, every=2, clip_norm=0.05)
        for _, batches in run.loop.epochs(data(), batch=BATCH, epochs=epochs):
            for inputs, targets in batches:

                def closure(inputs=inputs, targets=targets):
                    for _ in range(1 + job.world.rank):
                        run.optimizer.zero_grad()
                    loss = cross_entropy(run.model(inputs), targets)
                    loss.backward()
                    return loss

                run.optimizer.step(closure)
                run.steps += 1
        run.loop.close()
        return run.steps

    assert [train(1), train(2)] == [4, 4]


@pytest.mark.mpi(min_size=2)
def test_the_closure_of_an_optimizer_of_another_module_stays_the_ranks_own(job, together):
    mine, other = Job(job, together / "run"), torch.nn.Linear(3, 1)
    optimizer = sgd(other.parameters())
    mine.loop.register("other", other)
    mine.loop.register("its_optimizer", optimizer)
    losses = []
    for _, batches in mine.loop.epochs(data(), batch=BATCH, epochs=1):
        for inputs, targets in batches:
            mine.optimizer.zero_grad()
            cross_entropy(mine.model(inputs), targets).backward()
            losses.append(optimizer.step(lambda: torch.tensor(float(job.world.rank))))
            mine.loop.step()
    assert [loss.item() for loss in losses] == [job.world.rank] * len(losses)


@pytest.mark.mpi
def test_local_steps_are_the_mean_of_ranks_that_train_alone(job, together):
    every, size = 2, job.world.size
    section = GradientsSection(average_every=every)
    mine = Job(job, together / "run", gradients=section, every=100).train()
    models = [make_model() for _ in range(size)]
    steppers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    order, samples = SampleOrder(SAMPLES, BATCH), data()
    for step in range(1, EPOCHS * order.steps_per_epoch + 1):
        for rank, (model, stepper) in enumerate(zip(models, steppers, strict=True)):
            share = BATCH // size
            inputs, targets = samples[order.indices(step, rank * share, share)]
            stepper.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            stepper.step()
        if step % every == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    pairs = zip(steppers, same, strict=True)
                    moments = [stepper.state[p]["momentum_buffer"] for stepper, p in pairs]
                    for alike in (same, moments):
                        mean = torch.stack([*alike]).mean(0)
                        for one in alike:
                            one.copy_(mean)
    close(mine.state(), models[0].state_dict().values())


RESUMED = {
    "schedule-ema": ({"schedule": one_cycle, "ema": True, "clip_norm": 0.05}, {"accumulate": 2}),
    **{
        f"engine-{engine}": (
            {"gradients": GradientsSection(engine=engine), "schedule": one_cycle},
            {"accumulate": 2},
        )
        for engine in ENGINES[1:]
    },
    "float16": ({"precision": "float16", "ema": True}, {"skipped": (2, 7)}),
    "zero": (
        {"memory": ZERO, "optimizer": torch.optim.Adam, "clip_norm": 0.05, "schedule": one_cycle},
        {"accumulate": 2},
    ),
    "powersgd": (
        {
            "gradients": GradientsSection(
                engine="mpi", two_level="off", compression="powersgd:1", bucket_mb=1
            ),
            "schedule": one_cycle,
        },
        {},
    ),
    "local": ({"gradients": GradientsSection(average_every=2), "every": 1}, {}),
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "training"),
    cases(RESUMED, later=("float16", "powersgd")),  # test_precision.py, test_averaging.py have them
)
def test_a_stopped_loop_goes_on_bit_for_bit(job, together, options, training):
    options = {"every": 4} | options
    training = {"dropout": True} | training
    with (whole := Job(job, together / "whole", **options).train(**training)).loop:
        expected = whole.state()
    # Where the checkpoint changes ranks' states, both runs have to write it at the same step.
    with (first := Job(job, together / "cut", **options)).loop:
        first.train(stop_at=4, **training)
    with (rest := Job(job, together / "cut", **options)).loop:
        rest.train(**training)
        equal(rest.state(), expected)
    assert first.rates + rest.rates == whole.rates
    assert len(rest.rates) == 4


def test_state_of_a_registered_optimizer_keeps_its_type():
    """Such as float32 copies of 16-bit weights, which torch would round."""
    first, second = (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2).bfloat16())], lr=0.1) for _ in range(2)
    )
    (parameter,) = first.param_groups[0]["params"]
    copy = torch.tensor([1.00001, -0.3], dtype=torch.float32)
    first.state[parameter] = {"copy": copy, "count": 3, "near": copy.bfloat16()}
    load_in_place(second, first.state_dict())
    (found,) = second.state.values()
    load_in_place(second, {**first.state_dict(), "state": {0: copy}})  # some keep no dict
    assert found["copy"].dtype == torch.float32
    assert found["near"].dtype == torch.bfloat16
    assert torch.equal(found["copy"], copy)
    assert found["count"] == 3


class Notes:
    """The largest learning rate so far."""

    def __init__(self, optimizer):
        self.optimizer, self.most = optimizer, 0.0

    def state_dict(self):
        return {"most": self.most}

    def load_state_dict(self, state):
        self.most = state["most"]


def test_a_scheduler_goes_on_beside_an_object_that_was_not_registered_before(tmp_path):
    def halved(optimizer):
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    with (first := Job(alone(), tmp_path, schedule=halved)).loop:
        first.train(stop_at=3)
    rest = Job(alone(), tmp_path, schedule=halved)
    rest.loop.register("notes", Notes(rest.optimizer))
    with rest.loop:
        rest.train()
    assert first.rates + rest.rates == [0.1 * 0.5**step for step in range(8)]


def test_a_grad_scaler_of_the_users_own_is_resumed_after_a_step_that_it_skipped(tmp_path):
    def train(folder, stop_at=0):
        job = Job(alone(), folder, every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        job.loop.register("scaler", scaler)
        steps = []
        for _, batches in job.loop.epochs(data(), batch=BATCH, epochs=EPOCHS):
            for inputs, targets in batches:
                job.optimizer.zero_grad()
                step = job.loop._given
                factor = math.inf if step == 3 else 1.0
                scaler.scale(factor * cross_entropy(job.model(inputs), targets)).backward()
                scaler.step(job.optimizer)
                scaler.update()
                steps.append((step, scaler.get_scale()))
                if step == stop_at:
                    job.loop.stop()
        return steps, job.state()

    steps, state = train(tmp_path / "whole")
    assert [step for step, _ in steps] == [*range(1, 9)]
    assert [scale for _, scale in steps[:5]] == [8.0, 16.0, 8.0, 8.0, 16.0]
    first, _ = train(tmp_path / "cut", stop_at=3)
    rest, resumed = train(tmp_path / "cut")
    assert first + rest == steps
    equal(resumed, state)


def adversaries(started, folder, *, every, stop_at=0, each=3, leave_at=0, leave_by=KeyError):
    """The weights after a critic has stepped in each batch, and a generator in each third one."""
    torch.manual_seed(0)
    generator, critic = (torch.nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
    both = torch.nn.ModuleList([generator, critic])
    first, second = (torch.optim.Adam(one.parameters(), lr=0.1) for one in both)
    options = LoopOptions(every=every)
    with Loop(started, folder, both, first, options) as loop:
        loop.register("second", second)
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=EPOCHS):
            for inputs, _ in batches:
                critic.zero_grad()
                (critic(generator(inputs)) - critic(inputs)).square().mean().backward()
                second.step()
                if loop.step_number == leave_at:
                    raise leave_by(leave_at)
                if loop.step_number % each == 0:
                    generator.zero_grad()
                    critic(generator(inputs)).sin().mean().backward()
                    first.step()
                if loop.step_number == stop_at and started.world.rank == 0:
                    loop.stop()
    return [parameter.detach().clone() for parameter in both.parameters()]


@pytest.mark.mpi
@pytest.mark.parametrize("stop_at", [4, 5, 6])
def test_a_resumed_run_repeats_no_step_of_another_optimizer(job, together, stop_at):
    expected = adversaries(job, together / "whole", every=2)
    adversaries(job, together / "stopped", every=0, stop_at=stop_at)
    equal(adversaries(job, together / "stopped", every=2), expected)


@pytest.mark.mpi
@pytest.mark.parametrize(("each", "leave_at"), [(1, 5), (3, 3), (3, 6)])
def test_a_batch_that_was_left_between_two_optimizers_steps_is_computed_again(
    job, together, each, leave_at
):
    expected = adversaries(job, together / "whole", every=2, each=each)
    with pytest.raises(KeyError):
        adversaries(job, together / "left", every=2, each=each, leave_at=leave_at)
    equal(adversaries(job, together / "left", every=2, each=each), expected)


@pytest.mark.mpi
def test_a_loop_of_two_optimizers_that_is_left_is_saved_or_told(job, together, caplog):
    found = []
    for number, error in enumerate((SystemExit, KeyError)):
        folder = together / str(number)
        caplog.clear()
        with pytest.raises(error):
            adversaries(job, folder, every=0, leave_at=5, leave_by=error)
        Loop.end_left_loops(job)
        found.append((sorted(path.name for path in folder.glob("*.safetensors")), caplog.text))
    (saved, silent), (none, told) = found
    assert saved == ["step-000000005.safetensors"]
    assert "half done" not in silent
    assert not none
    assert "left in step 5, which may be half done" in told
    assert "a restart begins with step 1" in told


def test_a_step_that_a_grad_scaler_skips_leaves_no_batch_half_done(tmp_path):
    torch.manual_seed(0)
    both = torch.nn.ModuleList([torch.nn.Linear(5, 1, dtype=torch.float64) for _ in range(2)])
    optimizers = [sgd(one.parameters()) for one in both]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loop = Loop(alone(), tmp_path, both, optimizers[0], LoopOptions(every=0))
    loop.register("second", optimizers[1])
    loop.register("scaler", scaler)

    def train(leave_at):
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=EPOCHS):
            for inputs, _ in batches:
                for number, optimizer in enumerate(optimizers):
                    optimizer.zero_grad()
                    bad = number == 1 and loop.step_number == leave_at
                    factor = math.inf if bad else 1.0
                    scaler.scale(factor * both[number](inputs).square().mean()).backward()
                    scaler.step(optimizer)
                scaler.update()
                if loop.step_number == leave_at:
                    return

    train(3)
    loop.close()
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["step-000000003.safetensors"]


def test_a_last_step_that_is_skipped_is_in_the_last_checkpoint(tmp_path):
    last = EPOCHS * (SAMPLES // BATCH)
    with (job := Job(alone(), tmp_path, precision="bfloat16", every=0)).loop:
        job.train(skipped=(last,))
    assert [step_of(path) for path in find_checkpoints(tmp_path, "auto")] == [last]


@pytest.mark.mpi
def test_a_grad_scaler_of_the_users_own_takes_the_steps_of_a_plain_loop(job, together):
    mine = Job(job, together / "run", clip_norm=0.05)
    scaler = torch.amp.GradScaler("cpu")
    mine.loop.register("scaler", scaler)
    mine.loop.backward = lambda loss: scaler.scale(loss / mine.loop.accumulate).backward()

    def step():
        scaler.step(mine.optimizer)
        scaler.update()

    mine.train(accumulate=2, skipped=(2, 5), step=step)
    close(mine.state(), plain(clip=0.05, accumulate=2, skipped=(2, 5)))
    assert scaler.get_scale() == 2.0**14


def test_a_grad_scaler_where_it_would_go_wrong_is_refused(tmp_path):
    for options in ({"memory": ZERO}, {"gradients": GradientsSection(average_every=2)}):
        loop = Job(alone(), tmp_path, **options).loop
        with pytest.raises(UserError, match="each rank's own gradients"):
            loop.register("scaler", torch.amp.GradScaler("cpu"))

    def fused(parameters):
        return torch.optim.SGD(parameters, lr=0.1, fused=True)

    job, scaler = (
        Job(alone(), tmp_path, clip_norm=1.0, optimizer=fused),
        torch.amp.GradScaler("cpu"),
    )
    scaler.scale(job.model(data()[:4][0]).sum()).backward()
    with pytest.raises(UserError, match=r"call scaler.unscale_\(optimizer\) before"):
        scaler.step(job.optimizer)


def test_background_saves_keep_the_registered_state_of_their_step(tmp_path):
    options = {"ema": True, "schedule": one_cycle, "background": True, "every": 1, "keep": 0}
    with (whole := Job(alone(), tmp_path, **options).train()).loop:
        expected = whole.state()
    for path in tmp_path.glob("step-*"):
        if int(path.name[5:14]) > 3:
            path.unlink()
    (tmp_path / "LATEST").unlink()
    with (rest := Job(alone(), tmp_path, **options).train()).loop:
        equal(rest.state(), expected)
    assert rest.rates == whole.rates[3:]
    # What is being saved is a copy: it may change meanwhile.
    saved = whole.loop.registered.collect()["registered.ema.module.0.weight"].tensor
    before = saved.clone()
    with torch.no_grad():
        whole.ema.module[0].weight.add_(1)
    assert torch.equal(saved, before)


def test_a_save_in_the_background_holds_back_each_optimizer(tmp_path, monkeypatch):
    bring = Exchange.bring

    def late(*args, **named):
        time.sleep(0.1)  # a step would not wait that long
        return bring(*args, **named)

    monkeypatch.setattr(Exchange, "bring", late)
    parts = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, second = (torch.optim.SGD(part.parameters(), lr=1.0) for part in parts)
    options = LoopOptions(every=1, keep=0, background=True)
    with Loop(alone(), tmp_path, torch.nn.ModuleList(parts), first, options) as loop:
        loop.register("second", second)
        for part in parts:
            torch.nn.init.zeros_(part.weight)
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=1):
            for _ in batches:
                sum(-part.weight.sum() for part in parts).backward()
                second.step()
                loop.step()
                second.zero_grad()
                first.zero_grad()
    for path in tmp_path.glob("step-*"):
        with safe_open(path, "pt") as saved:
            weights = [saved.get_tensor(f"model.{part}.weight").item() for part in (0, 1)]
        assert weights == [int(path.name[5:14])] * 2
    assert not second._optimizer_step_pre_hooks


class Held:
    """Has any state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trained(folder, *, steps=1, **things):
    job = Job(alone(), folder)
    for name, thing in things.items():
        job.loop.register(name, thing)
    for _, batches in job.loop.epochs(data(), batch=BATCH, epochs=1):
        for inputs, targets in batches:
            job.optimizer.zero_grad()
            cross_entropy(job.model(inputs), targets).backward()
            job.optimizer.step()
            job.loop.stop()
    job.loop.close()


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 3]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": one_cycle,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_every_scheduler_of_torch_goes_on(tmp_path, make):
    def rates(folder, stop_at=0):
        model = torch.nn.Linear(5, 3).double()
        optimizer = sgd(model.parameters())
        scheduler = make(optimizer)
        found = []
        with Loop(alone(), folder, model, optimizer) as loop:
            loop.register("scheduler", scheduler)
            for _, batches in loop.epochs(data(), batch=BATCH, epochs=3):
                for _ in batches:
                    optimizer.step()
                    group = optimizer.param_groups[0]
                    found.append((group["lr"], group["momentum"]))
                    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(*([1.0] if plateau else []))
                    if len(found) == stop_at:
                        loop.stop()
        return found

    whole = rates(tmp_path / "whole")
    assert len({*whole}) > 1
    assert rates(tmp_path / "cut", stop_at=5) + rates(tmp_path / "cut") == whole


def test_any_state_of_numbers_and_tensors_comes_back(tmp_path):
    state = {
        "a.b": torch.arange(3),
        "a": {"b": torch.tensor(2.5, dtype=torch.bfloat16), 3: ("x", None, True)},
        "empty": torch.empty(0, 2),
        "odd": torch.arange(6.0).view(2, 3).t(),
        "numbers": [math.inf, -math.inf, 0.1, 2**200, -7],
        "set": {"x", "y"},
        (1, "key"): {},
    }
    trained(tmp_path, held=Held(state))
    again = Held({})
    trained(tmp_path, held=again)
    assert repr(again.state) == repr(state) or again.state.keys() == state.keys()
    for key, value in state.items():
        found = again.state[key]
        if isinstance(value, torch.Tensor):
            assert torch.equal(found, value)
            assert found.dtype == value.dtype
        elif key != "a":
            assert found == value
            assert type(found) is type(value)
    assert again.state["a"][3] == ("x", None, True)
    assert again.state["a"]["b"] == 2.5


def test_names_that_come_and_go_are_told(tmp_path, caplog):
    trained(tmp_path, one=Held({"n": 1}), two=Held({"n": 2}))
    caplog.clear()
    job = Job(alone(), tmp_path)
    two, three = Held({"n": 0}), Held({"n": 3})
    job.loop.register("two", two)
    job.loop.register("three", three)
    next(iter(job.loop.epochs(data(), batch=BATCH, epochs=1)))
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == [
        "the checkpoint has no state of three: it starts afresh",
        "the checkpoint has the state of one, which is no longer registered: it is dropped",
    ]
    assert (two.state, three.state) == ({"n": 2}, {"n": 3})


def test_what_cannot_be_saved_is_refused_by_its_path(tmp_path):
    loop = Job(alone(), tmp_path).loop
    for state, message in (
        ({"a": [1, len]}, "registered.it.a.1 is of type builtin_function_or_method"),
        ({"a": {torch.ones(2): 1}}, "registered.it.a has tensors as keys"),
        ({"a": torch.ones(2).to_sparse()}, "registered.it.a is a tensor sparse"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "registered.it.a is a tensor of type"),
    ):
        with pytest.raises(UserError, match=message):
            loop.register("it", Held(state))
    for name, thing, message in (
        ("a.b", Held(1), "no usable name"),
        ("it", object(), "has no state_dict"),
        ("it", loop.optimizer, "the loop's own"),
    ):
        with pytest.raises(UserError, match=message):
            loop.register(name, thing)
    assert not loop.registered.things
    loop.register("it", Held({"fine": 1}))
    with pytest.raises(UserError, match="called twice"):
        loop.register("it", Held({}))
    next(iter(loop.epochs(data(), batch=BATCH, epochs=1)))
    with pytest.raises(UserError, match="after loop.epochs"):
        loop.register("late", Held({}))


def test_a_registered_state_that_can_no_longer_be_saved_ends_the_loop(tmp_path):
    job, held = Job(alone(), tmp_path), Held({"n": 1})
    job.loop.register("held", held)
    with pytest.raises(UserError, match="registered.held.n is of type object"):
        for _, batches in job.loop.epochs(data(), batch=BATCH, epochs=1):
            for _ in batches:
                job.optimizer.step()
                held.state = {"n": object()}
                job.steps += 1
    assert job.steps == 1


@pytest.mark.mpi(min_size=2)
def test_a_state_that_differs_between_ranks_is_an_error_that_names_one(job, together):
    loop = Job(job, together / "run").loop
    rank = job.world.rank
    for state in ({"n": int(rank == 1)}, {"t": torch.full((3,), float(rank == 1))}):
        with pytest.raises(UserError, match=r"rank 1 .*: the state of 'it'.* differs"):
            loop.register("it", Held(state))
    with pytest.raises(UserError, match="rank 1 .*registered.it.n is of type object"):
        loop.register("it", Held({"n": object() if rank == 1 else 1}))


REFUSED = {
    "zero-local": (
        {"memory": ZERO, "gradients": GradientsSection(average_every=2)},
        ConfigError,
        "average_every is 2",
    ),
    "zero-horovod": (
        {"memory": ZERO, "gradients": GradientsSection(engine="horovod")},
        ConfigError,
        "memory.zero is 1",
    ),
    "offload": (
        {"memory": MemorySection(offload="optimizer")},
        ConfigError,
        "leave memory.offload out; a Trainer also takes the path",
    ),
    "precision": ({"precision": "float64"}, UserError, "precision is 'float64'"),
    "clip": ({"clip_norm": -1.0}, ConfigError, "clip_norm is -1"),
    "adasum": (
        {"gradients": GradientsSection(engine="horovod", reduction="adasum"), "clip_norm": 1.0},
        ConfigError,
        "adasum",
    ),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_at_set_up(tmp_path, options, kind, message):
    with pytest.raises(kind, match=message):
        Job(alone(), tmp_path, **options)


@pytest.mark.mpi
def test_ranks_that_were_given_different_options_are_told(job, together):
    if job.world.size > 1:
        with pytest.raises(UserError, match="what the loop was given .* differs"):
            Job(job, together, clip_norm=float(job.world.rank))


@pytest.mark.mpi
def test_a_step_before_the_last_micro_batch_is_refused(job, together):
    def attempt(act):
        mine = Job(job, together / "run")
        another = sgd(mine.model[0].parameters())
        mine.loop.register("another", another)
        for _, batches in mine.loop.epochs(data(), batch=BATCH, epochs=1, accumulate=3):
            for inputs, targets in batches:
                mine.loop.backward(cross_entropy(mine.model(inputs), targets))
                act(mine, another)

    for act in (
        lambda mine, _: mine.loop.step(),
        lambda mine, _: mine.optimizer.step(),
        lambda mine, _: mine.loop.clip(1.0),
        lambda _, another: another.step(),
    ):
        with pytest.raises(UserError, match="before the last of the step's 3 micro-batches"):
            attempt(act)


def test_a_step_that_was_left_half_way_is_done_again(tmp_path):
    def seen(stop_at):
        job, found = Job(alone(), tmp_path), []
        with job.loop as loop:
            for _, batches in loop.epochs(
                data(), batch=BATCH, epochs=EPOCHS, accumulate=3, shuffle=False
            ):
                for inputs, targets in batches:
                    found.append(inputs[0])
                    if len(found) == stop_at:
                        return found
                    loop.backward(cross_entropy(job.model(inputs), targets))
                    if loop.step_due:
                        job.optimizer.step()
                        job.optimizer.zero_grad()
        return found

    first, rest = seen(3 * 3 + 2), seen(0)
    assert (len(first), len(rest)) == (11, 8 * 3 - 9)
    equal(first[9:], rest[:2])
    with pytest.raises(UserError, match="before its end; a checkpoint has step 0"):
        for _, batches in Job(alone(), tmp_path / "new").loop.epochs(
            data(), batch=96, epochs=2, accumulate=2
        ):
            next(batches)


def test_a_batch_that_cannot_be_accumulated_is_refused(tmp_path):
    loop = Job(alone(), tmp_path).loop
    for accumulate in (5, 0):
        with pytest.raises(ConfigError, match="accumulate"):
            next(loop.epochs(data(), batch=BATCH, epochs=1, accumulate=accumulate))


def test_with_a_precision_steps_are_the_loops(tmp_path):
    for precision in ("float16", "bfloat16"):
        job = Job(alone(), tmp_path, precision=precision)
        with job.loop.autocast():
            assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == getattr(torch, precision)
        job.model(data()[:4][0]).sum().backward()
        with pytest.raises(UserError, match=f"precision {precision}, and optimizer.step"):
            job.optimizer.step()
        if precision == "float16":
            with pytest.raises(UserError, match="has no scale"):
                job.loop.step()
        job.loop.close()
    with Job(alone(), tmp_path, clip_norm=1.0).loop:
        pass  # another one may be made


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_items_takes_the_step_that_the_others_scale(job, together):
    with (made := Job(job, together, precision="float16", clip_norm=0.05)).loop as loop:
        before = made.state()
        count = 0 if job.world.rank == 1 else 3
        inputs, targets = data()[:count]
        weight = loop.weight(count)
        if count:
            loop.backward(weight * cross_entropy(made.model(inputs), targets))
        assert loop.step()
        moved = [not torch.equal(old, new) for old, new in zip(before, made.state(), strict=True)]
        assert all(moved)


def test_clip_tells_the_norm_without_the_scale(tmp_path):
    norms = []
    for options in ({}, {"precision": "float16"}):
        job = Job(alone(), tmp_path, **options)
        inputs, targets = data()[:12]
        job.loop.backward(cross_entropy(job.model(inputs), targets))
        norms.append(job.loop.clip(0.01))
        job.loop.step()
        norms.append(job.state())
    assert norms[2] == pytest.approx(norms[0], rel=1e-12)
    close(norms[3], norms[1])


class Drawn(torch.utils.data.Dataset):
    """Samples that draw random numbers, of any number."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, place):
        inputs, target = data()[place]
        return inputs + torch.rand(5, dtype=torch.float64), target


@pytest.mark.mpi
@pytest.mark.parametrize("samples", [3, 97])
def test_an_evaluation_is_that_of_one_process(part, together, samples):
    if part is None:
        return
    found = []
    for started in (alone(), part):
        job = Job(started, together / f"{len(found)}", kind="norm")

        def per_sample(batch, model=job.model):
            inputs, targets = batch
            outputs = model(inputs)
            right = outputs.argmax(1) == targets
            return {"loss": cross_entropy(outputs, targets, reduction="none"), "right": right}

        found.append(job.loop.evaluate(Drawn(samples), per_sample, batch=10))
        only = job.loop.evaluate(Drawn(samples), lambda b, one=per_sample: one(b)["right"])
        assert only == pytest.approx(found[-1]["right"], rel=1e-12)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0]["loss"] > 0


@pytest.mark.mpi
def test_training_is_the_same_with_and_without_evaluation(job, together):
    states = []
    for evaluated in (False, True):
        mine = Job(job, together / str(evaluated), kind="norm", ema=True)

        def step(mine=mine, evaluated=evaluated):
            if evaluated:  # between the backward pass and the step, where most could go wrong
                mine.loop.evaluate(Drawn(7), lambda batch: mine.model(batch[0]).sum(1))
            torch.rand(1)
            assert mine.model.training
            mine.loop.step()

        states.append(mine.train(step=step, dropout=True).state())
    equal(*states)


@pytest.mark.mpi
def test_an_evaluation_that_fails_on_one_rank_fails_on_all(job, together):
    mine = Job(job, together / "run")
    last = job.world.size - 1

    def broken(batch):
        if job.world.rank == last:
            raise ValueError("no such label")
        return batch[0].sum(1)

    failing = RankError if job.world.size > 1 else ValueError
    with pytest.raises(failing, match="no such label"):
        mine.loop.evaluate(data(), broken)
    assert mine.model.training
    with pytest.raises(UserError, match="one number per sample"):
        mine.loop.evaluate(data(), lambda batch: batch[0].sum())
    with pytest.raises(ConfigError, match="0 samples"):
        mine.loop.evaluate(Drawn(0), broken)
    with pytest.raises(UserError, match="returned a tensor of type torch.complex"):
        mine.loop.evaluate(data(), lambda batch: batch[0][:, 0] * 1j)
    with pytest.raises(UserError, match="returned a number with the name 1"):
        mine.loop.evaluate(data(), lambda batch: {1: batch[0][:, 0]})
    with pytest.raises(ConfigError, match=r"a batch of 4.0"):
        mine.loop.evaluate(data(), broken, batch=4.0)
    assert mine.loop.evaluate(data(), lambda batch: torch.ones(len(batch[0]))) == 1.0


@pytest.mark.mpi
def test_local_steps_are_evaluated_as_their_mean(job, together):
    section = GradientsSection(average_every=100)
    mine = Job(job, together / "run", gradients=section, background=True, every=2)
    found = []

    def step():
        mine.loop.step()
        found.append(mine.loop.evaluate(data(), lambda batch: mine.model(batch[0]).square().sum(1)))

    mine.train(step=step)
    assert all(other == found for other in job.world.gathered(found))
    with torch.no_grad():
        last = float(mine.model(data()[:][0]).square().sum(1).mean())
    assert last == pytest.approx(found[-1], rel=1e-12)


@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
@pytest.mark.mpi
@pytest.mark.parametrize(
    "options", cases({"plain": {}, "clip": {"clip_norm": 0.05}}, later=["plain"])
)
def test_an_optimizer_that_horovod_has_wrapped(job, together, options):
    hvd = runtime.start_horovod(job.world)

    def wrapped(parameters):
        return hvd.DistributedOptimizer(sgd(parameters))

    reference = plain(clip=options.get("clip_norm", 0.0), schedule=one_cycle)
    mine = {"optimizer": wrapped, "schedule": one_cycle, **options}
    with (whole := Job(job, together / "whole", **mine)).loop:
        close(whole.train(step=whole.optimizer.step).state(), reference)
    with (first := Job(job, together / "cut", **mine)).loop:
        first.train(step=first.optimizer.step, stop_at=5)
    with (rest := Job(job, together / "cut", **mine)).loop:
        rest.train(step=rest.optimizer.step)
        # On more ranks the order of additions depends on what Horovod fuses.
        (equal if job.world.size <= 2 else close)(rest.state(), whole.state())
    assert rest.steps == whole.steps - 5


@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
@pytest.mark.mpi
def test_non_finite_steps_are_skipped_with_horovods_optimizer(job, together):
    hvd = runtime.start_horovod(job.world)

    def wrapped(parameters):
        return hvd.DistributedOptimizer(sgd(parameters))

    options = {"optimizer": wrapped, "precision": "float16", "clip_norm": 0.05}
    with (mine := Job(job, together / "run", **options)).loop:
        close(mine.train(skipped=(2, 5)).state(), plain(clip=0.05, skipped=(2, 5)))
