"""Loops that are written wrongly: each ends with one clear line, nothing is lost with code 0."""

from __future__ import annotations

import math
import os
import signal
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hpc_train import GradientsSection, MemorySection, run
from hpc_train.data.mixture import Mixture
from hpc_train.errors import (
    CheckpointMismatch,
    ConfigError,
    DivergenceError,
    Stopped,
    UserError,
)
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.launch.cancel import cancel
from hpc_train.mpi import runtime
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.training.test_loop_options import BATCH, alone, data, make_model, sgd


def make(tmp_path, **options):
    model = make_model()
    optimizer = sgd(model.parameters())
    return model, optimizer, Loop(alone(), tmp_path, model, optimizer, LoopOptions(**options))


def train(model, optimizer, loop, epochs=2):
    for _, batches in loop.epochs(data(), batch=BATCH, epochs=epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def test_a_seed_may_be_of_numpy_and_is_told_if_it_is_no_number(tmp_path):
    _, _, loop = make(tmp_path)
    with pytest.raises(ConfigError, match=r"the seed is 1\.5: give a whole number"):
        [*loop.epochs(data(), batch=BATCH, epochs=1, seed=1.5)]
    for _, batches in loop.epochs(data(), batch=BATCH, epochs=1, seed=np.int64(3)):
        for _ in batches:
            loop.step()
            loop.stop()
    assert loop.checkpoints.identity["seed"] == 3
    loop.close()


def test_a_last_save_that_fails_after_a_break_is_an_error(tmp_path):
    def program(started):
        model = make_model()
        loop = Loop(started, tmp_path, model, sgd(model.parameters()))
        for _, batches in loop.epochs(data(), batch=BATCH, epochs=1):
            for _ in batches:
                loop.step()
                with torch.no_grad():
                    model[0].weight[0, 0] = math.inf
                break
            break

    assert run(program) != 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_stop_that_the_program_catches_still_exits_with_75(tmp_path):
    def program(started):
        model = make_model()
        loop = Loop(started, tmp_path, model, sgd(model.parameters()))
        with suppress(Stopped):
            for _, batches in loop.epochs(data(), batch=BATCH, epochs=1):
                for _ in batches:
                    loop.step()
                    os.kill(os.getpid(), signal.SIGTERM)

    assert run(program) == 75
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["step-000000001.safetensors"]


def test_a_start_with_a_stop_file_takes_no_step_and_asks_to_remove_it(tmp_path):
    (tmp_path / "STOP").touch()
    with pytest.raises(ConfigError, match="remove it to resume"):
        train(*make(tmp_path))
    (tmp_path / "STOP").unlink()
    train(*make(tmp_path))
    assert list(tmp_path.glob("*.safetensors"))


def test_a_loop_is_not_put_into_the_folder_of_a_data_set(tmp_path):
    (tmp_path / "manifest.json").write_text('{\n "format": "hpc_train.tokens/4"\n}')
    with pytest.raises(ConfigError, match="is the folder of a data set: give the run a folder"):
        train(*make(tmp_path))
    assert not (tmp_path / ".claim").exists()
    (tmp_path / ".claim").mkdir()  # a run that was there already goes on
    train(*make(tmp_path))


def test_cancel_takes_the_directory_of_a_loop(tmp_path):
    train(*make(tmp_path))
    cancel(tmp_path)
    with pytest.raises(ConfigError, match="remove it to resume"):
        train(*make(tmp_path), epochs=4)


def test_steps_of_another_optimizer_are_told(tmp_path):
    model, _, loop = make(tmp_path)
    other = sgd(model.parameters())
    with pytest.raises(UserError, match="no step of the loop's optimizer was taken"):
        train(model, other, loop)


def test_the_rest_of_an_epoch_needs_no_step(tmp_path):
    for _ in range(2):
        model, optimizer, loop = make(tmp_path)
        with loop:
            for _, batches in loop.epochs(data(), batch=BATCH, epochs=1):
                for inputs, _ in batches:
                    if loop.step_number == 2:
                        model(inputs).sum().backward()
                        optimizer.step()
                        loop.stop()


@pytest.mark.parametrize("use", ["train", "evaluate", "step", "register"])
def test_a_closed_loop_is_not_used(tmp_path, use):
    model, optimizer, loop = make(tmp_path)
    loop.close()
    uses = {
        "train": lambda: train(model, optimizer, loop),
        "evaluate": lambda: loop.evaluate(data(), lambda batch: batch[1]),
        "step": loop.step,
        "register": lambda: loop.register("one", model),
    }
    with pytest.raises(UserError, match="the loop is closed"):
        uses[use]()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"batch_norm": "snyc"}, "batch_norm is 'snyc': give one of sync, local, refuse"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'"),
        ({"matmul": "fast"}, "matmul is 'fast'"),
        ({"every": -3}, "every is -3"),
        ({"keep": -2}, "keep is -2"),
        ({"hang_steps": 1.5}, "hang_steps is 1.5: give an integer of 0 or more"),
        ({"hang_timeout": "1h"}, "hang_timeout is '1h': give a number of 0 or more"),
        ({"hang_timeout": None}, "hang_timeout is None"),
        ({"end_margin": "10"}, "end_margin is '10'"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"time_limit": "10 minutes"}, "time_limit is '10 minutes': give seconds, HH:MM:SS"),
        ({"time_limit": math.nan}, "time_limit is nan"),
        ({"memory": {"zero": 1}}, "memory is {'zero': 1}: give a MemorySection"),
    ],
)
def test_unknown_options_are_refused(tmp_path, options, line):
    with pytest.raises(UserError, match=line):
        make(tmp_path, **options)


def test_steps_without_epochs_are_told_once(tmp_path, caplog):
    model, optimizer, loop = make(tmp_path)
    for inputs, targets in DataLoader(data(), batch_size=BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    loop.close()
    assert caplog.text.count("the optimizer has stepped before loop.epochs was called") == 1


def test_a_second_optimizer_that_is_not_saved_is_told(tmp_path, caplog):
    for name in ("forgotten", "registered"):
        caplog.clear()
        model = make_model()
        first, second = sgd(model[0].parameters()), sgd(model[3].parameters())
        loop = Loop(alone(), tmp_path / name, model, first)
        if name == "registered":
            loop.register("second", second)
        train(model, first, loop)
        told = "does not have 2 trained parameters of the model, such as 3.weight"
        assert (told in caplog.text) == (name == "forgotten")
        loop.close()


class Wrapped:
    """A user's object with a scheduler."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def in_turn(optimizer):
    parts = [step_lr(optimizer), step_lr(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize("made", [step_lr, plateau, in_turn])
@pytest.mark.parametrize("of_second", [False, True])
@pytest.mark.parametrize(
    "registered",
    [None, lambda scheduler: scheduler, Wrapped],
    ids=["forgotten", "given", "wrapped"],
)
def test_a_scheduler_that_is_not_saved_is_told(tmp_path, caplog, made, of_second, registered):
    model = make_model()
    optimizer, second = sgd(model[0].parameters()), sgd(model[3].parameters())
    loop = Loop(alone(), tmp_path, model, optimizer, LoopOptions())
    loop.register("second", second)
    scheduler = made(second if of_second else optimizer)
    if registered:
        loop.register("scheduler", registered(scheduler))
    with loop:
        next(iter(loop.epochs(data(), batch=BATCH, epochs=1)))
    whose = " 'second'" if of_second else ""
    told = f"the optimizer{whose} has a learning-rate scheduler that is not registered"
    assert (told in caplog.text) == (not registered)
    assert caplog.text.count("scheduler that is not registered") == (not registered)


class Holder:
    """A user's object with parameters, whose gradients the program averages."""

    def __init__(self, module):
        self.held = {"of": list(module.parameters())}
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict


def test_an_optimizer_of_parameters_that_nobody_averages_or_saves_is_refused(tmp_path):
    criterion = torch.nn.Linear(3, 3)
    line = r"register\('second', ...\) was given has 2 parameters that the loop's model lacks"
    for number, held in enumerate((None, criterion, Holder(criterion))):
        model, optimizer, loop = make(tmp_path / str(number))
        loop.register("second", sgd(criterion.parameters()))
        if held is not None:
            loop.register("criterion", held)
        with loop, nullcontext() if held else pytest.raises(UserError, match=line):
            train(model, optimizer, loop)


@pytest.mark.parametrize("way", ["zero", "average_every", "float16"])
def test_a_second_optimizer_is_refused_where_only_the_loops_step_is_right(tmp_path, way):
    options = {
        "zero": {"memory": MemorySection(zero=1)},
        "average_every": {"gradients": GradientsSection(average_every=2)},
        "float16": {"precision": "float16"},
    }
    line = "only loop.step.. removes the loss scale" if way == "float16" else "with one optimizer"
    model = make_model()
    first, second = sgd(model[0].parameters()), sgd(model[3].parameters())
    with Loop(alone(), tmp_path, model, first, LoopOptions(**options[way])) as loop:
        loop.register("apart", sgd([torch.nn.Parameter(torch.ones(2))]))
        with pytest.raises(UserError, match=line):
            loop.register("second", second)


class OfNobody(torch.optim.SGD):
    """May compute anything."""


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [torch.optim.SGD, OfNobody])
def test_an_optimizer_that_zero_may_not_divide_is_told(job, together, caplog, kind):
    model = make_model()
    options = LoopOptions(memory=MemorySection(zero=1))
    with Loop(job, together, model, kind(model.parameters(), 0.1), options):
        divided = job.world.size > 1
        assert ("OfNobody is not known to" in caplog.text) == (divided and kind is OfNobody)


def test_what_is_no_options_is_refused(tmp_path):
    model = make_model()
    with pytest.raises(UserError, match="is of type list: give one torch.optim.Optimizer"):
        Loop(alone(), tmp_path, model, [sgd(model.parameters())])
    with pytest.raises(UserError, match="options of the loop are 'abc': give LoopOptions"):
        Loop(alone(), tmp_path, model, sgd(model.parameters()), "abc")


@pytest.mark.parametrize("directory", ["", None])
def test_a_loop_has_a_directory(directory):
    model = make_model()
    with pytest.raises(UserError, match=f"directory of the loop is {directory!r}: give a path"):
        Loop(alone(), directory, model, sgd(model.parameters()))


def test_a_time_limit_may_be_a_text_as_in_a_configuration(tmp_path):
    with pytest.raises(UserError, match=r"time_limit \(1 s\) is over before the first step"):
        train(*make(tmp_path, time_limit="1s"))
    train(*make(tmp_path, time_limit="1000h"))


@pytest.mark.parametrize("given", [{"epochs": -1}, {"batch": 0}, {"batch": 8.0}], ids=str)
def test_impossible_numbers_are_refused(tmp_path, given):
    _, _, loop = make(tmp_path)
    ((name, value),) = given.items()
    with pytest.raises(UserError, match=f"{name} is {value}: give an integer of"):
        next(iter(loop.epochs(data(), **{"batch": BATCH, "epochs": 1, **given})))


def test_a_data_loader_is_no_data_set(tmp_path):
    _, _, loop = make(tmp_path)
    with pytest.raises(UserError, match="of type DataLoader, which has no samples by number"):
        loop.epochs(DataLoader(data()), batch=BATCH, epochs=1)


class Stream(IterableDataset):
    """Has samples in a row, and tells how many."""

    def __iter__(self):
        return iter(data())

    def __len__(self):
        return len(data())


@pytest.mark.parametrize("made", [Stream, lambda: Mixture([(Stream(), 1)])])
def test_an_iterable_data_set_is_no_data_set(tmp_path, made):
    _, _, loop = make(tmp_path)
    with pytest.raises(UserError, match="of type Stream, which has no samples by number: give a"):
        loop.epochs(made(), batch=BATCH, epochs=1)


class Unmeasured:
    """Has samples by number, and does not tell how many."""

    def __getitem__(self, place):
        return data()[place]


@pytest.mark.parametrize("told", [None, lambda self: 1.5, lambda self: -1, lambda self: 1 // 0])
def test_a_data_set_without_a_number_of_samples_is_refused(tmp_path, told):
    _, _, loop = make(tmp_path)
    dataset = type("Rows", (Unmeasured,), {"__len__": told} if told else {})()
    line = r"len\(\) of the data set, of type Rows, fails \(.*\): give a map-style data set"
    with pytest.raises(UserError, match=line):
        next(iter(loop.epochs(dataset, batch=BATCH, epochs=1)))
    with pytest.raises(UserError, match=line):
        loop.evaluate(dataset, lambda batch: batch[1])


def test_another_thing_under_a_name_is_refused(tmp_path):
    model, optimizer, loop = make(tmp_path)
    loop.register("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3))
    with loop:
        train(model, optimizer, loop)
    model, optimizer, loop = make(tmp_path)
    loop.register("schedule", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    with pytest.raises(CheckpointMismatch, match="'schedule' was a StepLR in the checkpoint"):
        train(model, optimizer, loop, epochs=3)


class Metric(torch.nn.Module):
    """As metrics of torchmetrics, it leaves its numbers out of its state unless it is told."""

    def __init__(self, *, persistent=False):
        super().__init__()
        self.total, self.persistent = torch.zeros(()), persistent

    def state_dict(self, **_):
        return {"total": self.total} if self.persistent else {}


@pytest.mark.parametrize(
    ("thing", "told"),
    [(Metric(), True), (Metric(persistent=True), False), (torch.nn.CrossEntropyLoss(), False)],
    ids=["empty", "saved", "without numbers"],
)
def test_a_thing_whose_state_is_empty_is_told(tmp_path, caplog, thing, told):
    model, optimizer, loop = make(tmp_path)
    loop.register("it", thing)
    assert not caplog.text.count("is empty")
    train(model, optimizer, loop)
    assert caplog.text.count("state_dict() of it, which loop.register was given, is empty") == told


def test_a_group_that_was_added_in_training_is_for_another_loop(tmp_path):
    def start():
        model = make_model()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        loop = Loop(alone(), tmp_path, model, optimizer)
        loop.register("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 3))
        return model, optimizer, loop

    model, optimizer, loop = start()
    optimizer.add_param_group({"params": model[3].parameters()})
    train(model, optimizer, loop, epochs=1)
    loop.close()
    with pytest.raises(CheckpointMismatch, match="close the loop and make another one"):
        train(*start())


@pytest.mark.mpi
@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
def test_an_optimizer_that_is_wrapped_too_late(job):
    hvd = runtime.start_horovod(job.world)
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    model = make_model()
    optimizer = sgd(model.parameters())
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(engine="mpi"))
    wrapped = hvd.DistributedOptimizer(optimizer)
    inputs, _ = data()[:4]
    with pytest.raises(UserError, match="has wrapped the optimizer after"):
        model(inputs).sum().backward()
    averager.close()
    del wrapped


@pytest.mark.mpi
def test_a_bare_tensor_as_a_state_is_compared_between_ranks(job, together):
    if job.world.size == 1:
        pytest.skip("one rank has nobody to differ from")

    class Bare:
        def state_dict(self):
            return torch.full((2,), float(job.world.rank))

        def load_state_dict(self, state):
            pass

    model = make_model()
    loop = Loop(job, together, model, sgd(model.parameters()))
    with pytest.raises(UserError, match="the state of 'it'.* differs"):
        loop.register("it", Bare())
    loop.close()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the plain one's
@pytest.mark.mpi
@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
def test_a_scheduler_made_before_horovod_wrapped_the_optimizer_goes_on(job, together):
    hvd = runtime.start_horovod(job.world)
    rates = []
    for epochs in (1, 2):
        model = make_model()
        plain = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        optimizer = hvd.DistributedOptimizer(plain)
        with Loop(job, together, model, optimizer) as loop:
            loop.register("schedule", schedule)
            for _, batches in loop.epochs(data(), batch=BATCH, epochs=epochs):
                for inputs, targets in batches:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                    optimizer.step()
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025]


@pytest.mark.mpi
@pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
def test_more_micro_batches_than_horovod_was_told_of(job, together):
    hvd = runtime.start_horovod(job.world)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=2)
    with Loop(job, together, model, optimizer) as loop:
        epochs = loop.epochs(data(), batch=12, epochs=1, accumulate=3)
        with pytest.raises(UserError, match="wrap it with backward_passes_per_step=3"):
            next(iter(epochs))


def test_a_stop_before_the_first_batch(tmp_path):
    model, optimizer, loop = make(tmp_path)
    loop.stop()
    with loop:
        train(model, optimizer, loop)
        assert loop.step_number == 0
        train(model, optimizer, loop)  # it was asked for once
        assert loop.step_number > 0


def test_a_state_that_a_thing_does_not_take_is_told_by_its_name(tmp_path):
    class Choosy:
        def __init__(self, takes):
            self.takes = takes

        def state_dict(self):
            return {"number": 3}

        def load_state_dict(self, state):
            if not self.takes:
                raise KeyError("another")

    for takes in (True, False):
        model, optimizer, loop = make(tmp_path)
        loop.register("choosy", Choosy(takes))
        if takes:
            with loop:
                train(model, optimizer, loop)
    with pytest.raises(CheckpointMismatch, match="'choosy'.* does not take .*KeyError: 'another'"):
        train(model, optimizer, loop, epochs=3)


def fail_once(runtime, folder, model, optimizer):
    """Train; all ranks fail after step 3 and catch the error, inside of the loop's block."""
    with suppress(KeyError), Loop(runtime, folder, model, optimizer) as loop:
        epochs = loop.epochs(data(), batch=BATCH, epochs=1)  # outlives the block
        for _, batches in epochs:
            for inputs, targets in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                if loop.step_number == 4:
                    raise KeyError("what the user did")
                optimizer.step()


@pytest.mark.mpi
@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_second_loop_after_an_error_that_all_ranks_catch(job, together, anew):
    before = [*job.at_end]
    model = make_model()
    optimizer = sgd(model.parameters())
    fail_once(job, together / "failed", model, optimizer)
    if anew:
        model = make_model()
        optimizer = sgd(model.parameters())
    with Loop(job, together / "failed", model, optimizer) as loop:
        saved = sorted(path.name for path in (together / "failed").glob("*.safetensors"))
        train(model, optimizer, loop)
    left = [*job.at_end]
    expected = make_model()
    stepper = sgd(expected.parameters())
    with Loop(job, together / "not", expected, stepper) as loop:
        train(expected, stepper, loop)
    assert saved == ["step-000000003.safetensors"]
    assert left == before
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.mpi
@pytest.mark.parametrize("caught", [True, False])
def test_an_earlier_loop_that_cannot_be_saved_is_told_by_its_name(job, together, caplog, caught):
    if job.world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    model = make_model()
    first = Loop(job, together / "first", model, sgd(model.parameters()))
    with suppress(KeyError), first if caught else nullcontext():
        for _, batches in first.epochs(data(), batch=BATCH, epochs=1):
            for _ in batches:
                first.step()
                break
            with torch.no_grad():
                model[0].weight[0, 0] = job.world.rank
            if caught:
                raise KeyError("what the user did")
            break
    expected = make_model()
    optimizer = sgd(expected.parameters())
    words = rf"earlier loop, in {together / 'first'}, is not saved"
    with nullcontext() if caught else pytest.raises(DivergenceError, match=words):
        Loop(job, together / "second", expected, optimizer).close()
    if caught:
        assert "an earlier loop, in" in caplog.text
    else:
        first.close()


@pytest.mark.parametrize(
    ("rate", "mode", "told"), [(0.5, False, True), (0.5, True, False), (0.0, False, False)]
)
def test_a_model_that_is_trained_in_eval_mode_is_told(tmp_path, caplog, rate, mode, told):
    caplog.set_level("INFO")
    model = torch.nn.Sequential(make_model(), torch.nn.Dropout(rate)).train(mode)
    optimizer = sgd(model.parameters())
    with Loop(alone(), tmp_path, model, optimizer) as loop:
        train(model, optimizer, loop)
    assert caplog.text.count("the model is trained in eval mode") == told


def test_a_loop_whose_optimizer_another_loop_has_takes_no_steps(tmp_path):
    model, optimizer, loop = make(tmp_path / "one")
    Loop(alone(), tmp_path / "two", model, optimizer)
    with pytest.raises(UserError, match="another loop was made for this one's parameters"):
        train(model, optimizer, loop)
