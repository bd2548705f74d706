"""The Trainer on samples with unequal numbers of tokens that count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.errors import ConfigError, DataError
from hpc_train.models import GPT
from hpc_train.models.language import counted_targets
from hpc_train.mpi.group import Group
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, check_equal, config, records

PLAIN = ["--data.shuffle", "false", "--optimizer.clip_norm", "0"]


def ragged(samples, seed):
    """Text. Each sample has another number of targets that count; some have none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(14, (samples, 9), generator=generator)
    targets = tokens[:, 1:].clone()
    for number, length in enumerate(torch.randint(9, (samples,), generator=generator).tolist()):
        targets[number, length:] = -100
    assert any((row == -100).all() for row in targets)
    return TensorDataset(tokens[:, :-1], targets)


def gpt(dropout=0.0):
    torch.manual_seed(5)
    return GPT(vocab=14, sequence=8, layers=2, hidden=8, heads=2, dropout=dropout)


def task(model, **more):
    data = {"validation": ragged(11, 2), "counted": counted_targets} | more
    return TrainingTask(model, ragged(60, 1), private_parameters=True, **data)


def expected_loss(model, batch, over):
    """The loss of a batch by its definition, one sample after another."""
    sums = [
        F.cross_entropy(model(x[None])[0], y, ignore_index=-100, reduction="sum")
        for x, y in zip(*batch, strict=True)
    ]
    counts = [int((y != -100).sum()) for y in batch[1]]
    if over == "token":
        return sum(sums) / sum(counts)
    return sum(one / max(1, count) for one, count in zip(sums, counts, strict=True)) / len(counts)


@pytest.mark.parametrize("over", ["sample", "token"])
def test_the_loss_of_a_step_is_the_mean_that_it_is_said_to_be(tmp_path, over):
    model = gpt().double()
    data, held_out = ragged(60, 1).tensors, ragged(11, 2).tensors
    loss = expected_loss(model, [column[:24] for column in data], over)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    options = [*PLAIN, "--data.loss", over, "--data.micro_batch", "1", "--run.steps", "1"]
    trainer = Trainer(config(tmp_path, *options), task(gpt()), alone())
    trainer.train()
    (record,) = records(tmp_path)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
    with torch.no_grad():
        validated = expected_loss(trainer.model, held_out, over).item()
    assert record["validation_loss"] == pytest.approx(validated, rel=1e-12)


LAYOUTS = {
    "dp": ["--data.micro_batch", "1", "--memory.zero", "0"],
    "zero-2": ["--data.micro_batch", "2", "--memory.zero", "2"],
    "zero-3": ["--data.micro_batch", "1", "--memory.zero", "3"],
    "pp": ["--parallel.pp", "2", "--parallel.schedule", "zero_bubble", "--data.micro_batch", "1"],
    "tp": ["--parallel.tp", "2", "--parallel.sequence_parallel", "true", "--data.micro_batch", "3"],
    "tp-pp": ["--parallel.tp", "2", "--parallel.pp", "2", "--data.micro_batch", "2"],
}


@pytest.mark.mpi
@pytest.mark.long  # test_trainer_lengths.py has every layout, too.
@pytest.mark.parametrize("over", ["sample", "token"])
def test_every_layout_has_the_same_loss(job, together, over):
    options = ["--data.loss", over, "--memory.recompute", "selective"]
    if job.world.rank == 0:
        settings = config(together / "one", *options)
        Trainer(settings, task(gpt(0.2)), Runtime(Group(), Group())).train()
    job.world.barrier()
    for name, layout in LAYOUTS.items():
        with Trainer(config(together / name, *options, *layout), task(gpt(0.2)), job) as trainer:
            trainer.train()
        if job.world.rank == 0:
            check_equal(together / name, together / "one")


class Mean(nn.Module):
    """A model of its own, with torch's loss: it is NaN if no target of a batch counts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(14, 14)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten())


def test_a_micro_batch_in_which_nothing_counts_adds_nothing(tmp_path):
    for size in (1, 24):
        options = ["--data.loss", "token", "--data.micro_batch", str(size)]
        Trainer(config(tmp_path / str(size), *options), task(Mean()), alone()).train()
    check_equal(tmp_path / "1", tmp_path / "24")


@pytest.mark.mpi
def test_a_step_in_which_nothing_counts_ends_all_ranks(job, together):
    empty = TensorDataset(torch.zeros(60, 8).long(), torch.full((60, 8), -100))
    given = TrainingTask(gpt(), empty, counted=counted_targets)
    options = ["--data.loss", "token", "--data.validation_every", "0"]
    with pytest.raises(DataError, match="no token of step 1 counts"):
        Trainer(config(together / "run", *options), given, job).train()


def test_a_mean_over_tokens_needs_someone_who_counts_them(tmp_path):
    with pytest.raises(ConfigError, match="give TrainingTask `counted`"):
        Trainer(config(tmp_path, "--data.loss", "token"), task(Mean(), counted=None), alone())


def test_a_mean_over_tokens_needs_averaged_gradients(tmp_path):
    with pytest.raises(ConfigError, match="not averaged in every step"):
        config(tmp_path, "--data.loss", "token", "--gradients.average_every", "2")
