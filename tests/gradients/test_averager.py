"""Both engines against a reference in one process that sees all samples."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hpc_train.collectives import node
from hpc_train.errors import SetupError, UserError
from hpc_train.gradients import average_gradients, divided_state
from hpc_train.gradients.averager import best_engine
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from tests.system.test_same import Model, levels_of

pytestmark = pytest.mark.mpi
SAMPLES, PASSES, STEPS = 24, 2, 4

needs_horovod = pytest.mark.skipif(not runtime.horovod_built(), reason="Horovod is not built")


def trained(group: Group, engine: str, optimizer_class, *, plain_zero_grad=False, bucket_bytes=256):
    """The model after some steps on all samples, cut over the group's ranks and two passes."""
    torch.manual_seed(group.rank)  # all but rank 0's weights are to be replaced
    model = Model().double()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    averager = average_gradients(
        model, optimizer, group, AveragingOptions(engine=engine, bucket_bytes=bucket_bytes)
    )
    data = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(STEPS):
        (optimizer if plain_zero_grad else averager).zero_grad()
        for part in data.chunk(group.size)[group.rank].chunk(PASSES):
            ((model(part[:, :6]) - part[:, 6:]).square().mean() / PASSES).backward()
        averager.average()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        averager.step()
    averager.close()
    return model


def assert_same(model, reference):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13), name


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 20])
def test_engine_mpi_equals_one_process(group, optimizer_class, bucket_bytes):
    reference = trained(Group(), "mpi", optimizer_class)
    model = trained(group, "mpi", optimizer_class, bucket_bytes=bucket_bytes)
    assert_same(model, reference)


@needs_horovod
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_engine_horovod_equals_one_process_and_engine_mpi(job, optimizer_class):
    reference = trained(Group(), "mpi", optimizer_class)
    assert_same(trained(job.world, "horovod", optimizer_class), reference)
    assert_same(trained(job.world, "mpi", optimizer_class), reference)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_the_optimizers_own_zero_grad_will_do(job, engine):
    reference = trained(Group(), "mpi", torch.optim.SGD)
    model = trained(job.world, engine, torch.optim.SGD, plain_zero_grad=True)
    assert_same(model, reference)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_step_averages_if_nobody_did(job, engine):
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(engine=engine))
    start = model.weight.item()
    averager.zero_grad()
    (model.weight.sum() * job.world.rank).backward()
    averager.step()
    assert start - model.weight.item() == pytest.approx((job.world.size - 1) / 2)
    averager.close()


@pytest.mark.long  # torch.compile takes seconds to load
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile loads torch.jit
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"average_every": 2}], ids=str)
def test_a_compiled_step_averages_as_another_one(job, options):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        averager = average_gradients(
            model, optimizer, job.world, AveragingOptions(engine="mpi", **options)
        )
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for number in range(5):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(number * job.world.size + job.world.rank)
            model(torch.randn(4, 3, generator=generator).double()).square().mean().backward()
            step()
        averager.close()
        results.append(model)
    assert_same(*results)


@pytest.mark.parametrize("engine", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_the_plain_optimizer_keeps_the_state(job, engine):
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.AdamW(model.parameters())
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(engine=engine))
    averager.zero_grad()
    model(torch.ones(1, 2).double()).sum().backward()
    averager.step()
    assert all("exp_avg" in optimizer.state[parameter] for parameter in model.parameters())
    averager.close()


def test_a_state_that_rank_0_has_alone_is_everyones(job):
    """Also if parameters are not row-major: fused optimizers go through memory in its order."""

    def made():
        torch.manual_seed(0)
        model = nn.Conv2d(3, 2, 2).double().to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model, optimizer, number):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(number)).double()
        model(x).square().sum().backward()
        optimizer.step()

    (model, optimizer), (expected, its_optimizer) = made(), made()
    step(expected, its_optimizer, 1)
    if not job.world.rank:
        step(model, optimizer, 1)
    averager = average_gradients(model, optimizer, job.world)
    for number in (2, 3):
        step(expected, its_optimizer, number)
        step(model, optimizer, number)
    averager.close()
    assert torch.allclose(model.weight, expected.weight, rtol=1e-12)


def test_ranks_with_different_models_are_told_and_not_left_waiting(job):
    model = nn.Linear(2, 2 + job.world.rank)
    if job.world.size > 1:
        with pytest.raises(UserError, match="the model .* differs from that of rank 0"):
            average_gradients(model, torch.optim.SGD(model.parameters()), job.world)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1, "average_every": 2},
        {"compression": "bf16", "average_every": 2},
        {"zero": 1, "two_level": "off"},
    ],
)
def test_options_that_do_not_go_together_are_refused(job, options):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match="average_every|two_level"):
        average_gradients(model, optimizer, job.world, AveragingOptions(engine="mpi", **options))


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "gloo"},
        {"two_level": True},
        {"reduction": "sum"},
        {"zero": 5},
        {"scope": "world"},
        {"average_every": 0},
        {"average_every": 2.5},
        {"bucket_bytes": -5},
        {"bucket_bytes": "4MB"},
        {"hang_timeout": None},
        {"compression": "zip"},
    ],
    ids=str,
)
def test_a_value_that_no_option_takes_is_refused_by_its_name(job, options):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = AveragingOptions(**options if job.world.rank == job.world.size - 1 else {})
    with pytest.raises(UserError, match=next(iter(options))) as caught:
        average_gradients(model, optimizer, job.world, wrong)
    assert caught.value.remedy


def test_items_that_are_no_number_are_refused_on_all_ranks(job):
    model = Model()
    averager = average_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), job.world)
    with pytest.raises(UserError, match="weight was called with 2.5: give a whole number"):
        averager.weight(2.5 if job.world.rank == job.world.size - 1 else 2)
    assert averager.weight(torch.tensor(2)) == 1
    averager.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("needs", [{}, {"zero": 1}, {"compression": "bf16"}], ids=str)
def test_too_little_memory_on_one_node_is_known_on_all(job, monkeypatch, caplog, needs):
    def full(nbytes):
        raise SetupError("/dev/shm is full", "enlarge it")

    if job.world.rank > 1:
        monkeypatch.setattr(node, "_check_room", full)
    levels = levels_of(job.world, (0, 0, 1, 1))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = AveragingOptions(engine="mpi", bucket_bytes=256, two_level="on", **needs)
    set_up = partial(average_gradients, model, optimizer, levels, options)
    if needs:
        with pytest.raises(SetupError, match="shared memory|/dev/shm is full"):
            set_up()
    else:
        set_up().close()
        assert job.world.rank or "averaged by MPI's own sums" in caplog.text
    levels.close()


@pytest.mark.parametrize(
    ("nccl", "reads", "expected"),
    [(True, False, "horovod"), (True, True, "mpi"), (False, False, "mpi")],
)
@needs_horovod
def test_engine_auto_keeps_gradients_on_gpus(monkeypatch, nccl, reads, expected):
    import horovod.torch as hvd

    monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
    monkeypatch.setattr("hpc_train.collectives.mpi.reads_gpu_memory", lambda: reads)
    assert best_engine(torch.device("cuda")) == expected
    assert best_engine(torch.device("cpu")) == "mpi"


def test_gradients_are_views_of_the_buckets_after_averaging(job):
    model = nn.Linear(2, 2).double()
    averager = average_gradients(
        model, torch.optim.SGD(model.parameters()), job.world, AveragingOptions(engine="mpi")
    )
    averager.zero_grad()
    model(torch.ones(1, 2).double()).sum().backward()
    averager.average()
    if job.world.size > 1:
        flats = {flat.untyped_storage().data_ptr() for flat in averager.sums.flats}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == flats
    averager.close()


def test_parameters_of_a_job_that_has_ended_are_taken_over(job):
    group = job.world.duplicate()  # as a job of its own, which `hpc_train.run` ends
    model = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters())
    average_gradients(model, optimizer, group, AveragingOptions(engine="mpi"))
    group.close()
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(engine="mpi"))
    model(torch.full((1, 2), float(job.world.rank)).double()).sum().backward()
    averager.average()
    mean = (job.world.size - 1) / 2
    assert model.weight.grad.tolist() == [[mean, mean]] * 2
    averager.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_local_steps_of_parameters_that_some_ranks_do_not_use(group, kind, dtype):
    """What a rank lacks counts as zeros, and numbers of steps are the largest."""
    used, once, scalar, unused = (
        nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((2, 3), (4,), (), (5,))
    )
    model = nn.ParameterList([used, once, scalar, unused])
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    averager = average_gradients(
        model, optimizer, group, AveragingOptions(engine="mpi", average_every=4)
    )
    for step in range(2):
        averager.zero_grad()
        loss = used.abs().sum()
        if group.rank == 1:  # other ranks have no state of it
            loss = loss + 2 * once.abs().sum()
        if step or group.rank == 0:  # other ranks have taken fewer steps with it
            loss = loss + scalar.abs()
        loss.backward()
        averager.step()
    averager.settle()
    slot = "exp_avg" if kind == "adamw" else "momentum_buffer"
    state = [{**optimizer.state.get(p, {})} for p in (used, once, scalar, unused)]
    averager.close()
    assert not state[3]
    gradient, after_two = 2 / group.size, 0.19 if kind == "adamw" else 1.9
    assert torch.allclose(state[1][slot], torch.full_like(once, after_two * gradient))
    if kind == "adamw":
        assert [float(some["step"]) for some in state[:3]] == [2, 2, 2]
        square = (1 - 0.999**2) * 4 / group.size
        assert torch.allclose(state[1]["exp_avg_sq"], torch.full_like(once, square))
    ends = repr((scalar.detach(), [sorted(some.items()) for some in state]))
    assert len({*group.gathered(ends)}) == 1


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_scaling_averages_first(job, zero):
    model = nn.Linear(3, 2, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(zero=zero))
    before = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 3).double()).sum() * (job.world.rank + 1)).backward()
        averager.scale_(0.5)
        optimizer.step()
    averager.close()
    mean = (job.world.size + 1) / 2
    assert torch.allclose(model.weight, before - mean)


@pytest.mark.ranks(1, 3)
def test_gradients_written_without_a_backward_pass_are_averaged(group):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = average_gradients(model, optimizer, group, AveragingOptions(engine="mpi"))
    model(torch.full((1, 3), group.rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.step()  # nothing was written: the same gradient once more
    mean = (group.size + 1) / 2
    twice = model.weight.detach().clone()
    model.weight.grad.data.copy_(torch.full((1, 3), 10.0 * (group.rank + 1)))
    optimizer.step()
    third = torch.full((1, 3), 0.1)
    model.weight.grad.copy_(third)  # on all ranks the same, so that no sum rounds it
    before = model.weight.detach().clone()
    optimizer.step()
    averager.close()
    assert torch.allclose(twice, torch.full((1, 3), -2 * mean))
    assert torch.allclose(before, twice - 10 * mean)
    assert torch.equal(model.weight, before - third)


def test_a_rank_alone_clips_sparse_gradients(job):
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    averager = average_gradients(model, optimizer, Group(), AveragingOptions(engine="mpi"))
    model(torch.tensor([1, 1, 2])).sum().backward()  # row 1 has 2, 2, row 2 has 1, 1
    assert averager.norm().item() == pytest.approx(10**0.5)
    averager.scale_(0.5)
    assert averager.norm().item() == pytest.approx(2.5**0.5)
    averager.step()
    averager.close()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_embeddings_that_look_at_the_ranks_own_samples_are_refused(job, kind, option):
    model = nn.ModuleDict({"e": kind(4, 2, **{option: 1.0 if option == "max_norm" else True})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=f"e is an {kind.__name__} with {option}"):
        average_gradients(model, optimizer, job.world)
    for group, options in ((Group(), {}), (job.world, {"average_every": 2})):
        average_gradients(model, optimizer, group, AveragingOptions(**options)).close()


def test_a_parameter_made_by_expand_is_refused_before_training(job):
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.ones(1, 3).expand(2, 3))
    with pytest.raises(UserError, match=r"weight was made by expand\(\)"):
        average_gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), job.world)


def stepped(group, **options):
    """A model after a step on other samples for each rank, with its optimizer and averager."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = average_gradients(model, optimizer, group, AveragingOptions(**options))
    another_step(model, optimizer, group)
    return model, optimizer, averager


def another_step(model, optimizer, group):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(group.rank)
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def differing(model, group):
    """Whether the ranks' parameters differ."""
    return len({*group.gathered(repr([p.tolist() for p in model.parameters()]))}) > 1


CLOSED = {
    "average": lambda averager: averager.average(),
    "norm": lambda averager: averager.norm(),
    "scale_": lambda averager: averager.scale_(0.5),
    "step": lambda averager: averager.step(),
    "weight": lambda averager: averager.weight(2),
    "parts": lambda averager: averager.parts(),
}


@pytest.mark.parametrize("options", [{}, {"zero": 2}, {"average_every": 2}], ids=str)
def test_a_closed_averager_refuses_what_would_not_be_averaged(job, options):
    _, _, averager = stepped(job.world, **options)
    averager.close()
    for call in CLOSED.values():
        with pytest.raises(UserError, match="the averager was closed"):
            call(averager)
    averager.close()


def test_local_steps_end_with_the_same_parameters_on_all_ranks(job):
    model, _, averager = stepped(job.world, average_every=3)
    assert differing(model, job.world) == (job.world.size > 1)
    averager.close()
    assert not differing(model, job.world)


@pytest.mark.parametrize("zeros", [(1, 1), (1, 0), (2, 1)], ids=str)
def test_a_second_averager_of_the_same_optimizer_goes_on(job, zeros):
    first, then = zeros
    model, optimizer, old = stepped(job.world, zero=first)
    averager = average_gradients(model, optimizer, job.world, AveragingOptions(zero=then))
    another_step(model, optimizer, job.world)
    assert not differing(model, job.world)
    with pytest.raises(UserError, match="closed"):
        old.step()
    averager.close()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def phases(group, levels, zeros, optimizer_class=adamw, **options):
    """A model and its optimizer after two steps under each of several averagers in turn."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = optimizer_class(model)
    for number, zero in enumerate(zeros):
        more = {"engine": "mpi", "bucket_bytes": 100 * (number + 1), **options}
        averager = average_gradients(model, optimizer, levels, AveragingOptions(zero=zero, **more))
        for step in range(2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * number + 10 * step + group.rank)
            model(torch.randn(4, 6, generator=generator).double()).square().mean().backward()
            optimizer.step()
        averager.close()
    return model, optimizer


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("scope", ["node", "all"])
@pytest.mark.parametrize("zeros", [(1, 1), (2, 0), (0, 1)], ids=str)
def test_an_optimizer_keeps_its_state_from_one_averager_with_zero_to_the_next(job, zeros, scope):
    levels = levels_of(job.world, (0, 0, 1, 1))
    expected, its_optimizer = phases(job.world, levels, (0, 0))
    model, optimizer = phases(job.world, levels, zeros, scope=scope)
    levels.close()
    assert_same(model, expected)
    for parameter, its in zip(model.parameters(), expected.parameters(), strict=True):
        state, its_state = optimizer.state[parameter], its_optimizer.state[its]
        assert state.keys() == its_state.keys()
        assert all(torch.allclose(state[name], its_state[name]) for name in state)
    assert len(optimizer.state) == len(its_optimizer.state)


def test_a_state_for_which_a_node_has_no_memory_is_dropped_with_a_warning(job, monkeypatch, caplog):
    monkeypatch.setattr(divided_state, "free_bytes", lambda: 0)
    _, optimizer = phases(job.world, job.world, (1,))
    if job.world.size > 1:
        assert not optimizer.state
        assert job.world.rank or "the optimizer's state (such as" in caplog.text


def test_a_state_of_other_shapes_is_not_divided(job):
    def odd(model):
        optimizer = adamw(model)
        optimizer.state[next(model.parameters())]["factor"] = torch.zeros(2)
        return optimizer

    if job.world.size > 1:
        with pytest.raises(UserError, match="memory.zero cannot divide factor"):
            phases(job.world, job.world, (1,), odd)


def test_a_part_of_an_optimizers_state_is_told(job, caplog):
    _, optimizer, averager = stepped(job.world, zero=1)
    optimizer.state_dict()
    optimizer.state_dict()
    averager.close()
    optimizer.state_dict()
    assert caplog.text.count("has this rank's part of the state only") == (job.world.size > 1)
