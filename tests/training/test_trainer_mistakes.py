"""What a user can give a Trainer by mistake is told in a line, on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from hpc_train.errors import CheckpointMismatch, RankError, UserError, error_in_words
from hpc_train.mpi.runtime import Runtime
from hpc_train.training.task import TrainingTask
from hpc_train.training.trainer import Trainer
from tests.training.test_trainer import alone, config


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)


def data(samples=48):
    return TensorDataset(torch.ones(samples, 3, dtype=torch.float64))


def mean(model, batch):
    return model(batch[0]).mean()


def make(directory, started, dataset=None, loss=mean, **given) -> Trainer:
    task = TrainingTask(torch.nn.Linear(3, 1), dataset or data(), loss, **given)
    settings = config(directory, "--data.validation_every", "0", "--run.steps", "2")
    return Trainer(settings, task, started)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda loss: (loss, 1), "a value of type tuple"),
        (lambda loss: loss.item(), "a value of type float"),
        (lambda loss: None, "a value of type NoneType"),
        (lambda loss: loss.expand(3), r"a tensor of shape \[3\]"),
        (lambda loss: loss.detach(), "depends on no parameter"),
    ],
    ids=["tuple", "float", "none", "vector", "detached"],
)
def test_a_loss_that_is_not_one_number_with_gradients(group, together, change, what):
    trainer = make(together, Runtime(group, group), loss=lambda *given: change(mean(*given)))
    with pytest.raises(UserError, match=f"loss has returned .*{what}"):
        trainer.train()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tensor_plan = {"token": "vocab", "output": "vocab"}
        self.token, self.output = nn.Embedding(12, 4), nn.Linear(4, 12)

    def forward(self, text):
        return self.output(self.token(text)).flatten(0, -2)


@pytest.mark.ranks(2)
def test_torchs_own_loss_of_divided_logits_is_told(group, together):
    text = TensorDataset(torch.arange(12).expand(48, 12))
    task = TrainingTask(
        Words(), text, lambda words, batch: F.cross_entropy(words(*batch), batch[0].flatten())
    )
    settings = config(together, "--data.validation_every", "0", "--parallel.tp", "2")
    with pytest.raises(UserError, match=r"Target 6 .*: in place of F.cross_entropy .* style vocab"):
        Trainer(settings, task, Runtime(group, group)).train()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("given", [{"dataset": Stream()}, {"validation": Stream()}], ids=list)
def test_samples_without_numbers(group, together, given):
    with pytest.raises(UserError, match="is of type Stream, which has no samples by number"):
        make(together, Runtime(group, group), **given)


def test_no_held_out_samples(tmp_path):
    with pytest.raises(UserError, match="`validation` of TrainingTask has no samples"):
        make(tmp_path, alone(), validation=data(0))
    with pytest.raises(UserError, match="there are no held-out samples"):
        make(tmp_path, alone()).validate()
    with pytest.raises(UserError, match="there are no held-out samples"):
        make(tmp_path, alone(), validation=data()).scores_of(data(0))


class Torn(torch.utils.data.Dataset):
    """Has three samples. Its last one cannot be read."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        if place == 2:
            raise ValueError("a bad sample")
        return data()[place]


@pytest.mark.ranks(1, 2)
def test_an_error_in_a_held_out_sample_names_it(group, together):
    trainer = make(together, Runtime(group, group), validation=Torn())
    with pytest.raises((RankError, ValueError)) as caught:
        trainer.train()
    said = str(caught.value) if group.size > 1 else error_in_words(caught.value)
    assert "sample 2 of the held-out data: ValueError: a bad sample" in said
    assert group.size == 1 or caught.value.remedy == "its log has the traceback"


@pytest.mark.parametrize("name", ["identity", "about"])
def test_values_that_a_checkpoint_cannot_hold(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}.* cannot be saved .*Tensor is not JSON"):
        make(tmp_path, alone(), **{name: {"x": torch.ones(2)}})


def test_a_tuple_in_the_identity_can_be_resumed(tmp_path):
    for _ in range(2):
        make(tmp_path, alone(), identity={"x": (1, 2)}).train()
    with pytest.raises(CheckpointMismatch, match=r"made with x \[1, 2\], this run has \[1, 3\]"):
        make(tmp_path, alone(), identity={"x": (1, 3)}).train()


def test_a_loss_whose_own_parameters_nobody_would_train_is_refused(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, model, batch):
            return self.scale * mean(model, batch)

    with pytest.raises(UserError, match="loss has parameters that the model lacks"):
        make(tmp_path, alone(), loss=Scaled())


def test_a_part_that_is_frozen_after_a_stop_is_refused_with_a_way_on(tmp_path):
    make(tmp_path, alone()).train()
    model = torch.nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    task = TrainingTask(model, data(), mean)
    settings = config(tmp_path, "--data.validation_every", "0", "--run.steps", "4")
    with (
        Trainer(settings, task, alone()) as trainer,
        pytest.raises(CheckpointMismatch, match=r"not have bias: train that .*checkpoint\.weights"),
    ):
        trainer.train()
