"""memory.zero 3: parameters that are divided over nodes, and gathered stage by stage."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import hpc_train
from hpc_train.checkpoint.catalogue import newest
from hpc_train.errors import ConfigError, UserError
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.streamed import StreamedParameters
from hpc_train.models import GPT
from hpc_train.models.gate import Gate, attend
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from hpc_train.mpi.runtime import Runtime
from hpc_train.training import keeping
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.cases import cases
from tests.training.test_trainer import STEPS, check_equal, config, records, text

ZERO = ["--memory.zero", "3"]
CUT = ["--data.micro_batch", "2", "--memory.recompute", "full"]
NODES = {"two": (0, 0, 1, 1), "four": (0, 1, 2, 3), "uneven": (0, 0, 0, 1)}


def make(settings, place, *, private=True, frozen=(), **sizes) -> Trainer:
    torch.manual_seed(place.world.rank)
    sizes = {"vocab": 13, "sequence": 8, "layers": 1, "hidden": 8, "heads": 2} | sizes
    gpt = GPT(**sizes, dropout=0.2)
    for name in frozen:
        gpt.get_submodule(name).requires_grad_(False)
    task = TrainingTask(
        gpt,
        text(60, 1),
        lambda gpt, batch: gpt(*batch),
        validation=text(11, 2),
        private_parameters=private,
    )
    return Trainer(settings, task, place)


@contextmanager
def on_nodes(job, nodes):
    """The job as if its ranks were on these nodes."""
    node = job.world.split(nodes[job.world.rank], job.world.rank)
    yield Runtime(job.world, node)
    node.close()


def train(job, nodes, directory, *options):
    """Train as if the job's ranks were on these nodes."""
    with on_nodes(job, nodes) as place:
        trainer = make(config(directory, *options), place)
        trainer.train()
        trainer.close()


@pytest.fixture
def spoilt(monkeypatch):
    """What is given back is spoilt at once, also where it is smaller than a page."""
    monkeypatch.setattr(
        StreamedParameters,
        "_give_back",
        lambda self, tensor: tensor.fill_(torch.nan) if tensor.is_floating_point() else None,
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("nodes", "more"),
    cases(
        {
            f"{name}{cut}": (nodes, more)
            for cut, more in (("", []), ("-cut", CUT))
            for name, nodes in NODES.items()
        },
        later=("two", "four", "uneven-cut"),
    ),
)
def test_losses_are_those_of_one_rank(job, together, reference, spoilt, nodes, more):
    train(job, nodes, together / "run", *ZERO, *more)
    if job.world.rank == 0:
        check_equal(together / "run", reference)
    job.world.barrier()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "order", [("3", "0"), pytest.param(("0", "3"), marks=pytest.mark.long), ("3", "3")]
)
def test_a_run_goes_on_with_another_stage(job, together, reference, spoilt, order):
    for zero, steps in zip(order, (3, STEPS), strict=True):
        options = ["--memory.zero", zero, "--run.steps", str(steps)]
        train(job, NODES["two"], together / "run", *options)
    if job.world.rank == 0:
        check_equal(together / "run", reference)
    job.world.barrier()


FINE_TUNED = {"lora": ["--finetune.lora", "2"], "head": ["--finetune.head", "true"]}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("nodes", "order", "chosen"),
    [
        pytest.param("two", ("3", "0"), FINE_TUNED["lora"], id="lora"),
        pytest.param("four", ("0", "3"), FINE_TUNED["head"], id="head"),
    ],
)
def test_fine_tuning_divides_what_is_not_trained(
    job, together, reference, spoilt, nodes, order, chosen
):
    given = [*chosen, "--checkpoint.weights", str(reference), "--data.micro_batch", "2"]
    for zero, steps in zip(order, (3, STEPS), strict=True):
        options = ["--memory.zero", zero, "--run.steps", str(steps)]
        train(job, NODES[nodes], together / "run", *given, *options)
    if job.world.rank == 0:
        make(config(together / "one", *given), Runtime(Group(), Group())).train()
        check_equal(together / "run", together / "one")
        first, last = load_file(newest(reference)), load_file(newest(together / "run"))
        names = [n for n in first if n.startswith("model.")]
        frozen = [n for n in names if f"optim.{n[6:]}.exp_avg" not in last]
        assert frozen
        assert all(torch.equal(first[name], last[name]) for name in frozen)
    job.world.barrier()


@pytest.mark.mpi
def test_what_is_trained_cannot_change_later(job, together, reference):
    given = [*ZERO, *FINE_TUNED["head"], "--checkpoint.weights", str(reference)]
    with on_nodes(job, NODES["two"]) as place:
        trainer = make(config(together / "run", *given), place)
        name, frozen = next(
            (n, p) for n, p in trainer.model.named_parameters() if not p.requires_grad
        )
        frozen.requires_grad_(True)
        with pytest.raises(UserError, match=f"and parameter {name} was unfrozen"):
            trainer.train()
        trainer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("frozen", [(), ("embedding", "blocks")], ids=["trained", "frozen"])
def test_a_node_keeps_its_chunks_only(job, together, frozen):
    with on_nodes(job, NODES["two"]) as place:
        given = config(together / "run", *ZERO, "--run.steps", "1")
        trainer = make(given, place, frozen=frozen, hidden=128)
        trainer.train()
        parameters = trainer.averager.parameters
        whole = sum(p.numel() for p in trainer.model.parameters())
        assert sum(map(len, parameters._flats)) == whole
        for index in sorted(parameters._there):  # the first stage, for a step that does not come
            parameters._drop(index)
        parameters.progress.finish()
        job.world.barrier()
        flats = torch.cat(list(parameters._flats))
        kept = (flats != 0).sum() / len(flats)
        assert 0.45 < kept < 0.65, "half of all, and parts of pages"
        trainer.close()
    job.world.barrier()


@pytest.mark.mpi
def test_weights_are_read_by_all_nodes(job, together, reference, spoilt):
    options = [*ZERO, "--checkpoint.weights", str(reference), "--run.steps", "1"]
    train(job, NODES["two"], together / "run", *options)
    if job.world.rank == 0:
        alone = config(together / "one", "--checkpoint.weights", str(reference), "--run.steps", "1")
        make(alone, Runtime(Group(), Group())).train()
        (ours,), (theirs,) = records(together / "run"), records(together / "one")
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    job.world.barrier()


@pytest.mark.mpi
def test_what_other_code_may_read_is_not_divided(job, together):
    with pytest.raises(ConfigError, match="code outside hpc_train may read parameters"):
        make(config(together / "run", *ZERO), job, private=False)
    model, memory = nn.Linear(2, 2), hpc_train.MemorySection(zero=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = hpc_train.LoopOptions(memory=memory)
    with pytest.raises(ConfigError, match="give LoopOptions private_parameters=True"):
        hpc_train.Loop(job, together / "loop", model, optimizer, options)
    options = hpc_train.LoopOptions(memory=memory, private_parameters=True)
    with pytest.raises(UserError, match="need stages, and Linear has no attribute `stages`"):
        hpc_train.Loop(job, together / "loop", model, optimizer, options)
    with pytest.raises(UserError, match="zero 3 needs the gates of the model's stages"):
        average_gradients(model, optimizer, job.world, AveragingOptions(zero=3))


class Short(nn.Module):
    """A linear layer whose weight is frozen, and stays in bfloat16 whatever the model becomes.

    It has a parameter without elements, too.
    """

    def __init__(self, size):
        super().__init__()
        weight = nn.init.orthogonal_(torch.empty(size, size)).bfloat16()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, size))

    def _apply(self, *_, **__):
        return self

    def forward(self, inputs):
        return inputs @ self.weight.to(inputs.dtype)


class Blocks(nn.Sequential):
    stages = ("0", "1.*", "2")

    def __init__(self):
        blocks = (nn.Sequential(nn.Linear(8, 8), Short(8), nn.Tanh()) for _ in range(3))
        super().__init__(nn.Linear(5, 8), nn.Sequential(*blocks), nn.Linear(8, 3))
        self[1][0].requires_grad_(False)


def loop_losses(place, directory, epochs, options):
    """Train in a loop of one's own. The losses of the steps, and of evaluations."""
    torch.manual_seed(place.world.rank)
    model = Blocks().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # has frozen ones, too
    inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs.abs().argmax(1) % 3)

    def losses(batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    seen = []
    with hpc_train.Loop(place, directory, model, optimizer, options) as loop:
        if options.memory.zero == 3:
            assert {*loop.averager.streamed} == {p for p in model.parameters() if p.numel()}
        for _, batches in loop.epochs(data, batch=16, epochs=epochs, accumulate=2):
            for batch in batches:
                loss = losses(batch).mean()
                loop.backward(loss)
                if loop.step_due:
                    loop.step()
                    optimizer.zero_grad()
                seen.append(loop.mean(loss))
            seen.append(loop.evaluate(Subset(data, range(7)), losses, batch=4))
    return seen, model


def two_nodes(whole):
    node = whole.split(NODES["two"][whole.rank], whole.rank)
    return Levels.join(whole, node, whole.split(node.rank, whole.rank))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("order", "again"),
    [
        ((3, 0), "none"),
        ((0, 3), "full"),
        pytest.param((3, 3), "full", marks=pytest.mark.long),
    ],
)
def test_a_loop_of_ones_own(job, together, tmp_path, spoilt, monkeypatch, order, again):
    expected, trained = loop_losses(
        Runtime(Group(), Group()), tmp_path, 4, hpc_train.LoopOptions(clip_norm=0.3)
    )
    monkeypatch.setattr(Levels, "of", staticmethod(two_nodes))
    seen = []
    for zero, epochs in zip(order, (2, 4), strict=True):
        options = hpc_train.LoopOptions(
            memory=hpc_train.MemorySection(zero=zero, recompute=again),
            private_parameters=True,
            clip_norm=0.3,
        )
        found, model = loop_losses(job, together / "run", epochs, options)
        seen += found
        assert not any(isinstance(vars(m).get("forward"), Gate) for m in model.modules())
    assert seen == pytest.approx(expected, rel=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, trained.get_parameter(name))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("zero", [1, 3])
def test_mistakes_of_a_loop_are_told(job, together, monkeypatch, zero):
    monkeypatch.setattr(Levels, "of", staticmethod(two_nodes))
    model = Blocks()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    memory = hpc_train.MemorySection(zero=zero)
    options = hpc_train.LoopOptions(memory=memory, private_parameters=True, precision="float16")
    loop = hpc_train.Loop(job, together / "run", model, optimizer, options)
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(UserError, match="the loss of this step has no scale"):
        loop.step()
    with pytest.raises(UserError, match="a model was copied or pickled while"):
        copy.deepcopy(model)
    if zero == 3:
        with pytest.raises(UserError, match="another loop has divided over nodes: close that loop"):
            hpc_train.Loop(job, together / "two", model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.zero_grad()
    loop.backward(model(torch.ones(2, 5)).sum())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    line = "the optimizer has got a parameter outside of the model: close the loop"
    with pytest.raises(UserError, match=line):
        loop.step()
    loop.close()
    assert all(p.shape[-1] for p in copy.deepcopy(model).parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("free", [1 << 40, 0], ids=["room", "no room"])
def test_a_closed_trainer_leaves_the_parameters_if_they_fit(
    job, together, spoilt, monkeypatch, caplog, free
):
    monkeypatch.setattr(keeping, "free_bytes", lambda: free)
    with on_nodes(job, range(job.world.size)) as place:
        with make(config(together / "run", *ZERO), place) as trainer:
            trainer.train()
        kept = {n: p for n, p in trainer.model.named_parameters() if p.numel()}
        assert bool(kept) == bool(free)
        if job.world.rank == 0:
            assert ("no memory for the" in caplog.text) == (not free)
            saved = load_file(newest(together / "run"))
            assert all(torch.equal(saved[f"model.{n}"], p) for n, p in kept.items())
    job.world.barrier()


class Attendant:
    def __init__(self):
        self.seen = []

    def before_forward(self, place):
        self.seen.append(("forward", place))

    def before_backward(self, place):
        self.seen.append(("backward", place))


def gated():
    modules = [nn.Linear(3, 3) for _ in range(3)]
    gates: list[Gate] = []
    for number, module in enumerate(modules):
        gates.append(Gate(module, f"{number}", module.forward, gates[-1] if gates else None))
        module.forward = gates[-1]
    return modules, gates


def test_gates_tell_what_comes_next():
    modules, gates = gated()
    attendant = Attendant()
    attend(gates, attendant)
    x = torch.ones(2, 3)
    for module in modules:
        x = module(x)
    x.sum().backward()
    forward = [("forward", place) for place in range(3)]
    assert attendant.seen == [*forward, *(("backward", place) for place in (2, 1, 0))]


def test_stages_that_are_not_called_one_after_the_other_are_refused():
    (one, two, _), gates = gated()
    attend(gates, Attendant())
    with pytest.raises(UserError, match="stage 1 does not take the result of stage 0"):
        two(one(torch.ones(2, 3)) + 1)


class Rows(nn.Module):
    """Takes a dict, and returns one, a tuple, or a tensor."""

    def __init__(self, inputs, outputs, form):
        super().__init__()
        self.layer, self.form = nn.Linear(inputs, outputs), form

    def forward(self, given):
        given = given["rows"] if isinstance(given, dict) else given
        rows = self.layer(given[1] if isinstance(given, tuple) else given)
        return {"dict": {"rows": rows, "text": "kept"}, "tuple": (None, rows), "": rows}[self.form]


def test_stages_may_return_dicts_and_tuples():
    modules = [Rows(3, 3, form) for form in ("dict", "tuple", "")]
    gates: list[Gate] = []
    for number, module in enumerate(modules):
        gates.append(Gate(module, f"{number}", module.forward, gates[-1] if gates else None))
        module.forward = gates[-1]
    attendant = Attendant()
    attend(gates, attendant)
    one, two, three = modules
    three(two(one(torch.ones(2, 3)))).sum().backward()
    assert [place for _, place in attendant.seen] == [0, 1, 2, 2, 1, 0]
    with pytest.raises(UserError, match="stage 2 does not take the result of stage 1"):
        three(two(one(torch.ones(2, 3)))[1] * 2)
