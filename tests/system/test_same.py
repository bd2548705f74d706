"""Whatever way gradients go, the parameters are those of one process that sees all samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random

import pytest
import torch
from torch import nn

from hpc_train.gradients import (
    autotune,
    average_gradients,
    staged_parameters,
    staged_sums,
)
from hpc_train.gradients.buckets import Bucket
from hpc_train.gradients.options import AveragingOptions
from hpc_train.gradients.staged_sums import StagedSums
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.mpi.levels import Levels
from tests.gradients.gloo import pretend
from tests.gradients.late_lane import LateLane

pytestmark = pytest.mark.mpi
SAMPLES, STEPS = 24, 4
CASES = 40
SOME = 16  # of them in a run that is not long


@dataclass
class Case:
    """One way to average.

    Args:
        ranks: the first so many take part.
        nodes: which of two or more made-up nodes each rank is on.
        uneven: the last rank has no samples.
        told: the averager is told the number of passes.
        staged: the optimizer's state is in the memory of the node, as if parameters were on a GPU.
    """

    engine: str
    ranks: int
    nodes: tuple[int, ...]
    bucket_bytes: int | None
    two_level: str
    zero: int
    scope: str
    hidden: bool
    passes: int
    thread: bool
    optimizer: str
    uneven: bool
    told: bool
    staged: bool = False

    @classmethod
    def draw(cls, random: Random, most: int) -> Case:
        engine = random.choice(["mpi"] * 5 + ["horovod"] * runtime.horovod_built())
        ranks = most if engine == "horovod" else random.randint(1, most)
        kinds = random.randint(1, ranks)
        zero = random.randint(0, 2) if engine == "mpi" else 0
        two_level = ["auto", "on", "off"] if engine == "mpi" and not zero else ["auto"]
        return cls(
            engine,
            ranks,
            tuple(random.randrange(kinds) for _ in range(ranks)),
            random.choice([1, 100, 1000, 1 << 20, None]),
            random.choice(two_level),
            zero,
            random.choice(["node", "all"]),
            random.random() < 0.5,
            random.randint(1, 3),
            random.random() < 0.3,
            random.choice(["SGD", "AdamW"]),
            ranks > 1 and random.random() < 0.3,
            random.random() < 0.5,
        )


class Model(nn.Module):
    """Has a shared, a frozen, an unused, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(5, 1)

    def forward(self, x):
        return self.scale * self.out(self.frozen(self.second(self.first(x).tanh()).tanh()))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    more = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    return getattr(torch.optim, name)(model.parameters(), lr=0.05, fused=True, **more)


def samples(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(step)).double()


def loss(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    return (model(part[:, :6]) - part[:, 6:]).square().mean()


def shares(case: Case, step: int) -> list[torch.Tensor]:
    """The samples of each rank: unlike numbers of them, or none, where the case says so."""
    data = samples(step)
    if not case.uneven:
        return list(data[: SAMPLES // case.ranks * case.ranks].chunk(case.ranks))
    return [*data.chunk(case.ranks - 1), data[:0]]


def reference(case: Case) -> tuple[nn.Module, list[float]]:
    """Trained in one process; with the norms of the gradients."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer, norms = optimizer_of(case.optimizer, model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.cat(shares(case, step))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return model, norms


def levels_of(group: Group, nodes: tuple[int, ...]) -> Levels:
    """The group as if its ranks were on these nodes."""
    node = group.split(color=nodes[group.rank], key=group.rank)
    return Levels.join(group, node, group.split(color=node.rank, key=group.rank))


def trained(case: Case, group: Group) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(group.rank)  # all but rank 0's weights are to be replaced
    model = Model().double()
    optimizer = optimizer_of(case.optimizer, model)
    averager = average_gradients(
        model,
        optimizer,
        group if case.engine == "horovod" else levels_of(group, case.nodes),
        AveragingOptions(
            engine=case.engine,
            bucket_bytes=case.bucket_bytes,
            two_level=case.two_level,
            zero=case.zero,
            scope=case.scope,
            staged=case.staged,
            only_modules_read=case.hidden,
            cores=2 if case.thread else 1,
        ),
    )
    if case.told:
        averager.expect(case.passes)
    norms = []
    for step in range(STEPS):
        part = shares(case, step)[group.rank]
        averager.zero_grad()
        weight = averager.weight(len(part)) if case.uneven else 1.0
        backward(model, part, case, weight)
        if step % 2:  # in the other steps the norm averages
            averager.average()
        norm = float(averager.norm())
        norms.append(norm)
        if norm > 0.5:
            averager.scale_(0.5 / (norm + 1e-6))
        averager.step()
    averager.close()
    return model, norms


def backward(model, part, case, weight) -> None:
    """All passes of a step, each over all of the rank's samples with a part of the weight."""
    if not len(part):
        return
    for _ in range(case.passes):
        (loss(model, part) * weight / case.passes).backward()


def check(job, case: Case) -> None:
    """The first ranks of the job train as one process does."""
    world = job.world
    print(asdict(case))
    inside = world.rank < case.ranks
    group = world if case.ranks == world.size else world.split(int(not inside), world.rank)
    if not inside:
        return
    model, norms = trained(case, group)
    expected, expected_norms = reference(case)
    assert norms == pytest.approx(expected_norms, rel=1e-11)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-12), name


def numbers(some: int):
    """The numbers of the cases; some are not for a run that is long."""
    return [n if n < some else pytest.param(n, marks=pytest.mark.long) for n in range(CASES)]


@pytest.mark.parametrize("number", numbers(SOME))
def test_parameters_are_those_of_one_process(job, number):
    check(job, Case.draw(Random(number), job.world.size))


@pytest.mark.parametrize("number", numbers(SOME // 2))
def test_so_they_are_if_copies_to_the_host_end_late(job, monkeypatch, number):
    monkeypatch.setattr(staged_parameters, "CopyLane", LateLane)
    random = Random(number)
    drawn = Case.draw(random, job.world.size)
    more = {"engine": "mpi", "two_level": "auto", "zero": random.choice([1, 2])}
    if number == 0:
        more |= {"ranks": 1, "nodes": (0,), "uneven": False}
    check(job, replace(drawn, staged=True, **more))


@pytest.mark.parametrize("number", numbers(SOME // 2))
def test_so_they_are_if_buckets_go_to_the_host_and_back(job, monkeypatch, number):
    """As they do if parameters are on a GPU that MPI cannot read."""
    monkeypatch.setattr(staged_sums, "CopyLane", LateLane)
    # In small pieces, but not the large bucket with which ways to sum are measured.
    cut = Bucket.pieces
    few = lambda bucket, most: cut(bucket, most if bucket.nbytes > 1 << 20 else 256)  # noqa: E731
    monkeypatch.setattr(Bucket, "pieces", few)
    monkeypatch.setattr(
        autotune, "staged", lambda make, _, **how: lambda some: StagedSums(some, make, **how)
    )
    drawn = Case.draw(Random(number), job.world.size)
    check(job, replace(drawn, engine="mpi", zero=0))


# A sum inside of an operation on a gradient brings torch's own warning to Python.
@pytest.mark.filterwarnings("ignore:Work..exception API:UserWarning")
@pytest.mark.parametrize("number", numbers(SOME // 2))
def test_so_they_are_if_buckets_are_summed_on_gpus(job, monkeypatch, number):
    """By engine nccl, for whose GPUs processors stand in."""
    pretend(monkeypatch)
    drawn = Case.draw(Random(number), job.world.size)
    more = {"nodes": (0, 0, 1, 1), "ranks": job.world.size} if number % 2 else {}
    check(job, replace(drawn, engine="nccl", zero=0, **more))


@pytest.mark.parametrize(("zero", "scope"), [(0, "node"), (1, "node"), (1, "all"), (2, "all")])
def test_deterministic_runs_are_the_same_bits(job, zero, scope):
    bits = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        optimizer = optimizer_of("AdamW", model)
        averager = average_gradients(
            model,
            optimizer,
            job.world,
            AveragingOptions(deterministic=True, zero=zero, scope=scope),
        )
        for step in range(STEPS):
            averager.zero_grad()
            loss(model, samples(step + job.world.rank).float()).backward()
            averager.step()
        averager.close()
        bits.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    assert bits[0] == bits[1]
