"""Loops that keep, replace, or look at gradients by themselves, against the same in one process."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.slots import Slot
from tests.system.test_habits import ENGINES, Ours, Plain, both, build, samples, steps

pytestmark = pytest.mark.mpi
ALL = pytest.mark.parametrize("early", [False, True])  # whether sums begin in the backward pass


def loop_of(change, *, early=False):
    """Some plain steps first if sums are to begin in the backward pass, and then others."""

    def loop(run):
        before = 4 if early else 0
        steps(run, before)
        for step in range(before, before + 4):
            change(run, step)
            run.optimizer.step()

    return loop


def grads(run):
    return [p.grad for p in run.model.parameters()]


@ENGINES
@ALL
def test_gradients_of_the_last_step_that_were_kept_are_still_those(job, engine, early):
    kept = {}

    def change(run, step):
        run.optimizer.zero_grad()
        run.backward(step)
        mine, old = grads(run), kept.get(run)
        kept[run] = mine
        for parameter, now, before in zip(run.model.parameters(), mine, old or [], strict=False):
            parameter.grad = now + 0.9 * before

    assert not both(job, loop_of(change, early=early), engine=engine)


@ENGINES
@ALL
def test_gradients_that_were_kept_after_a_look_or_a_step_are_still_those(job, engine, early):
    kept = {}

    def change(run, step):
        old = kept.get(run)
        run.model.zero_grad()
        run.backward(step)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        for parameter, before in zip(run.model.parameters(), old or [], strict=False):
            parameter.grad.add_(before, alpha=0.5)
        kept[run] = grads(run)

    assert not both(job, loop_of(change, early=early), engine=engine)


def test_a_gradient_that_was_dropped_before_averaging_cannot_be_used(job):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Ours(job.world, model, optimizer)
    for drop in (optimizer.zero_grad, model.zero_grad):
        optimizer.zero_grad()
        run.backward(0)
        one = grads(run)
        drop()
        run.backward(1)
        other = grads(run)
        with pytest.raises(UserError, match=r"kept without a copy .* keep p.grad.clone\(\)"):
            one[0] + other[0]
    run.close()


@ENGINES
def test_gradients_that_are_kept_as_copies_can_be_combined(job, engine):
    def change(run, step):
        run.optimizer.zero_grad()
        run.backward(step)
        first = [grad.clone() for grad in grads(run)]
        run.optimizer.zero_grad()
        run.backward(step + 9)
        for parameter, one, other in zip(run.model.parameters(), first, grads(run), strict=True):
            parameter.grad = one - 0.5 * other

    assert not both(job, loop_of(change), engine=engine)


def made(run, step):
    """Gradients that the program makes, of this rank's samples or of all."""
    ranks = [run.group.rank] if isinstance(run, Ours) else range(run.group.size)
    loss = run.model(torch.cat([samples(rank, step) for rank in ranks])).square().mean()
    return torch.autograd.grad(loss, [*run.model.parameters()])


@ENGINES
@pytest.mark.parametrize("copy", [False, True])
def test_gradients_that_the_program_sets_are_averaged_in_each_step(job, engine, copy):
    def change(run, step):
        for parameter, gradient in zip(run.model.parameters(), made(run, step), strict=True):
            if copy and parameter.grad is not None:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient

    assert not both(job, loop_of(change), engine=engine)
    assert not both(job, loop_of(change, early=True), engine=engine)


@ENGINES
@ALL
def test_memory_of_gradients_can_be_replaced(job, engine, early):
    def change(run, step):
        run.optimizer.zero_grad()
        run.backward(step)
        for parameter in run.model.parameters():
            parameter.grad.data = parameter.grad.data.clamp(-0.05, 0.05)
        if step % 2:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)

    assert not both(job, loop_of(change, early=early), engine=engine)


LEAVES = {
    "list": lambda gradient: torch.tensor(gradient.tolist()),
    "numpy": np.asarray,
    "dlpack": np.from_dlpack,
    "torch": torch.from_dlpack,
    "shared": lambda gradient: gradient.clone().share_memory_(),
    "pickle": lambda gradient: pickle.loads(pickle.dumps(gradient)),
    "deepcopy": copy.deepcopy,
    "storage": lambda gradient: (
        torch.empty(0)
        .double()
        .set_(
            gradient.untyped_storage(), gradient.storage_offset(), gradient.shape, gradient.stride()
        )
    ),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_what_leaves_torch_is_the_mean(job, leave):
    found = []

    def change(run, step):
        run.optimizer.zero_grad()
        run.backward(step)
        given = LEAVES[leave](next(run.model.parameters()).grad)
        found.append(torch.tensor(given.tolist()).flatten())

    assert not both(job, loop_of(change))
    assert torch.allclose(torch.stack(found[:4]), torch.stack(found[4:]))


def test_a_gradient_is_not_moved_out_of_its_bucket(job):
    run = Ours(job.world, model := build(), torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(0)
    if job.world.size > 1:
        with pytest.raises(UserError, match=r"share a copy: p.grad.clone\(\).share_memory_"):
            grads(run)[0].share_memory_()
    run.close()


LOOKS = {
    "look": lambda parameter: parameter.grad.norm(),
    "change": lambda parameter: parameter.grad.mul_(3),
    "list": lambda parameter: parameter.grad.tolist(),
    "dlpack": lambda parameter: np.from_dlpack(parameter.grad),
    "data": lambda parameter: parameter.grad.data,
    "step": lambda parameter: parameter.data.add_(parameter.grad, alpha=-0.1),
    "sum": lambda parameter: parameter.grad + 1,
    "set": lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_hook_that_uses_a_gradient_before_it_is_averaged_is_refused(job, look):
    model = build()
    averager = average_gradients(
        model, torch.optim.SGD(model.parameters(), lr=0.1), job.world, AveragingOptions()
    )
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: LOOKS[look](p) and None)
    with pytest.raises(UserError, match=r"in a backward pass.* do that after the backward pass"):
        model(samples(job.world.rank, 0)).square().mean().backward()
    averager.close()


def test_a_gradient_of_another_parameter_that_is_not_averaged_is_refused(job):
    model = build()
    other = nn.Parameter(torch.zeros_like(next(model.parameters())))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    averager = average_gradients(model, optimizer, job.world, AveragingOptions())
    model(samples(job.world.rank, 0)).square().mean().backward()
    other.grad = next(model.parameters()).grad
    with pytest.raises(UserError, match=r"set it to a copy: `p.grad = other.grad.clone\(\)`"):
        optimizer.step()
    averager.close()


def test_an_optimizer_in_the_backward_pass_is_refused(job):
    """Its hooks were made first, as in a tutorial of torch."""
    model = build()
    single = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        single[parameter].step()
        single[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    averager = average_gradients(
        model, torch.optim.SGD(model.parameters(), lr=0.1), job.world, AveragingOptions()
    )
    with pytest.raises(UserError, match="before the gradients are averaged"):
        model(samples(job.world.rank, 0)).square().mean().backward()
    averager.close()


class Sometimes(nn.Module):
    """A part of it is used in one step only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.aside = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x):
        return self.always(x) + (self.aside(x) if self.aside.training else 0.0)


@pytest.mark.parametrize(
    "options", [{}, {"zero": 1}, {"zero": 2}], ids=["zero=0", "zero=1", "zero=2"]
)
def test_gradients_that_are_zeroed_and_not_dropped_are_still_stepped_with(job, options):
    def loop(run):
        for step in range(6):
            run.model.aside.train(step == 1)
            run.optimizer.zero_grad(set_to_none=False)
            run.backward(step)
            run.optimizer.step()

    def adam(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, weight_decay=0.1)

    assert not both(job, loop, Sometimes, adam, **options)


@ENGINES
@pytest.mark.parametrize("options", [{}, {"zero": 1}], ids=["zero=0", "zero=1"])
def test_a_plain_loop_parts_with_no_gradient(job, engine, options, monkeypatch):
    """To part with one takes a copy of it."""
    if engine == "horovod" and options:
        return
    promises = []
    promise = Slot._promise
    monkeypatch.setattr(Slot, "_promise", lambda slot: promises.append(slot) or promise(slot))
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    run = Ours(job.world, model, optimizer, engine=engine, **options)
    before, places = len(promises), []
    for step in range(6):
        optimizer.zero_grad()
        run.backward(step)
        if step % 2 and not options:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if not options:
            places.append([id(p.grad) for p in model.parameters()])
    gc.collect()
    assert len(promises) == before
    assert all(some == places[0] for some in places)
    run.close()


class Experts(nn.Module):
    """Each sample goes to one expert, so a rank's samples leave some unused; one always is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(9)).double()

    def forward(self, batch):
        chosen = (4 * batch[:, 0]).long().abs() % 8
        pairs = zip(chosen.tolist(), batch, strict=True)
        return torch.stack([self.experts[number](row) for number, row in pairs])


def clipped(run):
    return float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))


def cut(run):
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
    return 0.0


def cut_by_hand(run):
    """Of those that are there; the first may be one that only other ranks have."""
    found = [p.grad for p in run.model.parameters() if p.grad is not None]
    for gradient in found:
        gradient.clamp_(-0.01, 0.01)
    return 0.0


@ENGINES
@pytest.mark.parametrize("look", [clipped, cut, cut_by_hand])
@pytest.mark.parametrize("passes", [1, 2])
def test_clipping_is_that_of_one_process_where_a_rank_uses_a_part(job, engine, look, passes):
    seen = {}

    def loop(run):
        for step in range(6):
            run.optimizer.zero_grad(set_to_none=step != 3)
            for number in range(passes):
                run.backward(2 * step + number)
            norm = look(run)
            run.optimizer.step()
            unused = [p.grad is None for p in run.model.parameters()]
            seen.setdefault(type(run), []).append((norm, unused))

    def optimizer_of(parameters, lr):
        return torch.optim.SGD(parameters, lr, momentum=0.5, weight_decay=0.1)

    assert not both(job, loop, Experts, optimizer_of, engine=engine)
    for (norm, unused), (its_norm, its_unused) in zip(seen[Ours], seen[Plain], strict=True):
        assert norm == pytest.approx(its_norm, rel=1e-12)
        assert unused == its_unused


def test_torchs_scaler_is_that_of_one_process_where_a_rank_uses_a_part(job):
    def loop(run):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            run.optimizer.zero_grad()
            loss = run.model(run.batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(run.optimizer)
            clipped(run)
            scaler.step(run.optimizer)
            scaler.update()

    assert not both(job, loop, Experts)


@ENGINES
def test_a_rank_without_items_clips_as_the_others_do(job, engine):
    def loop(run):
        for step in range(4):
            run.optimizer.zero_grad()
            data = [samples(rank, step, 4 * (rank != 1)) for rank in range(job.world.size)]
            if isinstance(run, Ours):
                mine = data[job.world.rank]
                weight = run.averager.weight(len(mine))
                if len(mine):
                    (weight * run.model(mine).square().mean()).backward()
            else:
                run.model(torch.cat(data)).square().mean().backward()
            clipped(run)
            run.optimizer.step()

    assert not both(job, loop, engine=engine)
