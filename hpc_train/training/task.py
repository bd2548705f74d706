"""What a job trains: a model, its loss and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.shape import Shape
from hpc_train.training.scoring import Scoring

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """The model that a job trains, its loss and its data. All ranks must pass the same.

    Args:
        model: any module, or a class or function without arguments that builds one. All ranks pass
            the same. With a module that is built already, all ranks get rank 0's weights. With a
            class or function, each rank fills its own part only, where that is possible, and
            run.seed decides the values (docs/how-to/memory.md). Parts that other ranks compute are
            removed. The model needs an attribute `tensor_plan` if tp is above 1, and `stages` if pp
            is above 1 (docs/how-to/parallel.md). If it has a method `seed_samples`, that is called
            before each forward pass with one integer per sample, for masks that do not depend on
            the layout. torch's generator is seeded for each micro-batch, too.
        dataset: any map-style data set of torch, or one with `fetch` (see `Loader`). For
            `data.micro_tokens` it has a method `lengths`, which returns the lengths of some
            samples, int64, for their indices, and takes little time.
        loss: a function of the model and a batch. It returns the mean over the batch's samples, a
            scalar, or with `data.loss: token` the mean over what `counted` counts. The batch is as
            the data set returned it, on the model's device. By default the model is called with the
            parts of the batch, those of a dict by their names, and returns the loss. A model with
            an attribute `loss_over` gets the value of `data.loss` there.
        scores: what else is computed from the held-out samples, such as `HeldOutScores`.
            `metrics.jsonl` gets each score as validation_NAME.
        counted: a function of a batch, on the CPU. It returns how many of its tokens, or of other
            items, its loss is the mean over. `data.loss: token` needs it. If it returns 0, the
            batch does not count.
        validation: a held-out data set of the same kind; None: there is none.
        identity: values by configuration key. A checkpoint can be resumed only with the same values
            and the same `sample_order_identity`.
        about: plain JSON values that readers of a checkpoint need to use the model.
        tokens_per_sample: tokens in a sample, on average, to report tokens per second; 0 reports
            none.
        private_parameters: whether parameters are read only by the modules that have them, and
            written only by the optimizer's step, once the Trainer is made. Then `memory.zero: auto`
            may share them between ranks, and they are brought to a module just before it runs. If a
            model, a loss or a hook wrote to shared parameters, each of the ranks would do so.
        most_at_a_time: the largest number of samples that `data.micro_batch: auto` tries to compute
            at a time; None: all samples of a replica.
        together: how many neighbours in a step's order the loss compares with each other. A
            micro-batch then has a multiple of that many samples.
        shape: the sizes of the model, from which its operations are known; None: they are counted.
        finish: a function of the Trainer, called on all ranks after the last step, while the job
            still holds the run directory, also if they were all taken by an earlier start. If it
            takes long, it calls `check_in` of the Trainer from time to time.
    """

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any
    loss: Loss | None = None
    validation: Any = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] | None = None
    tokens_per_sample: float = 0
    private_parameters: bool = False
    most_at_a_time: int | None = None
    counted: Callable[[Any], int] | None = None
    scores: Scoring | None = None
    together: int = 1
    shape: Shape | None = None
    finish: Callable[[Any], None] | None = None


def call_with_parts(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with the parts of a batch, by name if they have names; it returns its loss."""
    loss: Tensor = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    return loss


def check_loss(loss: Loss | None, model: nn.Module) -> None:
    """Check that a loss has no parameters that nobody would train.

    Raises:
        UserError: it has some.
    """
    known = {id(parameter) for parameter in model.parameters()}
    own = loss.parameters() if isinstance(loss, nn.Module) else ()
    if any(parameter.requires_grad and id(parameter) not in known for parameter in own):
        raise UserError(
            "the task's loss has parameters that the model lacks, so no optimizer would train them",
            "make the loss a part of the model",
        )


def checked_loss(loss: Any) -> Tensor:
    """What a task's loss returned, as a scalar of float32 or wider.

    Raises:
        UserError: it is not one number, or gives no gradients in training.
    """
    if not isinstance(loss, Tensor):
        what = f"a value of type {type(loss).__name__}"
    elif loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        what = "a tensor that depends on no parameter that is trained"
    else:
        return loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
    raise UserError(
        f"the task's loss has returned {what}",
        "let it return one tensor with one element, from which gradients can be computed in each "
        "micro-batch",
    )
