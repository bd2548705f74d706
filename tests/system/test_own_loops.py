"""Loops of people's own: random models, optimizers and habits, against the same in one process.

By hand, for more cases: `mpirun -np 4 python -m tests.system.test_own_loops 200 2000`.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import asdict, dataclass
from random import Random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hpc_train.collectives import connect
from hpc_train.gradients import average_gradients
from hpc_train.gradients.options import AveragingOptions
from hpc_train.mpi import runtime
from hpc_train.mpi.group import Group
from hpc_train.parallel import batch_norm

SAMPLES, STEPS = 12, 7
CASES = 200
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "SGD plain": {},
    "SGD fused": {"fused": True},
    "SGD nesterov": {"momentum": 0.8, "nesterov": True},
    "Adam": {},
    "AdamW fused": {"fused": True},
    "AdamW amsgrad": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {"weight_decay": 0.01},
    "Adadelta": {},
    "RMSprop": {"centered": True},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "LBFGS": {"max_iter": 3, "line_search_fn": "strong_wolfe"},
}
SIGNS = {"Rprop", "Adafactor", "Adadelta", "Adamax", "RMSprop", "Adagrad", "NAdam", "RAdam"}


@dataclass
class Case:
    """A model, an optimizer and the habits of whoever wrote the loop.

    Args:
        passes: backward passes of each step.
        clip: how gradients are clipped.
        clear: how they are dropped.
        by: which `step` is called.
        give_up: steps that are left after the backward pass.
        freeze, unfreeze, add: the step before which a part of the model is frozen, unfrozen, or put
            into the optimizer; -1: none.
        keep: the step whose gradients are not dropped before the next; -1: none.
        masked: a loss over some of the outputs only, unequally many per rank.
    """

    ranks: int
    engine: str
    bucket_bytes: int
    two_level: str
    parts: list[str]
    channels_last: bool
    optimizer: str
    passes: int
    clip: str
    clear: str
    by: str
    scheduler: bool
    give_up: list[int]
    freeze: int
    unfreeze: int
    add: int
    keep: int
    masked: bool
    thread: bool

    @classmethod
    def draw(cls, random: Random, most: int) -> Case:
        engine = random.choice(["mpi"] * 4 + ["horovod"] * runtime.horovod_built())
        optimizer = random.choice([*OPTIMIZERS, "SGD plain", "AdamW fused"])
        closure = optimizer == "LBFGS"

        def sometimes(step: int, share: float = 0.25) -> int:
            return step if random.random() < share and not closure else -1

        parts = ["batch norm", "group norm", "tied", "transposed", "unused", "scalar", "sparse"]
        parts += ["complex", "late", "checkpoint", "empty"]
        chosen = [part for part in parts if random.random() < 0.4]
        if closure:
            chosen = [
                part for part in chosen if part not in ("complex", "batch norm", "transposed")
            ]
        if optimizer in ("Adafactor", "Rprop", "ASGD", "LBFGS") or "fused" in optimizer:
            chosen = [part for part in chosen if part != "complex"]
        if optimizer != "SGD plain":
            chosen = [part for part in chosen if part != "sparse"]
        if optimizer == "Adafactor":
            chosen = [part for part in chosen if part != "empty"]
        return cls(
            ranks=most if engine == "horovod" else random.randint(1, most),
            engine=engine,
            bucket_bytes=random.choice([1, 200, 2000, 1 << 20]),
            two_level=random.choice(["auto", "off"]) if engine == "mpi" else "auto",
            parts=chosen,
            channels_last=random.random() < 0.5 and not closure,
            optimizer=optimizer,
            passes=1 if closure else random.randint(1, 3),
            clip="none"
            if closure or "sparse" in chosen
            else random.choice(
                ["none", "before", "averager", *["value"] * ("complex" not in chosen)]
            ),
            clear=random.choice(["optimizer", "model", "zeros", "none", "averager"]),
            by=random.choice(["optimizer", "averager"]) if not closure else "optimizer",
            scheduler=random.random() < 0.5,
            give_up=[s for s in range(STEPS) if random.random() < 0.15 and not closure],
            freeze=sometimes(random.randrange(STEPS)),
            unfreeze=sometimes(random.randrange(STEPS)),
            add=sometimes(random.randrange(STEPS)),
            keep=sometimes(random.randrange(STEPS - 1), 0.15),
            masked=random.random() < 0.3 and not closure,
            thread=random.random() < 0.2,
        )


class Model(nn.Module):
    """A small picture goes in, a number comes out."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        # Before a batch norm a bias has no effect, and its gradient is noise.
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias="batch norm" not in case.parts)
        self.norm = nn.BatchNorm2d(4) if "batch norm" in case.parts else nn.GroupNorm(2, 4)
        self.middle = nn.Conv2d(4, 4, 3, groups=2, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.later = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if "tied" in case.parts:
            self.second.weight = self.first.weight
        if "transposed" in case.parts:
            self.matrix = nn.Parameter(torch.randn(3, 4).t())
        if "unused" in case.parts:
            self.unused = nn.Linear(3, 2)
        if "scalar" in case.parts:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if "empty" in case.parts:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if "complex" in case.parts:
            self.waves = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        if "sparse" in case.parts:
            self.words = nn.Embedding(5, 4, sparse=True)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.norm(self.stem(x)).tanh()
        x = self.middle(x).mean((2, 3))  # (B, 4)
        x = x + self.frozen(x).tanh() + self.later(x).tanh()
        if "checkpoint" in self.case.parts:
            x = torch.utils.checkpoint.checkpoint(self.between, x, use_reentrant=True)
        else:
            x = self.between(x)
        if "transposed" in self.case.parts:
            x = x + ((x @ self.matrix) @ self.matrix.t()).tanh()
        if "scalar" in self.case.parts:
            x = x * self.scale
        if "complex" in self.case.parts:
            x = x + (x * self.waves).abs()
        if "sparse" in self.case.parts:
            x = x + self.words((x.detach().sum(1).abs() * 10).long() % 5)
        late = "late" in self.case.parts and step > 4  # another part of the model is used
        return self.heads[int(late)](x).squeeze(1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) + self.first(x)


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(case).double()
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    for parameter in model.later.parameters():
        parameter.requires_grad_(case.unfreeze < 0)
    name, *_ = case.optimizer.split()
    added = model.heads[1].weight if case.add >= 0 else None
    parameters = [p for p in model.parameters() if p is not added]
    lr = 0.5 if name == "LBFGS" else 0.01
    return model, getattr(torch.optim, name)(parameters, lr=lr, **OPTIMIZERS[case.optimizer])


def train(case: Case, group: Group | None) -> dict[str, torch.Tensor]:
    """The case's loop, on the ranks of a group or, for None, in one process over all samples."""
    model, optimizer = build(case)
    averager = None
    if group is not None:
        batch_norm.set_up_batch_norm(model, over := connect(group), "sync")
        averager = average_gradients(
            model,
            optimizer,
            group,
            AveragingOptions(
                engine=case.engine,
                bucket_bytes=case.bucket_bytes,
                two_level=case.two_level,
                cores=2 if case.thread else 1,
            ),
        )
    scheduler = StepLR(optimizer, 2, 0.7) if case.scheduler else None
    for step in range(STEPS):
        change(case, step, model, optimizer)
        if step != case.keep + 1 or case.keep < 0:
            clear(case, model, optimizer, averager)
        take(case, step, model, optimizer, averager)
        if scheduler and step not in case.give_up:
            scheduler.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if averager is not None:
        averager.close()
        batch_norm.release(model, over)
    return state


def take(case: Case, step: int, model, optimizer, averager) -> None:
    """One step, or what is left of it."""
    if case.optimizer == "LBFGS":

        def closure() -> torch.Tensor:
            clear(case, model, optimizer, averager)
            value = loss(case, step, 0, model, averager)
            value.backward()
            return value

        optimizer.step(closure)
        return
    for number in range(case.passes):
        loss(case, step, number, model, averager).backward()
    if step not in case.give_up:
        clip(case, model, averager)
        (averager if averager and case.by == "averager" else optimizer).step()


def loss(case: Case, step: int, number: int, model, averager) -> torch.Tensor:
    """Of this rank's samples in one backward pass."""
    rank, size = (averager.group.rank, averager.group.size) if averager else (0, 1)
    generator = torch.Generator().manual_seed(10 * step + number)
    data = torch.randn(SAMPLES, 2, 5, 5, generator=generator).double().chunk(size)[rank]
    errors = (model(data, step) - data.mean((1, 2, 3))).square()
    if not case.masked:
        return errors.mean() / case.passes
    there = data[:, 0, 0, 0] > 0
    items = int(there.sum())
    weight = averager.weight(items) if averager else 1.0
    return errors[there].sum() / max(items, 1) * weight / case.passes


def change(case: Case, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == case.freeze:
        model.middle.requires_grad_(False)
    if step == case.unfreeze:
        model.later.requires_grad_(True)
    if step == case.add:
        optimizer.add_param_group({"params": [model.heads[1].weight]})


def clear(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, averager) -> None:
    if case.clear == "model":
        model.zero_grad()
    elif case.clear == "none":
        for parameter in model.parameters():
            parameter.grad = None
    elif case.clear == "averager":
        if averager:
            averager.zero_grad()
        else:
            model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=case.clear != "zeros")


def clip(case: Case, model: nn.Module, averager) -> None:
    if case.clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
    elif case.clip == "averager" and averager:
        averager.average()
        norm = float(averager.norm())
        averager.scale_(min(1.0, 0.1 / (norm + 1e-6)))
    elif case.clip != "none":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def check(case: Case, world: Group) -> list[str]:
    """The names of tensors that are not what they are in one process."""
    inside = world.rank < case.ranks
    group = world if case.ranks == world.size else world.split(int(not inside), world.rank)
    if inside:
        expected, found = train(case, None), train(case, group)
    if group is not world:
        group.close()
    if not inside:
        return []
    loose = case.optimizer.split()[0] in SIGNS or "batch norm" in case.parts
    rtol, atol = (1e-6, 1e-7) if loose else (1e-10, 1e-12)
    return [
        name
        for name, theirs in expected.items()
        if not torch.allclose(found[name], theirs, rtol=rtol, atol=atol)
    ]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))]
)
def test_own_loops_do_what_they_do_in_one_process(job, block):
    wrong = {}
    for number in range(block * CASES // 10, (block + 1) * CASES // 10):
        case = Case.draw(Random(number), job.world.size)
        print(number, asdict(case))
        if different := check(case, job.world):
            wrong[number] = different
    assert not wrong


if __name__ == "__main__":
    job = runtime.start_runtime()
    first, count = map(int, sys.argv[1:])
    failed = 0
    for number in range(first, first + count):
        case = Case.draw(Random(number), job.world.size)
        try:
            different = check(case, job.world)
        except BaseException:  # noqa: BLE001  # the other ranks wait for this one
            print(job.world.rank, number, asdict(case), flush=True)
            traceback.print_exc()
            job.world.comm.Abort(1)
        if any(job.world.gathered(different)):
            failed += 1
            if job.world.rank == 0:
                print(number, asdict(case), different, flush=True)
    job.print(f"{failed} of {count} cases differ")
    job.close()
