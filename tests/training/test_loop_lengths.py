"""A user's own loop on samples of unequal lengths, or of unequal numbers of tokens that count."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpc_train.config import GradientsSection, MemorySection
from hpc_train.errors import ConfigError, UserError
from hpc_train.training.loop import Loop
from hpc_train.training.options import LoopOptions
from tests.training.test_loop import ENGINES, alone
from tests.training.test_trainer_lengths import Sentences

BATCH, EPOCHS = 22, 2  # four steps per epoch


def counted(batch):
    return int((batch[1] != -100).sum())


def loss_of(model, batch, over):
    tokens, targets = batch
    losses = cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
    if over == "token":
        return losses.sum() / counted(batch)
    return (losses.sum(1) / (targets != -100).sum(1)).mean()


def train(started, directory, over, stop_at=None, batch=BATCH, accumulate=1, **more):
    """Train; returns the steps' losses, the final weights, and the batches' shapes."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(14, 6), torch.nn.Linear(6, 14)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if over == "token":
        more["counted"] = counted
    options = LoopOptions(every=3, keep=0, **more)
    dataset, seen = Sentences(90, 1), []
    with Loop(started, directory, model, optimizer, options) as loop:
        epochs = loop.epochs(dataset, batch=batch, epochs=EPOCHS, accumulate=accumulate)
        for _, batches in epochs:
            total = 0.0
            for one in batches:
                loss = loss_of(model, one, over)
                total += loss.item() * loop.loss_weight
                loop.backward(loss)
                if loop.step_due:
                    loop.step()
                    optimizer.zero_grad()
                    seen.append(loop.mean(total))
                    total = 0.0
                    if len(seen) == stop_at:
                        loop.stop()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    return seen, weights, dataset.shapes


CASES = {
    "token-mpi": ("token", 22, {}),
    "sample-zero-2": ("sample", 6, {"memory": MemorySection(zero=2)}),
    **{
        f"token-{engine}": ("token", 6, {"gradients": GradientsSection(engine=engine)})
        for engine in ENGINES[1:]
    },
}


@pytest.mark.mpi
@pytest.mark.parametrize(("over", "batch", "options"), CASES.values(), ids=CASES)
def test_steps_are_those_of_whole_batches_on_one_rank(
    job, together, tmp_path, over, batch, options
):
    losses, weights, _ = train(alone(), tmp_path / "one", over, batch=batch)
    mine, others, shapes = train(
        job, together / "many", over, batch=batch, micro_tokens=20, **options
    )
    assert len(set().union(*job.world.gathered(shapes))) > 3
    assert len(mine) == EPOCHS * (90 // batch)
    assert mine == pytest.approx(losses, rel=1e-12)
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.mpi
def test_a_loop_that_was_stopped_goes_on_with_the_same_losses(job, together):
    whole, _, _ = train(job, together / "whole", "token", micro_tokens=20)
    first, _, _ = train(job, together / "cut", "token", micro_tokens=20, stop_at=3)
    rest, _, _ = train(job, together / "cut", "token", micro_tokens=20)
    assert (len(first), first + rest) == (3, whole)


def test_tokens_weigh_the_same_in_micro_batches_of_equal_numbers_of_samples(tmp_path):
    losses, _, _ = train(alone(), tmp_path / "one", "token", batch=12)
    many, _, _ = train(alone(), tmp_path / "many", "token", batch=12, accumulate=4)
    assert many == pytest.approx(losses, rel=1e-12)


@pytest.mark.mpi
def test_a_number_of_items_that_is_not_whole_ends_all_ranks(job, together):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_rank = LoopOptions(counted=lambda batch: 2.7 if job.world.rank == 0 else 3)
    with (
        Loop(job, together, model, optimizer, of_rank) as loop,
        pytest.raises(UserError, match=r"`counted` returned 2.7"),
    ):
        next(iter(next(loop.epochs([*range(8)], batch=4, epochs=1))[1]))


def test_losses_without_weights_are_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(14, 6), torch.nn.Linear(6, 14)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(alone(), tmp_path, model, optimizer, LoopOptions(micro_tokens=20))
    for _, batches in loop.epochs(Sentences(30, 1), batch=10, epochs=1):
        for batch in batches:
            with pytest.raises(UserError, match=r"loop.weight was called, but loop.backward"):
                loop.weight(3)
            loss_of(model, batch, "sample").backward()
            if loop.step_due:
                with pytest.raises(UserError, match=r"losses of this step were not weighted"):
                    optimizer.step()
                loop.stop()


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"accumulate": 2}, ConfigError, "accumulate is 2, but the loop has micro_tokens"),
        ({"micro_tokens": 0}, UserError, "micro_tokens is 0"),
        (
            {"gradients": GradientsSection(average_every=2)},
            ConfigError,
            "micro_tokens is given, but the replicas' gradients are not averaged in every step",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, more, error, message):
    with pytest.raises(error, match=message):
        train(alone(), tmp_path, "sample", **{"micro_tokens": 20, **more})


def test_a_data_set_without_lengths_is_refused(tmp_path):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(alone(), tmp_path, model, optimizer, LoopOptions(micro_tokens=20))
    with pytest.raises(UserError, match="no method lengths"):
        next(iter(loop.epochs([1, 2, 3], batch=1, epochs=1)))


class Given(list):
    """Samples whose lengths are no method."""

    lengths = (1, 2, 3)


def test_lengths_that_are_no_method_are_refused(tmp_path):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(alone(), tmp_path, model, optimizer, LoopOptions(micro_tokens=20))
    with pytest.raises(UserError, match="is no method, but of type tuple: give it a method"):
        next(iter(loop.epochs(Given([1, 2, 3]), batch=1, epochs=1)))
