"""Engine horovod where its DistributedOptimizer is known to go wrong, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built"),
]
STEPS, PASSES = 4, 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}
Losses = Callable[[nn.Module, int, int, int], Tensor]


class Branches(nn.Module):
    """Which parameters get a gradient, and how often, depends on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
        self.shared = nn.Linear(4, 4)
        self.shared.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(3, 2)

    def forward(self, x, branch):
        return self.branches[branch](self.frozen(self.shared(self.first(x).tanh())).tanh())


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Branches().double()


def loss(model: nn.Module, rank: int, step: int, number: int) -> Tensor:
    """Of a rank's pass. Rank 0 stays on one branch, the others go over all of them."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    data = torch.randn(5, 5, generator=generator).double()
    return (model(data[:, :4], rank * number % 3) - data[:, 4:]).square().mean() / PASSES


def reference(optimizer_of, ranks, *, clip=0.0, weights=None, clear=None) -> nn.Module:
    """What one process gets that computes the loss of all ranks."""
    model = build()
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(**(clear or {}))
        for place, rank in enumerate(ranks):
            weight = 1.0 if weights is None else weights[place]
            for number in range(PASSES if weight else 0):
                (loss(model, rank, step, number) * weight / len(ranks)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12), name


def make(group: Group, optimizer_of=OPTIMIZERS["adamw"], **options):
    """A model that starts with another rank's weights, its optimizer, and the averager."""
    model = build(seed=group.rank)
    optimizer = optimizer_of(model.parameters())
    options = {"engine": "horovod", "bucket_bytes": 100, **options}
    return model, optimizer, average_gradients(model, optimizer, group, AveragingOptions(**options))


def backward(model: nn.Module, rank: int, step: int, weight: float = 1.0) -> None:
    for number in range(PASSES):
        (loss(model, rank, step, number) * weight).backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clear", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_zero_grad_with_any_argument_gives_the_same_parameters(job, name, clear):
    rank, ranks = job.world.rank, range(job.world.size)
    model, optimizer, averager = make(job.world, OPTIMIZERS[name])
    for step in range(STEPS):
        optimizer.zero_grad(**clear)
        backward(model, rank, step)
        averager.step()
    averager.close()
    assert_same(model, reference(OPTIMIZERS[name], ranks, clear=clear))


def test_clipping_between_average_and_step_and_no_second_average(job):
    rank, ranks = job.world.rank, range(job.world.size)
    model, _, averager = make(job.world)
    for step in range(STEPS):
        averager.zero_grad()
        backward(model, rank, step)
        averager.average()
        norm = float(averager.norm())
        if norm > 0.1:
            averager.scale_(0.1 / (norm + 1e-6))
        averager.step()
    sums, buckets = averager.profile.buckets, len(averager.buckets)
    averager.close()
    assert_same(model, reference(OPTIMIZERS["adamw"], ranks, clip=0.1))
    assert sums == STEPS * buckets
    assert buckets > 3 or job.world.size == 1


def test_passes_that_each_reach_other_parameters(job):
    rank, ranks = job.world.rank, range(job.world.size)
    model, _, averager = make(job.world)
    for step in range(STEPS):
        averager.zero_grad()
        for number in range(PASSES):
            loss(model, rank, step, number).backward()
        averager.step()
    averager.close()
    assert_same(model, reference(OPTIMIZERS["adamw"], ranks))


def test_a_rank_without_data_takes_part_with_no_weight(job):
    rank, size = job.world.rank, job.world.size
    samples = [5] * (size - 1) + [0 if size > 1 else 5]
    model, _, averager = make(job.world)
    for step in range(STEPS):
        averager.zero_grad()
        weight = averager.weight(samples[rank])
        if samples[rank]:
            backward(model, rank, step, weight)
        averager.step()
    averager.close()
    weights = [count * size / sum(samples) for count in samples]
    assert_same(model, reference(OPTIMIZERS["adamw"], range(size), weights=weights))


def test_a_step_can_be_given_up_whatever_has_begun(job):
    rank, size = job.world.rank, job.world.size
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(
        model, optimizer, job.world, AveragingOptions(engine="horovod", bucket_bytes=1)
    )
    part = torch.full((1, 2), 1.0 + rank).double()
    for step in range(2 * STEPS):
        if step == 2 * STEPS - 1:
            before = model[1].weight.detach().clone()
        if step % STEPS == STEPS - 1:
            averager.zero_grad()
            model(part).sum().backward()
        averager.zero_grad()
        (model[1].weight.sum() * (1 + rank)).backward()
        averager.step()
    averager.close()
    assert torch.allclose(model[1].weight, before - (1 + size) / 2, rtol=1e-12)


def test_it_is_horovods_own_optimizer_that_averages(job, monkeypatch):
    if job.world.size == 1:
        pytest.skip("one rank has nothing to average")
    hvd = runtime.start_horovod(job.world)
    made, synchronized = [], []
    original = hvd.DistributedOptimizer

    def wrap(*args, **options):
        made.append(original(*args, **options))
        synchronize = made[-1].synchronize
        made[-1].synchronize = lambda: (synchronized.append(1), synchronize())
        return made[-1]

    monkeypatch.setattr(hvd, "DistributedOptimizer", wrap)
    model, _, averager = make(job.world)
    for step in range(STEPS):
        averager.zero_grad()
        backward(model, job.world.rank, step)
        averager.step()
    averager.close()
    assert_same(model, reference(OPTIMIZERS["adamw"], range(job.world.size)))
    assert len(made) == 1
    assert len(synchronized) == STEPS


@pytest.mark.parametrize("passes", [[1, 1, 1, 1, 3, 1, 2, 1], [2, 2, 2, 2, 1, 1, 1, 4]], ids=str)
def test_more_passes_than_in_the_steps_before(job, passes):
    """Horovod's hooks raise an error at a pass beyond those that they were told of."""
    rank, size = job.world.rank, job.world.size
    model, _, averager = make(job.world)
    expected = build()
    plain = OPTIMIZERS["adamw"](expected.parameters())
    for step, count in enumerate(passes):
        averager.zero_grad()
        plain.zero_grad()
        for number in range(count):
            loss(model, rank, step, number).backward()
            for other in range(size):
                (loss(expected, other, step, number) / size).backward()
        averager.step()
        plain.step()
    averager.close()
    assert_same(model, expected)


def failure_of(action: Callable[[], object]) -> list[str]:
    try:
        action()
    except UserError as error:
        return [str(error)]
    return []


@pytest.mark.mpi(min_size=4)
def test_process_sets_average_at_the_same_time_without_the_first_rank_too(job):
    runtime.start_horovod(job.world, [[0, 2], [1, 3]])
    rank = job.world.rank
    ranks = [rank % 2, rank % 2 + 2]
    group = job.world.split(color=rank % 2, key=rank)
    model, _, averager = make(group)
    for step in range(STEPS):
        averager.zero_grad()
        backward(model, rank, step)
        averager.step()
    averager.close()
    group.close()
    assert_same(model, reference(OPTIMIZERS["adamw"], ranks))


@pytest.mark.mpi(min_size=4)
def test_ranks_that_are_no_process_set_are_told_what_to_call(job):
    runtime.start_horovod(job.world)
    # Other tests' process sets stay; none has these ranks.
    group = job.world.split(color=int(job.world.rank == 1), key=job.world.rank)
    failures = failure_of(lambda: make(group))
    group.close()
    if job.world.rank != 1:
        assert "no process set of ranks [0, 2, 3]" in failures[0]
        assert "call runtime.start_horovod(world, process_sets)" in failures[0]


def test_two_models_with_the_same_names_at_the_same_time(job):
    rank, ranks = job.world.rank, range(job.world.size)
    made = [make(job.world) for _ in range(2)]
    for step in range(STEPS):
        for _, _, averager in made:
            averager.zero_grad()
        for number in range(PASSES):
            for model, _, _ in made:
                loss(model, rank, step, number).backward()
        for _, _, averager in made:
            averager.step()
    for _, _, averager in made:
        averager.close()
    expected = reference(OPTIMIZERS["adamw"], ranks)
    for model, _, _ in made:
        assert_same(model, expected)


def test_compression_halves_the_bytes_and_keeps_three_digits(job):
    rank, size = job.world.rank, job.world.size
    model, _, averager = make(job.world, compression="fp16")
    averager.zero_grad()
    backward(model, rank, 0)
    averager.average()
    expected = build()
    for other in range(size):
        backward(expected, other, 0, 1 / size)
    found = [
        (p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    pairs = [(mine.clone(), theirs) for mine, theirs in found if mine is not None]
    averager.close()
    assert all(torch.allclose(mine, theirs, rtol=5e-3, atol=1e-3) for mine, theirs in pairs)
    exact = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert exact == (size == 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "bf16"}, "bf16: use engine mpi"),
        ({"compression": "topk:0.1"}, "topk:0.1: use engine mpi"),
        ({"compression": "powersgd:2"}, "powersgd:2: use engine mpi"),
        ({"zero": 1}, "zero and engine horovod do not go together: use engine mpi"),
        ({"average_every": 2}, "average_every and engine horovod"),
        ({"reduction": "adasum", "compression": "fp16"}, "adasum and compression do not"),
        ({"reduction": "adasum", "engine": "mpi"}, "reduction adasum needs engine horovod"),
    ],
    ids=str,
)
def test_what_this_engine_cannot_do_is_refused(job, options, told):
    failures = failure_of(lambda: make(job.world, **options))
    if job.world.size > 1:
        assert told in failures[0]


@pytest.mark.parametrize("engine", ["horovod", "mpi"], ids=["engine-horovod", "engine-mpi"])
def test_a_state_that_the_first_rank_alone_has_is_given_to_all(job, engine):
    group, optimizer_of = job.world, OPTIMIZERS["adamw"]
    model = build(seed=group.rank)
    optimizer = optimizer_of(model.parameters())
    if group.rank == 0:  # has read the state after two of the steps; the others have nothing
        earlier = trained(range(group.size), 0, 2, build(), optimizer_of)
        model.load_state_dict(earlier[0].state_dict())
        optimizer.load_state_dict(earlier[1].state_dict())
        optimizer.param_groups[0]["lr"] = 0.02
    averager = average_gradients(model, optimizer, group, AveragingOptions(engine=engine))
    for step in range(2, STEPS):
        averager.zero_grad()
        backward(model, group.rank, step)
        averager.step()
    averager.close()
    expected, other = trained(range(group.size), 0, 2, build(), optimizer_of)
    other.param_groups[0]["lr"] = 0.02
    expected, other = trained(range(group.size), 2, STEPS, expected, lambda _: other)
    assert_same(model, expected)
    assert optimizer.param_groups[0]["lr"] == 0.02
    for parameter, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        mine = optimizer.state.get(parameter, {})
        assert mine.keys() == other.state.get(theirs, {}).keys()
        for name, value in mine.items():
            assert torch.allclose(value, other.state[theirs][name], rtol=1e-12, atol=1e-12)


def trained(ranks, first, last, model, optimizer_of):
    """A model and its optimizer after some steps in one process."""
    optimizer = optimizer_of(model.parameters())
    for step in range(first, last):
        optimizer.zero_grad()
        for rank in ranks:
            backward(model, rank, step, 1 / len(ranks))
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("empty", [False, True], ids=["data", "one-rank-without-data"])
def test_adasum_combines_steps_as_the_paper_says(job, name, empty):
    rank, size = job.world.rank, job.world.size
    optimizer_of = OPTIMIZERS[name]
    without = size - 1 if empty else -1
    model, _, averager = make(job.world, optimizer_of, reduction="adasum")
    norms = []
    for step in range(STEPS):
        averager.zero_grad()
        if rank != without:
            loss(model, rank, step, 0).backward()
            loss(model, rank, step, 1).backward()
        averager.average()
        norms.append(float(averager.norm()))
        averager.step()
    averager.close()
    expected, expected_norms = adasum_reference(optimizer_of, size, without)
    assert_same(model, expected)
    assert norms == pytest.approx(expected_norms, rel=1e-12)


PARAMETERS = {
    "gaps": lambda values: values[:, :3],
    "transposed": lambda values: values.t(),
    "complex": lambda values: torch.complex(values, values.t()).t(),
    "bfloat16": lambda values: values.bfloat16(),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_adasum_combines_parameters_of_any_layout_and_type(job, kind):
    draws = torch.Generator().manual_seed(0)
    start = PARAMETERS[kind](torch.randn(8, 8, generator=draws).double())
    shape, number = start.shape, range(job.world.size)
    gradients = [torch.randn(shape, generator=draws).to(start.dtype) for _ in number]
    if start.is_complex():
        step = torch.view_as_complex(tree([-torch.view_as_real(one) for one in gradients]))
    else:
        step = tree([-one for one in gradients])
    expected = start + step
    model = nn.ParameterList([nn.Parameter(torch.zeros(2).double()), nn.Parameter(start)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = AveragingOptions(engine="horovod", reduction="adasum")
    averager = average_gradients(model, optimizer, job.world, options)
    model[1].grad = gradients[job.world.rank]
    averager.average()
    averager.step()
    averager.close()
    rounded = 0.05 if kind == "bfloat16" else 1e-12
    torch.testing.assert_close(model[1].detach(), expected, rtol=rounded, atol=rounded)
    assert len({*job.world.gathered(str(model[1].tolist()))}) == 1


def adasum_reference(optimizer_of, size, without):
    """All ranks' models in one process."""
    models = [build() for _ in range(size)]
    optimizers = [optimizer_of(model.parameters()) for model in models]
    norms = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for number in range(2 if rank != without else 0):
                loss(model, rank, step, number).backward()
        fill(models)
        gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
        norms.append(float(nn.utils.get_total_norm(gradients)))
        everyone = zip(before, *(model.parameters() for model in models), strict=True)
        for old, *new in everyone:
            total = old + tree([p.detach() - old for p in new])
            for parameter in new:
                parameter.data.copy_(total)
    return models[0], norms


def fill(models):
    """Zeros for gradients that other models have."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        for parameter in same if any(p.grad is not None for p in same) else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def tree(steps):
    """Pairs, then pairs of pairs."""
    if len(steps) == 1:
        return steps[0]
    return adasum(*(tree(half) for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :])))


def adasum(a, b):
    dot, aa, bb = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    smallest = torch.finfo(torch.float64).tiny ** 0.5
    return a * (1 - dot / aa / 2 if aa >= smallest else 1) + b * (
        1 - dot / bb / 2 if bb >= smallest else 1
    )


def test_settling_adasum_gives_all_ranks_the_mean_of_their_moments(job):
    rank, size = job.world.rank, job.world.size
    model, optimizer, averager = make(job.world, reduction="adasum")
    averager.zero_grad()
    loss(model, rank, 0, 1).backward()
    averager.step()
    averager.settle()
    found = [
        optimizer.state[p]["exp_avg"].clone() for p in model.parameters() if p.grad is not None
    ]
    averager.close()
    twins = [build() for _ in range(size)]
    for other, twin in enumerate(twins):
        loss(twin, other, 0, 1).backward()
    fill(twins)
    same = list(zip(*(twin.parameters() for twin in twins), strict=True))
    expected = [sum(0.1 * p.grad / size for p in some) for some in same if some[0].grad is not None]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["unfrozen", "added"])
def test_adasum_combines_the_steps_of_parameters_that_come_later(job, way):
    draws, size = torch.Generator().manual_seed(0), job.world.size
    values = [torch.randn(4, generator=draws).double() for _ in range(3)]
    last, middle = nn.Parameter(values[0].clone()), nn.Parameter(values[1].clone())
    other = nn.Parameter(values[2].clone())
    first = [last, middle, other] if way == "unfrozen" else [last, other]
    middle.requires_grad_(way == "added")
    optimizer = torch.optim.SGD(first, lr=1.0)
    options = AveragingOptions(engine="horovod", reduction="adasum", bucket_bytes=32)
    averager = average_gradients(nn.ParameterList(first), optimizer, job.world, options)
    if way == "unfrozen":
        middle.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [middle]})
    gradients = [torch.randn(4, generator=draws).double() for _ in range(2 * size)]
    last.grad = gradients[job.world.rank]
    if job.world.rank == 0:  # the others step by zeros
        middle.grad = gradients[size]
    optimizer.step()
    averager.close()
    zeros = [torch.zeros(4).double() for _ in range(size - 1)]
    assert torch.allclose(last.detach(), values[0] + tree([-g for g in gradients[:size]]))
    assert torch.allclose(middle.detach(), values[1] + tree([-gradients[size], *zeros]))
    assert torch.equal(other.detach(), values[2])
    assert other.grad is None


def test_adasum_names_what_it_waits_for_at_the_start_of_a_step(job, monkeypatch):
    model, _, averager = make(job.world, reduction="adasum")
    loss(model, job.world.rank, 0, 1).backward()
    complete, awaited = averager.progress.complete, []

    def noted(coroutine):
        awaited.append(averager.group.waiting.now[0])
        return complete(coroutine)

    monkeypatch.setattr(averager.progress, "complete", noted)
    averager.step()
    averager.close()
    assert awaited[0] == f"the steps of {job.world.size} ranks"


@pytest.mark.mpi(min_size=2)
def test_adasum_refuses_a_step_with_a_closure(job):
    model, optimizer, averager = make(job.world, reduction="adasum")
    failures = failure_of(lambda: optimizer.step(lambda: loss(model, job.world.rank, 0, 0)))
    averager.close()
    assert "a step with a closure was called" in failures[0]


@pytest.mark.mpi(min_size=2)
def test_adasum_refuses_a_second_optimizer(job):
    model, _, averager = make(job.world, reduction="adasum")
    failures = failure_of(lambda: averager.follow(torch.optim.SGD(model.parameters(), lr=0.1)))
    averager.close()
    assert "combines the steps of one optimizer" in failures[0]


@pytest.mark.mpi(min_size=4)
def test_adasum_over_a_part_of_the_job_is_refused(job):
    runtime.start_horovod(job.world, [[0, 1], [2, 3]])
    group = job.world.split(color=job.world.rank // 2, key=job.world.rank)
    failures = failure_of(lambda: make(group, reduction="adasum"))
    group.close()
    assert "needs all 4 ranks of the job, and the group has 2" in failures[0]
