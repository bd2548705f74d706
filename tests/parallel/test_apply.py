"""A layout put on a whole model: who holds and owns what, and gradients after one step."""

from __future__ import annotations

import threading
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_train.collectives import connect
from hpc_train.collectives.halving import Halving
from hpc_train.errors import UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.models import GPT
from hpc_train.models.llama.shape import Qwen3Shape
from hpc_train.models.lora import LoraAdapters, linear_layers
from hpc_train.mpi.grid import ParallelGrid
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.topology import discover
from hpc_train.parallel.apply import apply
from tests.parallel.test_tensor import assert_same

pytestmark = pytest.mark.mpi(min_size=4)

SHAPE = {"vocab": 12, "sequence": 8, "layers": 3, "hidden": 16, "heads": 4, "dropout": 0.2}
LAYOUTS = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4)]
SCHEDULES = ["1f1b", "interleaved", "zero_bubble"]


@pytest.fixture(params=LAYOUTS, ids=lambda sizes: "dp{}-tp{}-pp{}".format(*sizes))
def grid(request, job):
    yield from built(job, *request.param)


@pytest.fixture
def pipe(job):
    yield from built(job, 1, 1, 4)


@pytest.fixture
def shared(job):
    yield from built(job, 1, 4, 1)


def averager_of(parts):
    """One that has averaged these gradients, and no other rank has more of them."""
    norm = nn.utils.get_total_norm([gradient for _, gradient in parts])
    return SimpleNamespace(parts=lambda: parts, shards=connect(Group()), norm=lambda: norm)


def built(job, dp, tp, pp):
    made = ParallelGrid.build(job.world, discover(job.world, job.node), dp=dp, tp=tp, pp=pp)
    yield made
    made.close()


def put_on(model, grid, schedule="1f1b", *, cut=False):
    virtual_stages = 2 if schedule == "interleaved" and grid.pp == 2 else 1
    device = torch.device("cpu")
    return apply(
        model, grid, device, schedule=schedule, virtual_stages=virtual_stages, sequence_parallel=cut
    )


def gpt(seed=0, *, tie=True):
    torch.manual_seed(seed)
    return GPT(**SHAPE, tie_embeddings=tie).double()


def qwen(seed=0):
    torch.manual_seed(seed)
    more = {"head_width": 6, "mlp_width": 24, "rope_theta": 1e4, "norm_eps": 1e-6}
    sizes = {**SHAPE, "heads": 8, "kv_heads": 4}
    return Qwen3Shape(**sizes, **more, tie_embeddings=True).build().double()


def told(grid, value):
    """What the ranks of this replica have. Collective."""
    return grid.model.comm.allgather(value) if grid.model.comm else [value]


def whole_gradients(model, applied, grid, reference):
    """The gradients as their owners have them; on other ranks the same, or the test fails."""
    mine = [(applied.shards[name], p.grad) for name, p in model.named_parameters()]
    found = {n: torch.full_like(p, torch.nan) for n, p in reference.named_parameters()}
    held = [each for rank in told(grid, mine) for each in rank]
    for owners in (True, False):
        for shard, gradient in held:
            spec = shard.spec
            place = found[shard.name].narrow(spec.dim, spec.start, spec.stop - spec.start)
            if shard.owned and owners:
                place.copy_(gradient)
            elif not owners:
                torch.testing.assert_close(place, gradient, rtol=1e-12, atol=1e-15)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [gpt, partial(gpt, tie=False), qwen], ids=["tied", "", "qwen3"])
def test_a_steps_gradients_and_norm_are_those_of_one_rank(grid, schedule, make):
    text = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(3))

    def forward(of, number, part):
        of.seed_samples([17 * number, 17 * number + 1])
        return of(part, part.roll(-1, 1))

    # Rank 0's weights are to replace all others.
    model, reference = make(grid.world.rank), make()
    applied = put_on(model, grid, schedule, cut=grid.tp > 1)
    parts = text.chunk(4)
    losses = applied.pipeline.train(lambda n, _: forward(model, n, parts[n]), [2] * 4)
    applied.gradients.complete()
    mine = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    norm = applied.gradients.norm(averager_of(mine))
    expected = [forward(reference, n, part) for n, part in enumerate(parts)]
    (sum(expected) / 4).backward()
    found = whole_gradients(model, applied, grid, reference)
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    assert_same(found, reference)
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    assert len(losses) == (4 if grid.coordinate.pp == grid.pp - 1 else 0)
    for loss, right in zip(losses, expected, strict=False):
        torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_over_replicas_begin_while_the_schedule_goes_on(job, schedule):
    """Its buckets are summed after its last gradient, once two steps have shown when that is."""
    text = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(3))
    grid = next(grids := built(job, 2, 1, 2))
    model = gpt()
    applied = put_on(model, grid, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(
        model, optimizer, grid.data, AveragingOptions(engine="mpi", bucket_bytes=4000)
    )
    events, begin, backward = [], averager.sums.begin, applied.pipeline._backward

    def begun(number):
        events.append("sum")
        return begin(number)

    def passed(*args):
        backward(*args)
        events.append("backward")

    averager.sums.begin, applied.pipeline._backward = begun, passed

    def forward(number, virtual_stage):
        model.seed_samples([17 * number, 17 * number + 1])
        return model(text[2 * number :][:2], text[2 * number :][:2].roll(-1, 1))

    for _ in range(3):
        events.clear()
        averager.zero_grad()
        applied.pipeline.train(forward, [2] * 4)
        events.append("average")
        averager.step()
    buckets = len(averager.buckets)
    averager.close()
    applied.close()
    next(grids, None)
    assert events.count("sum") == buckets > 2
    assert events.index("average") == len(events) - 1
    if (
        schedule == "interleaved"
    ):  # the first virtual stage's turn is last: the others' sums go on before
        assert events.index("sum") < len(events) - 2 - events[::-1].index("backward")


class Buffered(nn.Module):
    """Buffers in the stages, outside of them, and one that all stages share."""

    stages = ("first", "layers.*", "last")

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))
        self.last = nn.Linear(8, 4)
        angles = torch.ones(5)
        for layer in self.layers:
            layer.register_buffer("angles", angles)
        self.tensor_plan = {"first": "colwise", "last": "rowwise"}


@pytest.mark.parametrize(
    "make",
    [gpt, lambda: gpt(tie=False), Buffered],
    ids=["tied", "untied", "buffered"],
)
def test_each_element_is_owned_once_in_each_replica(grid, make):
    reference = make()
    model = deepcopy(reference)
    has_tokens = make is not Buffered
    applied = put_on(model, grid, cut=grid.tp > 1 and has_tokens)
    shapes = {n: t.shape for n, t in [*model.named_parameters(), *model.named_buffers()]}
    right = {name: applied.shards[name].spec.local_shape == shapes[name] for name in shapes}
    count = {n: torch.zeros(t.shape) for n, t in reference.named_parameters()}
    count |= {n: torch.zeros(t.shape) for n, t in reference.named_buffers()}
    held = told(grid, applied.shards)
    for shard in (shard for rank in held for shard in rank.values() if shard.owned):
        spec = shard.spec
        place = count[shard.name]
        if place.dim():
            place = place.narrow(spec.dim, spec.start, spec.stop - spec.start)
        place += 1
    assert applied.shards.keys() == shapes.keys()
    assert all(right.values()), right
    assert {name: t.unique().tolist() for name, t in count.items()} == {n: [1] for n in count}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))


class Mirrored(nn.Module):
    """Its last stage has the parameters of the first, in another order. A pass leaves one out."""

    stages = ("first", "middle.*", "last")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Module(), nn.Module()
        self.middle = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for name in "abc":
            self.first.register_parameter(name, nn.Parameter(torch.randn(4, 4)))
        for name in "cba":
            self.last.register_parameter(name, self.first.get_parameter(name))
        first, last = self.first, self.last
        first.forward = lambda x: (x @ first.a).tanh() @ first.b
        last.forward = lambda x: (x @ last.b.T).tanh() @ last.a.T
        self.double()

    def forward(self, x):
        x = self.first(x)
        for layer in self.middle:
            x = layer(x)
        return self.last(x).square().mean()


def test_tied_parameters_in_any_order_get_the_gradients_of_one_rank(pipe):
    model, reference = Mirrored(), Mirrored()
    applied = put_on(model, pipe)
    batches = [torch.randn(2, 4).double() for _ in range(4)]
    applied.pipeline.train(lambda n, _: model(batches[n]), [2] * 4)
    applied.gradients.complete()
    (sum(reference(batch) for batch in batches) / 4).backward()
    for name, parameter in model.named_parameters():
        wanted = reference.get_parameter(applied.shards[name].name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15)


def test_a_parameter_of_stages_between_is_refused(pipe):
    model = Plain()
    model.stages = ("layers.*",)
    model.layers[1].weight = model.layers[0].weight
    model.layers[4].bias = model.layers[0].bias  # first and last may
    with pytest.raises(UserError) as error:
        put_on(model, pipe)
    assert str(error.value) == (
        "layers.0.weight is shared by pipeline ranks [0, 1]: "
        "only the first and the last may share parameters: use fewer ranks"
    )


def test_a_model_without_stages_is_refused_by_a_pipeline(pipe):
    with pytest.raises(UserError, match="above 1 and .* need stages, and Plain has no .*`stages`"):
        put_on(Plain(), pipe)


def test_a_model_without_a_plan_is_refused_by_tensor_parallelism(shared):
    with pytest.raises(UserError, match="parallel.tp is 4, but Plain has no .*`tensor_plan`"):
        put_on(Plain(), shared)


def test_alone_any_model_will_do():
    grid = ParallelGrid.build(Group(), discover(Group(), Group()))
    model = Plain()
    applied = put_on(model, grid, "zero_bubble")
    assert all(shard.owned for shard in applied.shards.values())
    assert {type(layer) for layer in model.layers} == {nn.Linear}
    applied.gradients.complete()
    grid.close()


def highest_handle(comm):
    """The largest number that MPI gives 100 communicators: larger, if earlier ones were not freed.

    MPICH gives numbers again in any order, so all that are free have to be taken. It adds a number
    of its own in the upper bits, and has three for each communicator.
    """
    made = [comm.Dup() for _ in range(100)]
    highest = max(one.py2f() & 0x3FFFFFF for one in made)
    for one in made:
        one.Free()
    return highest


def test_what_was_made_and_closed_leaves_nothing_behind(job):
    """Groups, levels, collectives and layouts, as in a notebook that makes one after the other."""
    world = job.world
    before, threads = highest_handle(world.comm), threading.active_count()
    for number in range(200):
        levels = Levels.of(world)
        over = connect(levels.node, overlap=number % 10 == 0)
        over.start_sum_(torch.ones(2)).wait()
        over.close()
        ring = Halving(world)
        ring.close()
        levels.close()
    for _ in range(5):
        grid = ParallelGrid.build(world, discover(world, job.node), dp=1, tp=2, pp=2)
        applied = apply(gpt(), grid, torch.device("cpu"), overlap=True)
        applied.gradients.tensor.start_sum_(torch.ones(2)).wait()
        applied.close()
        grid.close()
    after = highest_handle(world.comm)
    # With MPICH it may be another of the last communicator's three. The loops would add 15 or more.
    from mpi4py import MPI

    slack = 2 if "MPICH" in MPI.Get_library_version() else 0
    assert abs(after - before) <= slack
    assert threading.active_count() == threads


def adapted(seed=0):
    """A model whose linear layers have random adapters, and are frozen, as is the embedding."""
    model = gpt(seed, tie=True)
    layers = [name for name in linear_layers(model) if "blocks.1." not in name]
    LoraAdapters(rank=3, alpha=6, layers=layers).add_to(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "norm" in name or "blocks.1.mlp" in name)
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cut", [False, True], ids=["", "sequence"])
def test_the_gradients_of_adapters_are_those_of_one_rank(grid, schedule, cut):
    text = torch.randint(12, (8, 8), generator=torch.Generator().manual_seed(3))
    model, reference = adapted(grid.world.rank), adapted()
    applied = put_on(model, grid, schedule, cut=cut and grid.tp > 1)

    def forward(of, number):
        part = text[2 * number :][:2]
        of.seed_samples([17 * number, 17 * number + 1])
        return of(part, part.roll(-1, 1))

    applied.pipeline.train(lambda n, _: forward(model, n), [2] * 4)
    applied.gradients.complete()
    (sum(forward(reference, n) for n in range(4)) / 4).backward()
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        shard = applied.shards[name]
        spec, whole = shard.spec, wanted[shard.name]
        if whole is None:
            assert parameter.grad is None
            continue
        part = whole.narrow(spec.dim, spec.start, spec.stop - spec.start)
        torch.testing.assert_close(parameter.grad, part, rtol=1e-11, atol=1e-15)
    kept = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    norm = applied.gradients.norm(averager_of(kept))
    total = nn.utils.get_total_norm([g for g in wanted.values() if g is not None])
    torch.testing.assert_close(norm, total, rtol=1e-12, atol=0)
