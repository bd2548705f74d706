"""Losses and predictions of models of tables.

B samples, K members of the model, C classes. A model returns (B, K, outputs). In training each
member has a loss of its own, so the members learn apart from each other. What users see is the mean
of the members' predictions. So that mean has the loss of held-out samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_train.data.tables.features import TargetValues
from hpc_train.errors import ConfigError, plural
from hpc_train.mpi.group import Group
from hpc_train.training.table_scores import TableScores

logger = logging.getLogger(__name__)

ClassWeights = Literal["none", "balanced"]


class TableLoss:
    """The loss of a model of tables: the mean over the samples of a batch of weight times loss.

    The loss of a sample is the mean over the members for a model in training, and else the loss of
    the mean of the members' predictions. It is the cross-entropy for a classification, the mean
    over the labels of the binary cross-entropy for "multilabel", and for a regression the squared
    error of the scaled target, or with quantiles the mean over them of the pinball loss (Koenker
    and Bassett, "Regression quantiles", Econometrica 1978).

    The sum of the weights of a batch does not divide the loss, so the loss of a step does not
    depend on how the step is cut into micro-batches.

    Args:
        target: what is predicted.
        class_weights: "balanced" multiplies the weight of each sample by the inverse of the share
            of its class in the training rows, divided by the number of classes that occur. Over the
            training rows the mean of these factors is 1.
        quantiles: the quantiles that the outputs of a regression predict; with none the output is
            the mean.

    Raises:
        ConfigError: the task has no classes, and class_weights is "balanced".
    """

    together = 1  # the losses of rows do not depend on each other

    def __init__(
        self,
        target: TargetValues,
        *,
        class_weights: ClassWeights = "none",
        quantiles: Sequence[float] = (),
    ) -> None:
        if class_weights != "none":
            check_has_classes(target, "data.class_weights")
        self.target, self.quantiles = target, tuple(quantiles)
        self.factors = class_factors(target) if class_weights == "balanced" else None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch: a scalar.

        Args:
            model: takes the numeric and the categorical features; returns (B, K, outputs).
            batch: numeric (B, n), categorical (B, c), target and weight (B,), as `TableDataset`
                returns them.
        """
        numeric, categorical, _, _ = batch
        outputs = model(numeric, categorical)
        return self.of_outputs(outputs if model.training else self.joined(outputs), batch)

    def of_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss of the outputs of a model, (B, K, outputs), for a batch: a scalar."""
        _, _, target, weight = batch
        loss = self.per_sample(outputs, target)
        if self.factors is not None:
            weight = weight * self.factors.to(weight)[target]
        mean: Tensor = (loss * weight).mean()
        return mean

    def per_sample(self, outputs: Tensor, target: Tensor) -> Tensor:
        """The loss of each sample without its weight, (B,), float32 or float64.

        Args:
            outputs: (B, K, outputs).
            target: the third part of a batch.
        """
        outputs = _full(outputs)
        samples, members, _ = outputs.shape
        if self.target.task == "classification":
            every = target.repeat_interleave(members)
            of_all = F.cross_entropy(outputs.flatten(0, 1), every, reduction="none")
            return of_all.view(samples, members).mean(1)
        wanted = target.to(outputs)
        if self.target.task == "multilabel":
            wanted = wanted[:, None].expand_as(outputs)
            of_labels = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
            return of_labels.mean((1, 2))
        errors = wanted[:, None, None] - outputs
        if self.quantiles:
            levels = outputs.new_tensor(self.quantiles)
            return torch.maximum(levels * errors, (levels - 1) * errors).mean((1, 2))
        return errors.square().mean((1, 2))

    def joined(self, outputs: Tensor) -> Tensor:
        """The outputs whose predictions are the mean of the members': (B, 1, outputs).

        Args:
            outputs: (B, K, outputs).
        """
        outputs = _full(outputs)
        if outputs.shape[1] == 1:
            return outputs
        if self.target.task == "classification":
            return outputs.log_softmax(2).logsumexp(1, keepdim=True)
        if self.target.task == "multilabel":
            yes, no = F.logsigmoid(outputs), F.logsigmoid(-outputs)
            return yes.logsumexp(1, keepdim=True) - no.logsumexp(1, keepdim=True)
        return outputs.mean(1, keepdim=True)

    def predictions(self, outputs: Tensor) -> Tensor:
        """What users see of the outputs (B, K, outputs) of a model: float64.

        Returns:
            The probabilities of the classes (B, C) or of the labels (B, labels), or values in the
            target's unit, (B,), with quantiles (B, number of quantiles). A higher quantile is never
            below a lower one.
        """
        outputs = outputs.double()
        if self.target.task == "classification":
            return outputs.softmax(-1).mean(1)
        if self.target.task == "multilabel":
            return outputs.sigmoid().mean(1)
        values = outputs.mean(1) * self.target.scale + self.target.center
        if not self.quantiles:
            return values[:, 0]
        # Sorted values are never worse: Chernozhukov, Fernandez-Val and Galichon, "Quantile and
        # probability curves without crossing", Econometrica 2010.
        places = torch.tensor(self.quantiles).argsort().argsort().to(values.device)
        return values.sort(1).values[:, places]

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what the scores need of its samples; see `Scoring`."""
        numeric, categorical, target, weight = batch
        outputs = model(numeric, categorical)
        rows = {"predictions": self.predictions(outputs), "target": target, "weight": weight}
        return self.of_outputs(self.joined(outputs), batch), rows

    def collector(self, group: Group) -> TableScores:
        """What collects these rows of all ranks, and makes scores of them. Collective."""
        return TableScores(self.target, self.quantiles, group)


def warn_of_not_finite(rows: int) -> None:
    """Log how many rows have predictions that are not finite, if there are any."""
    if rows:
        logger.warning(
            "the predictions of %s are not finite: the model got too large values",
            plural(rows, "row"),
        )


def rows_not_finite(predictions: np.ndarray) -> int:
    """The number of rows with a prediction that is not finite, of N rows: (N,) or (N, values)."""
    return int((~np.isfinite(predictions)).reshape(len(predictions), -1).any(1).sum())


def check_has_classes(target: TargetValues, key: str) -> None:
    """Check that a key of the configuration, which is "balanced", has classes to balance.

    Raises:
        ConfigError: the task is no classification.
    """
    if target.task != "classification":
        raise ConfigError(
            f"{key} is balanced, but the table's task is {target.task}",
            f"leave {key} out: it is for a classification",
        )


def class_factors(target: TargetValues) -> Tensor:
    """The factor of each class that makes all classes weigh the same: float64 (C,).

    Its mean over the training rows is 1. The factor of a class without training rows is 1.
    """
    shares = torch.tensor(target.shares, dtype=torch.float64)
    found = shares > 0
    return torch.where(found, 1 / (shares * found.sum()), torch.ones_like(shares))


def _full(outputs: Tensor) -> Tensor:
    """Outputs in float32 or float64, as the losses need them."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
