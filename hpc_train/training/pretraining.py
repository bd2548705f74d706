"""Pretraining of models of tables without targets: masked cells, and contrast of corrupted rows.

Which cells of a row are hidden or replaced follows from the row's seed alone, which the Trainer
sets. So the losses are the same on every layout. B rows, K members of the model, n numeric and c
categorical features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_train.data.tables.features import MISSING_CODE, TableFeatures
from hpc_train.models.dropout import uniforms
from hpc_train.seeds import mix

# Places of random numbers of a row, which no dropout layer has.
CELLS, VALUES, SECOND_VIEW = 1 << 40, 2 << 40, 3 << 40


class MaskedCells:
    """Hides cells of each row, and lets the model predict them from the others.

    A hidden number is shown as missing, and so is a hidden category. The model has an output for
    each numeric feature, and one for each code of each categorical feature. The loss of a row is
    the sum over its hidden cells of the squared error of a scaled number, or of the cross-entropy
    of a code, divided by the expected number of hidden cells. Large errors of numbers count
    linearly (Huber's loss). Cells that are missing in the table are not predicted.

    The method is that of BERT (Devlin et al., https://arxiv.org/abs/1810.04805), for cells as in
    Rubachev et al., "Revisiting pretraining objectives for tabular deep learning",
    https://arxiv.org/abs/2207.03208.

    Args:
        features: the features of the table.
        share: the share of cells that are hidden.
    """

    together = 1

    def __init__(self, features: TableFeatures, share: float) -> None:
        self.numbers = len(features.numeric)
        self.codes = [one.codes for one in features.categorical]
        self.share = share
        self.seeds: Sequence[int] = ()

    def seed_samples(self, seeds: Sequence[int]) -> None:
        """Set the seeds of the next batch, one for each row."""
        self.seeds = seeds

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, a scalar; rows count by their weights."""
        numeric, categorical, _, weight = batch
        drawn = uniforms(self.seeds, CELLS, self.numbers + len(self.codes), numeric.device)
        hidden = drawn < self.share
        of_numbers, of_codes = hidden[:, : self.numbers], hidden[:, self.numbers :]
        shown = numeric.masked_fill(of_numbers, torch.nan)
        outputs = model(shown, categorical.masked_fill(of_codes, MISSING_CODE))
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        total = outputs.new_zeros(outputs.shape[:2])  # (B, K)
        if self.numbers:
            known = of_numbers & ~numeric.isnan()
            wanted = numeric.masked_fill(~known, 0.0).to(outputs).unsqueeze(1)
            guessed = outputs[:, :, : self.numbers]
            errors = F.huber_loss(guessed, wanted.expand_as(guessed), reduction="none")
            total = total + (errors * known.unsqueeze(1)).sum(2)
        begin = self.numbers
        for place, codes in enumerate(self.codes):
            known = of_codes[:, place] & (categorical[:, place] != MISSING_CODE)
            logits = outputs[:, :, begin : begin + codes].transpose(1, 2)  # (B, codes, K)
            code = categorical[:, place, None].expand(-1, outputs.shape[1])
            errors = F.cross_entropy(logits, code, reduction="none")
            total = total + errors * known.unsqueeze(1)
            begin += codes
        expected = self.share * (self.numbers + len(self.codes))
        mean: Tensor = (total.mean(1) * weight).mean() / expected
        return mean


class CorruptedRows:
    """Contrasts each row with corrupted ones, and lets the model tell which one is its own.

    It is SCARF (Bahri et al., https://arxiv.org/abs/2106.15147): a corrupted row has some of its
    cells replaced by values that are drawn from the feature's distribution in the training rows.
    The model turns both rows into vectors. The loss of a row is the cross-entropy of finding its
    own corrupted row, by the cosine of the vectors, among those of its group. A group is a fixed
    number of neighbours in the step's order, because the loss must not depend on how ranks and
    micro-batches divide the step. The paper takes all rows of a batch.

    Numbers are drawn evenly between the edges of their features' bins, which are quantiles. Where a
    value of a feature is very frequent, edges fall together, and it is drawn less often than it
    occurs. Missing numbers are not drawn. Codes are drawn as often as they occur.

    Args:
        features: the features of the table.
        share: the share of cells that are replaced.
        together: number of rows in a group.
    """

    def __init__(self, features: TableFeatures, share: float, together: int) -> None:
        self.share, self.together = share, together
        self.seeds: Sequence[int] = ()
        self.edges, self.bins = padded([one.edges for one in features.numeric])
        cumulative = [torch.tensor(one.shares).double().cumsum(0) for one in features.categorical]
        # Behind the last code there are ones, so that rounding never draws a code that is not one.
        every = [torch.where(one >= one[-1], 1.0, one).tolist() for one in cumulative]
        self.cumulative, _ = padded(every)

    def seed_samples(self, seeds: Sequence[int]) -> None:
        """Set the seeds of the next batch, one for each row."""
        self.seeds = seeds

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch of whole groups, a scalar; rows count by their weights."""
        numeric, categorical, _, weight = batch
        others = self.corrupted(numeric, categorical)
        seed_samples: Any = getattr(model, "seed_samples", None)
        if seed_samples is not None:  # the views have dropout masks of their own
            seed_samples([*self.seeds, *(mix(seed, SECOND_VIEW) for seed in self.seeds)])
        both = [torch.cat(pair) for pair in zip((numeric, categorical), others, strict=True)]
        vectors = model(*both)
        vectors = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=2)
        views = vectors.transpose(0, 1).unflatten(1, (2, -1))  # (K, 2, B, width)
        losses = []
        for first in range(0, len(numeric), self.together):
            own, other = views[:, :, first : first + self.together].unbind(1)
            found = torch.arange(own.shape[1], device=own.device).expand(len(own), -1)
            cosines = (own @ other.transpose(1, 2)).transpose(1, 2)  # (K, corrupted, own)
            losses.append(F.cross_entropy(cosines, found, reduction="none").mean(0))
        mean: Tensor = (torch.cat(losses) * weight).mean()
        return mean

    def corrupted(self, numeric: Tensor, categorical: Tensor) -> tuple[Tensor, Tensor]:
        """The rows with some cells replaced: numeric (B, n) and categorical (B, c)."""
        numbers, cells = numeric.shape[1], numeric.shape[1] + categorical.shape[1]
        replaced = uniforms(self.seeds, CELLS, cells, numeric.device) < self.share
        drawn = uniforms(self.seeds, VALUES, cells, numeric.device)
        if numbers:
            values = self._numbers(drawn[:, :numbers]).to(numeric)
            numeric = torch.where(replaced[:, :numbers], values, numeric)
        if cells > numbers:
            cumulative = self.cumulative.to(numeric.device)
            places = drawn[:, numbers:].t().contiguous()
            codes = torch.searchsorted(cumulative, places, right=True).t()
            categorical = torch.where(replaced[:, numbers:], codes.to(categorical), categorical)
        return numeric, categorical

    def _numbers(self, drawn: Tensor) -> Tensor:
        """Values of the numeric features at these shares of their distributions, (B, n)."""
        edges, bins = self.edges.to(drawn.device), self.bins.to(drawn.device)
        position = drawn * bins
        bin_ = torch.minimum(position.long(), bins - 1)
        low = edges.t().gather(0, bin_)
        high = edges.t().gather(0, bin_ + 1)
        return low + (position - bin_) * (high - low)


def padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Rows of unequal lengths as one tensor, float64, each filled up with its last value.

    Returns:
        The tensor (rows, longest), and the number of steps between the values of each row, int64.
    """
    longest = max(map(len, rows), default=0)
    filled = [[*row, *[row[-1]] * (longest - len(row))] for row in rows]
    steps = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int64)
    return torch.tensor(filled, dtype=torch.float64), steps
