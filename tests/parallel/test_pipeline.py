"""Pipelines of a user's own module on one to four ranks, against the module on one."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import UserError
from hpc_train.models.dropout import SampleDropout
from hpc_train.mpi.group import Group
from hpc_train.parallel.linear import Deferred
from hpc_train.parallel.pipeline import Pipeline
from hpc_train.parallel.recompute import recompute
from hpc_train.parallel.runs import runs_of, stage_names
from hpc_train.parallel.schedule import Name, peak_live_formula
from hpc_train.parallel.stages import Stages
from hpc_train.parallel.tensor import parallelize
from hpc_train.parallel.transport import Message, Transport

pytestmark = pytest.mark.mpi
schedules = pytest.mark.parametrize("name", get_args(Name))
WIDTHS = [3, 5, 4, 6, 7, 2, 8, 3, 4]  # as many layers as four ranks have virtual stages, all unlike


class User(nn.Module):
    stages = ("layers.*",)

    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(0)
        made = layers or [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(WIDTHS)]
        self.layers = nn.ModuleList(made)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def piped(model, group, name):
    """The pipeline of a model, which becomes this rank's part of it, and its virtual stages."""
    virtual_stages = 2 if name == "interleaved" else 1
    if group.size == 1:
        kind = "1f1b" if virtual_stages == 1 else name
        alone = Pipeline(Group(), torch.device("cpu"), kind, dropouts=dropouts_of(model))
        return alone, 1
    names = stage_names(model)
    runs = runs_of(model, names, group.size, virtual_stages)
    deferred = Deferred() if name == "zero_bubble" else None
    parallelize(model, {}, AloneCollectives(Group()), deferred=deferred)
    stages = Stages(model, names, runs[group.rank])
    device = torch.device("cpu")
    return Pipeline(
        group, device, name, virtual_stages, stages, deferred, dropouts_of(model)
    ), virtual_stages


def dropouts_of(model):
    return [module for module in model.modules() if isinstance(module, SampleDropout)]


def micro_batches(sizes, shape=(3,)):
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, *shape, generator=generator).double() for size in sizes]


def trained(model, pipeline, sizes, shape=(3,)):
    """The losses of the micro-batches, and the gradients of their mean. Collective."""
    batches = micro_batches(sizes, shape)
    model.zero_grad()
    losses = pipeline.train(lambda number, virtual_stage: model(batches[number]), sizes)
    return losses, {name: p.grad for name, p in model.named_parameters()}


def evaluated(model, pipeline, sizes, shape=(3,)):
    batches = micro_batches(sizes, shape)
    with torch.no_grad():
        return pipeline.evaluate(lambda number, virtual_stage: model(batches[number]), sizes)


def assert_same(found, reference, pipeline, sizes, shape=(3,)):
    """The results of `trained` are those of the reference on one rank."""
    losses, gradients = found
    expected = [reference(batch) for batch in micro_batches(sizes, shape)]
    reference.zero_grad()
    (sum(expected) / len(sizes)).backward()
    assert_losses(losses, expected, pipeline)
    for name, gradient in gradients.items():
        wanted = reference.get_parameter(name).grad
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)


def assert_losses(losses, expected, pipeline):
    assert len(losses) == (len(expected) if pipeline.is_last else 0)
    for loss, wanted in zip(losses, expected, strict=False):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-13, atol=0)


@pytest.mark.ranks(1, 2, 3, 4)
@schedules
def test_losses_and_gradients_are_those_of_one_rank_within_the_promised_memory(group, name):
    model, reference, found = User(), User(), []
    pipeline, virtual_stages = piped(model, group, name)
    for count in range(1, 7):
        sizes = [2] * (count - 1) + [1 + count % 2]  # the last one may be smaller
        pipeline.peak_live = 0
        found.append((sizes, trained(model, pipeline, sizes), pipeline.peak_live))
    for sizes, results, peak in found:
        assert_same(results, reference, pipeline, sizes)
        promised = peak_live_formula(pipeline.name, group.size, len(sizes), virtual_stages)
        assert 1 <= peak <= promised[group.rank]
    held = {n for n, _ in model.named_parameters()}
    assert group.size == 1 or 0 < len(held) < len(list(reference.parameters()))


@pytest.mark.ranks(1, 2, 3, 4)
@schedules
def test_validation_between_steps_takes_an_uneven_last_micro_batch_and_other_lengths(group, name):
    model, reference = User(), User()
    pipeline, _ = piped(model, group, name)
    validated = []
    for sizes, shape in (([2, 2, 2, 2, 1], (3,)), ([2], (4, 3)), ([3, 1, 2], (5, 3))):
        validated.append((sizes, shape, evaluated(model, pipeline, sizes, shape)))
        results = trained(model, pipeline, [2, 2, 2])
    for sizes, shape, losses in validated:
        expected = [reference(batch) for batch in micro_batches(sizes, shape)]
        assert_losses(losses, expected, pipeline)
    assert_same(results, reference, pipeline, [2, 2, 2])


class Masked(User):
    """Its loss is a mean over the samples that count."""

    def forward(self, x, counts):
        for layer in self.layers:
            x = layer(x)
        return (x.square().mean(-1) * counts).sum() / counts.sum()


@pytest.mark.ranks(1, 2)
@schedules
def test_a_micro_batch_in_which_nothing_counts_adds_zeros(group, name):
    """Its loss and the gradients of that are NaN. The backward pass goes through all layers."""
    model, reference, passes = Masked(), Masked(), []
    pipeline, _ = piped(model, group, name)

    def note(layer, args, y):
        y.register_hook(lambda dy: passes.append(layer))

    for layer in model.layers:
        layer.register_forward_hook(note)
    batches, counts = micro_batches([2] * 4), torch.ones(4, 2).double()
    counts[1:3] = 0
    weights = [0.75, 0, 0, 0.25]
    losses = pipeline.train(lambda n, _: model(batches[n], counts[n]), [2] * 4, weights)
    expected = [reference(batch, some) for batch, some in zip(batches, counts, strict=True)]
    (expected[0] * 0.75 + expected[3] * 0.25).backward()
    assert [bool(loss.isnan()) for loss in losses] in ([], [False, True, True, False])
    assert len(passes) == 4 * len(WIDTHS[1:]) // group.size
    for number, parameter in model.named_parameters():
        wanted = reference.get_parameter(number).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.ranks(2, 4)
@schedules
def test_messages_may_go_through_host_memory_and_be_large(group, name, monkeypatch):
    """As those of GPUs do, unless MPI can read the GPUs' memory."""
    monkeypatch.setattr("hpc_train.collectives.mpi.through_host", lambda device: True)
    monkeypatch.setattr("hpc_train.collectives.mpi.LARGEST_MESSAGE", 50)
    model, reference = User(), User()
    pipeline, _ = piped(model, group, name)
    trained(model, pipeline, [2, 2, 2, 1])
    results = trained(model, pipeline, [2] * 5)
    assert_same(results, reference, pipeline, [2] * 5)


@pytest.mark.ranks(1, 2, 3, 4)
@schedules
@pytest.mark.parametrize("last", [0, 2, 6])
def test_stages_may_be_frozen(group, name, last):
    model, reference = User(), User()
    for each in (model, reference):
        each.layers[: last + 1].requires_grad_(False)
    pipeline, _ = piped(model, group, name)
    results = trained(model, pipeline, [2] * 5)
    assert_same(results, reference, pipeline, [2] * 5)


class Moved(nn.Module):
    """Its output, and so the gradient of its parameter, is but another view."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(2, 2, 3))

    def forward(self, x):
        return (x + self.own).flatten(1)


class Seen(nn.Module):
    """Its output is a view of its input, or the input itself."""

    def forward(self, x):
        return x.flatten(1)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("kind", [Moved, Seen])
def test_outputs_may_share_memory_with_inputs_and_gradients(group, name, kind):
    torch.manual_seed(0)
    between = [kind(), *(Seen() for _ in range(group.size - 3))]
    model = User(nn.Linear(3, 3), *between, nn.Linear(6, 2))
    reference = deepcopy(model)
    pipeline, _ = piped(model, group, name)
    validated = evaluated(model, pipeline, [2] * 6, (2, 3))
    results = trained(model, pipeline, [2] * 6, (2, 3))
    assert_same(results, reference, pipeline, [2] * 6, (2, 3))
    assert_losses(validated, [reference(b) for b in micro_batches([2] * 6, (2, 3))], pipeline)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x.tanh())


class Signal(nn.Module):
    def forward(self, x):
        return torch.fft.ifft(x * x.abs()).real


class Descending(nn.Module):
    """Its forward pass takes a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(z).tanh().square().sum(), z)
        return self.layer(x) - 0.1 * slope


@pytest.mark.ranks(2, 4)
@schedules
@pytest.mark.parametrize("again", ["none", "full"])
def test_stages_may_give_complex_tensors_and_take_gradients(group, name, again):
    torch.manual_seed(0)
    model = User(*(kind() for _ in range(2) for kind in (Descending, Spectrum, Signal, Descending)))
    reference = deepcopy(model)
    recompute(model, again)
    pipeline, _ = piped(model, group, name)
    assert_same(trained(model, pipeline, [2] * 5), reference, pipeline, [2] * 5)


class Dropping(nn.Module):
    """A layer with dropout, which may compute its activations again in the backward pass."""

    def __init__(self, place, a, b):
        super().__init__()
        self.linear = nn.Linear(a, b)
        self.dropout = SampleDropout(0.4, place)
        self.again = None

    def forward(self, x):
        return self.again(self.inner, x) if self.again else self.inner(x)

    def inner(self, x):
        return self.dropout(self.linear(x)).tanh()


class Recomputing(User):
    """Computes activations again: of parts of its stages, of whole stages, or of more than one."""

    def __init__(self, how="never", *, reentrant=False):
        torch.manual_seed(1)
        super().__init__(*(Dropping(i, a, b) for i, (a, b) in enumerate(pairwise(WIDTHS))))
        self.how = how
        self.reentrant = reentrant
        for layer in self.layers if how == "inside" else []:
            layer.again = self.again

    def again(self, compute, x):
        if not torch.is_grad_enabled():
            return compute(x)
        return checkpoint(compute, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x.requires_grad_()  # else checkpoint, if reentrant, drops the first layer's gradients
        if self.how == "across":
            return self.again(self.inner, x)
        return self.inner(x)

    def inner(self, x):
        for layer in self.layers:
            # What stands between two stages belongs to the one before.
            x = self.again(layer, 2 * x) if self.how == "stages" else layer(2 * x)
        return x.square().mean()


def dropping(model, sizes, *, training):
    """The loss of a micro-batch whose samples have seeds of their own."""
    batches = micro_batches(sizes)

    def loss(number, virtual_stage=0):
        first = sum(sizes[:number])
        for module in model.modules():
            if isinstance(module, SampleDropout):
                module.seeds = range(first, first + sizes[number])
        return model(batches[number])

    model.train(training)
    return loss


@pytest.mark.ranks(1, 2)
@schedules
@pytest.mark.parametrize(
    ("how", "reentrant"),
    [("inside", False), ("inside", True), ("stages", False), ("stages", True), ("across", False)],
)
def test_masks_are_the_same_when_activations_are_computed_again(group, name, how, reentrant):
    """Also if other micro-batches have come in between, as in all schedules."""
    sizes = [2, 2, 2, 2, 1]
    model, reference = Recomputing(how, reentrant=reentrant), Recomputing()
    pipeline, _ = piped(model, group, name)
    found = []
    for _ in range(2):
        model.zero_grad()
        found.append(pipeline.train(dropping(model, sizes, training=True), sizes))
    with torch.no_grad():
        validated = pipeline.evaluate(dropping(model, sizes, training=False), sizes)
    loss = dropping(reference, sizes, training=True)
    expected = [loss(number) for number in range(len(sizes))]
    (sum(expected) / len(sizes)).backward()
    for losses in found:
        assert_losses(losses, expected, pipeline)
    for parameter, gradient in model.named_parameters():
        wanted = reference.get_parameter(parameter).grad
        torch.testing.assert_close(gradient.grad, wanted, rtol=1e-12, atol=1e-15)
    plain = dropping(reference, sizes, training=False)
    assert_losses(validated, [plain(number) for number in range(len(sizes))], pipeline)


def test_micro_batches_of_one_size_have_tensors_of_one_shape(job):
    if job.world.size < 2:
        pytest.skip("needs 2 ranks")
    pair = job.world.split(0 if job.world.rank < 2 else 1, job.world.rank)
    error = None
    if job.world.rank < 2:
        model = User(nn.Linear(3, 3), nn.Linear(3, 3))
        pipeline, _ = piped(model, pair, "gpipe")
    if job.world.rank == 0:
        try:
            pipeline.train(lambda number, _: model(torch.ones(2, 4 + number, 3).double()), [2, 2])
        except UserError as raised:
            error = raised
    elif job.world.rank == 1:  # takes the first activation, as a pipeline would
        shape, dtype = pair.comm.recv(source=0)
        pair.comm.Recv(torch.empty(shape, dtype=dtype).numpy(), source=0)
    pair.close()
    assert job.world.rank > 0 or str(error) == (
        "the activation of micro-batch 2 has shape [2, 5, 3], earlier ones had [2, 4, 3]: "
        "pad all samples to one length"
    )


@pytest.mark.ranks(2)
def test_mpi_receives_into_memory_with_which_the_device_has_done(group, monkeypatch):
    waited = []

    class Comm:
        def __getattr__(self, name):
            return getattr(group.comm, name)

        def Irecv(self, buffer, **how):  # noqa: N802  # mpi4py's name
            assert waited.pop() == buffer[0].address
            return group.comm.Irecv(buffer, **how)

    def work_of(tensor):
        return lambda: waited.append(tensor.data_ptr())

    monkeypatch.setattr("hpc_train.collectives.mpi.work_of", work_of)
    transport = Transport(group, torch.device("cpu"))
    transport.comm = Comm()
    messages = [Message(1 - group.rank, tag, "numbers", "a number") for tag in range(8)]
    if group.rank == 1:
        transport.expect(messages)
    for number, message in enumerate(messages):
        if group.rank == 0:
            transport.send(message, torch.full((3,), float(number)))
        else:
            got = transport.receive()
            assert (got == number).all()
            transport.release(got)
    transport.flush()
