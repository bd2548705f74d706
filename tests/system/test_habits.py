"""What people do in loops of their own, one habit at a time, against the same in one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

pytestmark = pytest.mark.mpi
needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")
ENGINES = pytest.mark.parametrize(
    "engine", ["mpi", pytest.param("horovod", marks=needs_horovod)], ids="engine-{}".format
)
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def samples(rank: int, step: int, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 6, generator=generator).double()


def build(*, more: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers, *([nn.Linear(3, 3)] if more else [])).double()


class Ours:
    """The loop on this rank."""

    def __init__(self, group: Group, model: nn.Module, optimizer, **options) -> None:
        self.group, self.model, self.optimizer = group, model, optimizer
        options = {"bucket_bytes": 100, **options}
        self.averager = average_gradients(model, optimizer, group, AveragingOptions(**options))

    def batch(self, step: int) -> torch.Tensor:
        return samples(self.group.rank, step)

    def backward(self, step: int) -> None:
        self.model(self.batch(step)).square().mean().backward()

    def close(self) -> None:
        self.averager.close()


class Plain:
    """The loop in one process, on the samples of all ranks."""

    def __init__(self, group: Group, model: nn.Module, optimizer) -> None:
        self.group, self.model, self.optimizer = group, model, optimizer

    def batch(self, step: int) -> torch.Tensor:
        return torch.cat([samples(rank, step) for rank in range(self.group.size)])

    def backward(self, step: int) -> None:
        self.model(self.batch(step)).square().mean().backward()

    def close(self) -> None:
        """Nothing to do."""


def both(job, loop, make=build, optimizer_of=torch.optim.SGD, **options):
    """Run a loop both ways, and return the differences of the parameters."""
    group, found = job.world, []
    for kind, more in ((Ours, options), (Plain, {})):
        model = make()
        run = kind(group, model, optimizer_of(model.parameters(), lr=0.1), **more)
        loop(run)
        run.close()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return [
        name for name, mine in found[0].items() if not torch.allclose(mine, found[1][name], **EXACT)
    ]


def steps(run, count: int = 4, first: int = 0) -> None:
    for step in range(first, first + count):
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()


@ENGINES
def test_the_optimizers_own_step_averages(job, engine):
    assert not both(job, steps, engine=engine)


@ENGINES
def test_gradients_that_are_clipped_before_the_step_are_averaged_first(job, engine):
    norms = []

    def loop(run):
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward(step)
            norms.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
            run.optimizer.step()

    assert not both(job, loop, engine=engine)
    assert norms[:4] == pytest.approx(norms[4:], rel=1e-12)


def test_reading_a_gradient_in_any_way_shows_the_mean(job):
    looks = []

    def loop(run):
        run.optimizer.zero_grad()
        run.backward(0)
        first = next(run.model.parameters())
        looks.append(
            [float(first.grad.abs().max()), first.grad.numpy().sum(), float(first.grad.norm())]
        )
        first.grad /= 2
        run.optimizer.step()
        steps(run, first=1)

    assert not both(job, loop)
    assert looks[0] == pytest.approx(looks[1], rel=1e-12)


def test_torchs_scaler_finds_what_is_not_finite_on_another_rank(job):
    """It looks at gradients before the step: they are the mean, so all ranks skip the same one."""
    group, model = job.world, build().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(model, optimizer, group)
    scaler, moved = torch.amp.GradScaler("cpu"), []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = model(samples(group.rank, step).float()).square().mean()
        if step == 1 and group.rank == group.size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before[0], next(model.parameters())))
    averager.close()
    assert moved == [True, False, True, True]


@ENGINES
@pytest.mark.parametrize("drop", ["optimizer", "model", "none"])
def test_steps_that_all_ranks_give_up(job, engine, drop):
    """Also where sums of some buckets have begun in the backward pass, and of others have not."""

    def clear(run):
        if drop == "optimizer":
            run.optimizer.zero_grad()
        elif drop == "model":
            run.model.zero_grad()
        else:
            for parameter in run.model.parameters():
                parameter.grad = None

    def loop(run):
        for step in range(9):
            clear(run)
            run.backward(step)
            if step not in (0, 4, 5):
                run.optimizer.step()

    assert not both(job, loop, engine=engine)


def test_a_step_given_up_by_a_rank_without_samples_too(job):
    """It makes no backward pass, but has asked for its weight."""
    group = job.world

    def loop(run):
        for step in range(6):
            run.optimizer.zero_grad()
            if isinstance(run, Ours):
                last = group.rank == group.size - 1 and group.size > 1
                weight = run.averager.weight(0 if last else 4)
                if not last:
                    mine = run.model(samples(group.rank, step))
                    (mine.square().mean() * weight).backward()
            else:
                data = [samples(rank, step) for rank in range(max(1, group.size - 1))]
                run.model(torch.cat(data)).square().mean().backward()
            if step != 4:
                run.optimizer.step()

    assert not both(job, loop)


def told(action) -> str:
    try:
        action()
    except UserError as error:
        assert error.agreed
        return str(error)
    return ""


@ENGINES
def test_a_step_that_one_rank_alone_gives_up_is_an_error_of_all(job, engine):
    group, model = job.world, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Ours(group, model, optimizer, engine=engine)
    steps(ours)

    def drift():
        optimizer.zero_grad()
        ours.backward(4)
        if group.rank == 0:
            optimizer.zero_grad()
            ours.backward(5)
        optimizer.step()

    text = told(drift)
    if group.size > 1:
        assert "the ranks take different steps: rank 0" in text
        assert "take a step on all ranks or on none" in text
    else:
        assert text == ""


def test_a_step_that_one_rank_leaves_out_is_an_error_of_all(job):
    group, model = job.world, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Ours(group, model, optimizer)
    steps(ours)

    def drift():
        optimizer.zero_grad()
        if group.rank == group.size - 1:
            ours.averager.leave_step()
        else:
            ours.backward(4)
            optimizer.step()

    text = told(drift)
    last = group.size - 1
    if group.size > 1:
        assert f"averages gradients, rank {last}" in text
        assert "has left the step without averaging" in text
    ours.close()


def test_gradients_that_nobody_drops_add_up(job):
    def loop(run):
        for step in range(6):
            if step % 2 == 0:
                run.optimizer.zero_grad()
            run.backward(step)
            run.optimizer.step()

    assert not both(job, loop)


@pytest.mark.parametrize(
    ("clear", "engine"),
    [
        ("zeros", "mpi"),
        pytest.param("zeros", "horovod", marks=needs_horovod),
        ("odd steps", "mpi"),
        ("given up", "mpi"),
    ],
)
def test_old_gradients_of_a_parameter_that_this_rank_does_not_use_do_no_harm(job, clear, engine):
    """Its bucket's sum begins in the backward pass, and may end there."""
    group = job.world

    def backward(run, step, given_up):
        ours = isinstance(run, Ours)
        for rank in [group.rank] if ours else range(group.size):
            out = run.model[2](run.model[0](samples(rank, step)).tanh())
            if rank and not given_up:
                out = run.model[3](out)
            (out.square().mean() / (1 if ours else group.size)).backward()
        time.sleep(0.02)  # Horovod's thread sums
        for _ in range(100 if ours else 0):
            run.averager.progress.advance()

    def loop(run):
        for step in range(7):
            if clear == "zeros" or step % 2:
                run.optimizer.zero_grad(set_to_none=clear == "odd steps")
            given_up = clear == "given up" and step in (3, 4)
            backward(run, step, given_up)
            if given_up:
                run.model[0].zero_grad()
                run.model[2].zero_grad()
            else:
                run.optimizer.step()

    def optimizer_of(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)

    assert not both(job, loop, lambda: build(more=True), optimizer_of, engine=engine)


def test_two_steps_in_a_row_use_the_same_gradients(job):
    def loop(run):
        steps(run)
        run.optimizer.step()
        run.optimizer.step()

    assert not both(job, loop)


@ENGINES
def test_two_gradients_in_the_same_memory(job, engine):
    """Autograd gives both views of one tensor: what changes one in place changes the other."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Parameter(torch.randn(2, 3).double())
            self.two = nn.Parameter(torch.randn(3, 2).double())

        def forward(self, x):
            return x * torch.sin(self.one.view(-1) + self.two.view(-1))

    model = Sum()
    model(samples(0, 0)).sum().backward()
    assert model.one.grad.data_ptr() == model.two.grad.data_ptr()
    assert not both(job, steps, Sum, engine=engine)


@ENGINES
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("layout", ["channels last", "transposed", "view"])
def test_parameters_of_any_memory_layout_with_fused_optimizers(job, engine, kind, layout):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 3, 2)
            self.matrix = nn.Parameter(torch.randn(5, 3).t())
            whole = torch.randn(3, 10)
            self.part = nn.Parameter(whole[:, ::2] if layout == "view" else whole[:, :5])
            self.double()
            if layout == "channels last":
                self.to(memory_format=torch.channels_last)

        def forward(self, x):
            x = self.conv(x.view(-1, 2, 3, 1).expand(-1, -1, -1, 2)).mean((2, 3))
            return x @ self.matrix @ self.part.t()

    def optimizer_of(parameters, lr):
        return kind(parameters, lr=lr, fused=layout != "view")

    assert not both(job, steps, Odd, optimizer_of, engine=engine)


def test_parameters_that_no_rank_uses_are_left_alone(job):
    """A plain optimizer does not decay what has no gradient, nor moves it by its momentum."""

    def loop(run):
        for step in range(8):
            run.optimizer.zero_grad()
            run.model[3].requires_grad_(step < 4)
            run.model[0].bias.requires_grad_(step != 6)
            run.backward(step)
            run.optimizer.step()

    def optimizer_of(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)

    assert not both(job, loop, lambda: build(more=True), optimizer_of)


def test_a_parameter_without_gradients_does_not_hold_up_the_sums_of_others(job):
    group, model = job.world, build(more=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Ours(group, model, optimizer, bucket_bytes=1)
    model[3].requires_grad_(False)  # the last layer: its buckets come first
    steps(ours)
    optimizer.zero_grad()
    ours.backward(4)
    begun = ours.averager._filling.begun
    optimizer.step()
    buckets = len(ours.averager.buckets)
    ours.close()
    assert begun == (buckets if group.size > 1 else 0)


@ENGINES
@pytest.mark.parametrize("way", ["unfrozen", "added", "outside"])
def test_parameters_that_come_later_or_from_elsewhere(job, engine, way):
    def make():
        model = build(more=True)
        model[3].requires_grad_(way != "unfrozen")
        return model

    group, found = job.world, []
    for kind, more in ((Ours, {"engine": engine}), (Plain, {})):
        model, scale = make(), nn.Parameter(torch.ones((), dtype=torch.float64))
        first = [p for name, p in model.named_parameters() if way != "added" or name[0] != "3"]
        parameters = [*first, scale] if way == "outside" else first
        run = kind(group, model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **more)
        if way == "outside":
            run.model = lambda x, model=model, scale=scale: model(x) * scale
        steps(run)
        model[3].requires_grad_(True)
        if way == "added":
            run.optimizer.add_param_group({"params": list(model[3].parameters())})
        steps(run, 5, first=4)
        run.close()
        found.append([p.detach().clone() for p in [*model.parameters(), scale]])
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(*found, strict=True))


def test_new_parameters_that_differ_between_ranks_are_an_error_until_refresh(job):
    group, model = job.world, build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Ours(group, model, optimizer)
    steps(ours)
    torch.manual_seed(group.rank)
    new = nn.Parameter(torch.randn(3).double())
    optimizer.add_param_group({"params": [new]})
    ours.model = lambda x: model(x) + new
    text = told(lambda: steps(ours))
    assert ("call `averager.refresh()`" in text) == (group.size > 1)
    ours.averager.refresh()
    steps(ours)
    values = group.gathered(new.tolist())
    ours.close()
    assert all(value == values[0] for value in values)


@ENGINES
@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "averaged"])
def test_parameters_that_are_added_between_a_backward_pass_and_its_step(job, engine, seen):
    """The averager is refreshed there, and the step keeps its gradients."""
    found = []
    for kind in (Ours, Plain):
        model, new = build(), nn.Parameter(torch.ones(3).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"engine": engine} if kind is Ours else {}
        run = kind(job.world, model, optimizer, **options)
        for step in range(7):
            optimizer.zero_grad()
            if step == 4:
                run.model = lambda x, model=model, new=new: model(x) + new
            run.backward(step)
            if seen:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == 4:
                optimizer.add_param_group({"params": [new]})
                if kind is Ours:
                    run.averager.refresh()
            optimizer.step()
        found.append([p.detach().clone() for p in [*model.parameters(), new]])
        run.close()
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(*found, strict=True))


def test_optimizers_that_call_a_closure(job):
    def loop(run):
        for step in range(3):

            def closure(step=step):
                run.optimizer.zero_grad()
                data = [samples(rank, step) for rank in range(run.group.size)]
                mine = data[run.group.rank] if isinstance(run, Ours) else torch.cat(data)
                loss = run.model(mine).square().mean()
                loss.backward()
                return loss

            run.optimizer.step(closure)

    def optimizer_of(parameters, lr):
        return torch.optim.LBFGS(parameters, lr=lr, line_search_fn="strong_wolfe", max_iter=4)

    assert not both(job, loop, optimizer_of=optimizer_of)


@ENGINES
def test_two_averagers_where_one_model_is_part_of_the_others_loss(job, engine):
    """As in a GAN: the generator's backward pass leaves gradients in the discriminator."""
    group, found = job.world, []
    for kind, more in ((Ours, {"engine": engine}), (Plain, {})):
        one, other = build(), build(more=True)
        maker = nn.Sequential(one, nn.Linear(3, 6).double())
        torch.manual_seed(1)
        nn.init.normal_(maker[1].weight)
        nn.init.zeros_(maker[1].bias)
        runs = [
            kind(group, m, torch.optim.SGD(m.parameters(), lr=0.02), **more) for m in (maker, other)
        ]
        data = [torch.cat([samples(r, s) for r in range(group.size)]) for s in range(6)]
        for step in range(6):
            x = samples(group.rank, step) if kind is Ours else data[step]
            runs[1].optimizer.zero_grad()
            (other(x).square().mean() - other(maker(x).detach()).square().mean()).backward()
            runs[1].optimizer.step()
            runs[0].optimizer.zero_grad()
            other(maker(x)).square().mean().backward()
            runs[0].optimizer.step()
        for run in runs:
            run.close()
        found.append([p.detach().clone() for m in (maker, other) for p in m.parameters()])
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(*found, strict=True))


def test_two_optimizers_of_one_model(job):
    group, found = job.world, []
    for kind in (Ours, Plain):
        model = build()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        runs = [kind(group, model, optimizer) for optimizer in optimizers]
        for step in range(5):
            model.zero_grad()
            runs[0].backward(step)
            for optimizer in optimizers:
                optimizer.step()
        for run in runs:
            run.close()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, **EXACT) for a, b in zip(*found, strict=True))


def test_gradients_with_a_graph_are_refused_by_name(job):
    model = build()
    ours = Ours(job.world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(samples(0, 0)).square().mean()
    if job.world.size > 1:
        with pytest.raises(UserError, match="create_graph=True.*torch.autograd.grad"):
            loss.backward(create_graph=True)
    ours.close()


def test_sparse_gradients_and_their_optimizer(job):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(7, 3, sparse=True).double()

        def forward(self, x):
            return self.words(x.abs().mul(10).long() % 7)

    assert not both(job, steps, Words)
    model = Words()
    if job.world.size > 1:
        with pytest.raises(UserError, match="SparseAdam takes sparse gradients"):
            average_gradients(model, torch.optim.SparseAdam(model.parameters()), job.world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_summed_in_32(job, dtype):
    group = job.world
    model = nn.Linear(1, 300, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(model, optimizer, group, AveragingOptions(bucket_bytes=100))
    torch.manual_seed(0)
    each = torch.rand(group.size, 300, 1).to(dtype)
    (model.weight * each[group.rank]).sum().backward()
    averager.average()
    found = model.weight.grad.clone()
    averager.close()
    assert torch.equal(found, each.float().mean(0).to(dtype))


def test_complex_parameters(job):
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.waves = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.waves).abs()

    assert not both(job, steps, Waves)


def test_options_that_differ_between_ranks_are_told(job):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if job.world.size > 1:
        with pytest.raises(UserError, match="an option of gradient averaging differs"):
            average_gradients(
                model,
                optimizer,
                job.world,
                AveragingOptions(bucket_bytes=1000 + (job.world.rank == 1)),
            )


def shared_bytes() -> int:
    """Shared memory that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


@pytest.mark.parametrize("zero", [0, 1])
def test_averagers_are_made_again_and_leave_nothing(job, zero):
    """In a notebook, or in a sweep, the next one is often made without closing the last."""
    group = job.world
    model = nn.Linear(500, 500).double()
    optimizers = []
    sizes = []
    for _ in range(4):
        optimizers.append(torch.optim.SGD(model.parameters(), lr=1e-3))
        options = AveragingOptions(engine="mpi", zero=zero)
        averager = average_gradients(model, optimizers[-1], group, options)
        for _step in range(3):
            optimizers[-1].zero_grad()
            model(torch.full((1, 500), 1.0 + group.rank).double()).sum().backward()
            optimizers[-1].step()
        sizes.append(shared_bytes())
    if group.size > 1:
        with pytest.raises(UserError, match="no longer averaged"):
            optimizers[0].step()
    averager.close()
    assert max(sizes) == sizes[0]
    optimizers[-1].step()  # a plain optimizer again


@pytest.mark.mpi(min_size=2)
def test_an_averager_takes_no_private_memory_beside_the_shared(job, monkeypatch):
    made = []
    zeros = torch.zeros

    def counted(*size, **more):
        result = zeros(*size, **more)
        made.append(result.nbytes)
        return result

    model = nn.Linear(1000, 1000).double()
    monkeypatch.setattr("hpc_train.gradients.sums.torch.zeros", counted)
    averager = average_gradients(
        model,
        torch.optim.SGD(model.parameters()),
        job.world,
        AveragingOptions(bucket_bytes=1 << 20),
    )
    averager.close()
    assert sum(made) < 1 << 20


@pytest.mark.mpi(min_size=2)
def test_windows_that_cannot_be_had_for_any_reason(job, monkeypatch, caplog):
    from mpi4py import MPI

    class Broken:
        @staticmethod
        def Allocate_shared(*_):  # noqa: N802  # as MPI names it
            raise MPI.Exception(MPI.ERR_INTERN)

    monkeypatch.setattr(MPI, "Win", Broken)
    assert not both(job, steps)
    if job.world.rank == 0:
        assert "cannot share memory by MPI windows" in caplog.text


def test_parameters_that_have_left_the_shared_memory_are_told(job):
    model = build()
    ours = Ours(job.world, model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    steps(ours)
    ours.averager.zero_grad()
    model.float().double()
    text = told(lambda: steps(ours, 1))
    ours.close()
    assert ("has moved a parameter" in text) == (job.world.size > 1)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_a_model_that_is_converted_too_late_is_told(job, zero, kept):
    model = build()
    ours = Ours(job.world, model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    steps(ours)

    if job.world.size > 1:
        with pytest.raises(UserError, match="before averaging is set up"):
            if not kept:
                ours.averager.zero_grad()
            model.float()(ours.batch(0).float()).sum().backward()
    ours.close()


def test_with_zero_a_look_at_a_part_of_a_gradient_is_refused(job):
    model = build()
    ours = Ours(job.world, model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    ours.backward(0)
    if job.world.size > 1:
        with pytest.raises(UserError, match="no rank has the whole gradient.* clip_norm or its"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ours.close()


def test_a_checkpoint_of_a_shared_weight_gets_several_gradients_in_a_pass(job):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build()

        def forward(self, x):
            x = x.detach().requires_grad_()
            x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=True)
            return self.inner[2](
                torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=True)
                @ self.inner[0].weight.t()
            )

        def part(self, x):
            return (self.inner[0](x).tanh() @ self.inner[0].weight).tanh()

    assert not both(job, lambda run: steps(run, 6), Twice)


def test_more_passes_than_before_add_up(job):
    """Sums have begun by then; what comes late is summed by itself."""

    def loop(run):
        for step in range(8):
            run.optimizer.zero_grad()
            for number in range(3 if step in (4, 6) else 1):
                run.backward(10 * step + number)
            run.optimizer.step()

    assert not both(job, loop)
