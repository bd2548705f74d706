"""Averagers with memory.zero: how they begin and end, and two of them for one model."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.collectives import node
from hpc_train.errors import SetupError, UserError
from hpc_train.gradients import average_gradients, staged_parameters
from hpc_train.gradients.options import AveragingOptions
from hpc_train.models.gate import Gate
from hpc_train.mpi.group import Group
from tests.gradients.late_lane import LateLane
from tests.system.test_habits import shared_bytes
from tests.system.test_same import Model, levels_of

pytestmark = pytest.mark.mpi
NODES = (0, 0, 1, 1)
KINDS = [{"two_level": "on"}, {"zero": 1}, {"zero": 2}, {"zero": 1, "scope": "all"}]


def set_up(group, model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    options = AveragingOptions(engine="mpi", bucket_bytes=300, **options)
    return average_gradients(model, optimizer, group, options)


def step(model, rank, *optimizers):
    """The gradients of a step of these optimizers, on samples of this rank."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(4, 6, generator=generator).double()).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", KINDS[1:], ids=str)
def test_tensors_that_the_program_still_has_are_readable_after_close(job, options):
    model = Model().double()
    averager = set_up(job.world, model, **options)
    state = model.state_dict()
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for _ in range(2):
        step(model, job.world.rank, averager.optimizer)
    averager.close()
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())
    assert all((arrays[name] == p.detach().numpy()).all() for name, p in model.named_parameters())


@pytest.mark.mpi(min_size=2)
def test_views_of_gradients_are_readable_after_close(job):
    model = Model().double()
    averager = set_up(job.world, model, two_level="on")
    step(model, job.world.rank, averager.optimizer)
    views = [p.grad[...] for p in model.parameters() if p.grad is not None]
    averager.close()
    assert all(view.isfinite().all() for view in views)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), NODES], ids=str)
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_shared_memory_is_freed_at_once_when_an_averager_is_closed(job, options, nodes):
    gc.collect()
    gc.disable()  # nothing may wait for a collection
    before = shared_bytes()
    levels = levels_of(job.world, nodes)
    model = Model().double()
    averager = set_up(levels, model, **options)
    for _ in range(3):
        step(model, job.world.rank, averager.optimizer)
    averager.close()
    levels.close()
    after = shared_bytes()
    gc.enable()
    assert after <= before


def gates_of(model) -> list[Gate]:
    """Gates for all modules of a sequence, as a Loop makes them of a model's stages."""
    gates: list[Gate] = []
    for number, module in enumerate(model):
        gates.append(Gate(module, f"{number}", module.forward, gates[-1] if gates else None))
        module.forward = gates[-1]
    return gates


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_too_little_memory_for_the_parameters_of_one_node_is_known_on_all(job, monkeypatch, zero):
    calls = []

    def full(nbytes):
        calls.append(nbytes)
        if len(calls) == 2 and job.world.rank > 1:  # the first is that of the sums
            raise SetupError("/dev/shm is full", "enlarge it")

    monkeypatch.setattr(node, "_check_room", full)
    levels = levels_of(job.world, NODES)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    more = {"gates": gates_of(model)} if zero == 3 else {}
    with pytest.raises(SetupError, match="/dev/shm is full"):
        set_up(levels, model, zero=zero, scope="all", hang_timeout=20, **more)
    levels.close()
    assert len(calls) == 2


class Two(nn.Module):
    """Two parts for two optimizers, and a parameter that no optimizer has."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 5)
        if transposed:  # such a parameter is not divided
            self.two.weight = nn.Parameter(torch.randn(5, 5).t())
        self.rest = nn.Parameter(torch.ones(5, 5))

    def forward(self, inputs):
        return self.two(self.one(inputs)) @ self.rest


def two_optimizers(group, transposed, *zeros, **more):
    """A model after steps of two optimizers with an averager each, and the last mean of `rest`."""
    torch.manual_seed(0)
    model = Two(transposed=transposed).double()
    parts = model.one, model.two
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]
    make = partial(set_up, group, model)
    averagers = [make(o, zero=z, **more) for o, z in zip(optimizers, zeros, strict=True)]
    for number in range(6):
        model.rest.grad = None
        step(model, 10 * number + group.whole.rank, *optimizers)
    rest = model.rest.grad
    assert rest is not None
    mean = rest.clone()
    for averager in averagers:
        averager.close()
    return [*(p.detach() for p in model.parameters()), mean]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zeros", [(1, 0), (1, 1), (2, 1), (0, 2)], ids=str)
def test_two_optimizers_of_one_model_have_an_averager_each(job, zeros, transposed):
    levels = levels_of(job.world, NODES)
    expected = two_optimizers(levels, transposed, 0, 0)
    found = two_optimizers(levels, transposed, *zeros)
    levels.close()
    pairs = zip(found, expected, strict=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)


def norm(group, **options):
    """The norm of the gradients of one backward pass, the same one on every rank."""
    torch.manual_seed(0)
    model = Two(transposed=True).double()
    averager = set_up(group, model, **options)
    step(model, 1)
    found = float(averager.norm())
    averager.close()
    return found


@pytest.mark.mpi(min_size=2)
def test_a_parameter_that_is_not_divided_counts_once_in_the_norm(job):
    assert norm(job.world, zero=1) == pytest.approx(norm(Group()), rel=1e-12)


@pytest.mark.mpi(min_size=4)
def test_no_second_averager_is_made_while_nodes_have_pieces_of_parameters(job):
    levels = levels_of(job.world, NODES)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    one, two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    first = set_up(levels, model, one, zero=3, scope="all", gates=gates_of(model))
    with pytest.raises(UserError, match="another loop has divided over nodes"):
        set_up(levels, model, two)
    first.close()
    levels.close()


class Lives(TorchDispatchMode):
    """Counts which of some tensors' memory is there whenever an operation begins."""

    def __init__(self, operation, tensors):
        super().__init__()
        self.operation = operation
        self.memory = {t.data_ptr(): StorageWeakRef(t.untyped_storage()) for t in tensors}
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == self.operation:
            self.seen.append(sum(not one.expired() for one in self.memory.values()))
        return func(*args, **(kwargs or {}))


def test_parameters_on_a_device_lie_there_once_also_at_the_beginning_and_at_the_end(
    job, monkeypatch
):
    monkeypatch.setattr(staged_parameters, "CopyLane", LateLane)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))).double()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with Lives("aten::empty_like", model.parameters()) as lives:
        averager = set_up(job.world, model, staged=True, zero=1)
    near = averager.parameters._near
    assert lives.seen[-10:] == [*range(9, -1, -1)]  # whenever one of ten buckets gets memory
    with Lives("aten::clone", near) as lives:
        del near
        averager.close()
    assert lives.seen[-10:] == [*range(10, 0, -1)]
    for parameter, values in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, values) or job.world.rank


def test_parameters_of_a_checkpoint_are_not_overwritten_by_copies_under_way(job, monkeypatch):
    monkeypatch.setattr(staged_parameters, "CopyLane", LateLane)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    averager = set_up(job.world, model, staged=True, zero=1, only_modules_read=True)
    step(model, job.world.rank, averager.optimizer)
    model[0](torch.ones(1, 6).double())  # a copy to the second layer has begun, too
    averager.forget()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    averager.settle()
    averager.parameters.lane.finish()
    assert all((parameter == 3).all() for parameter in model.parameters())
    averager.close()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.mpi(min_size=4)
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.slow("torch.compile loads")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_compiled_blocks_have_one_graph_each(job, monkeypatch, zero):
    """Hooks for their parameters, which come while the forward pass goes on, lie outside of it."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(staged_parameters, "CopyLane", LateLane)
    levels = levels_of(job.world, NODES)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3))).double()
        for block in model if compiled else ():
            block.forward = torch.compile(block.forward, backend="eager")
        more = {"gates": gates_of(model)} if zero == 3 else {"staged": True}
        averager = set_up(levels, model, zero=zero, scope="all", only_modules_read=True, **more)
        counters.clear()
        for _ in range(3):
            step(model, job.world.rank, averager.optimizer)
        averager.settle()
        found.append([p.detach().clone() for p in model.parameters()] if zero < 3 else [])
        averager.close()
    levels.close()
    assert all(map(torch.allclose, *found))
    assert counters["stats"]["unique_graphs"] <= 2  # the input of the first one has no gradient
    assert not counters["graph_break"]


@pytest.mark.mpi(min_size=2)
def test_the_state_of_a_parameter_without_elements_is_kept(job):
    model = nn.ParameterList([torch.ones(3, 4), torch.ones(0, 4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for zero in (0, 2):
        averager = set_up(job.world, model, optimizer, zero=zero)
        optimizer.zero_grad()
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
        averager.close()
    assert [float(optimizer.state[p]["step"]) for p in model] == [2.0, 2.0]
