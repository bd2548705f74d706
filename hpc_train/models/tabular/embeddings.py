"""Features of a table as vectors: B rows, n numeric and c categorical features, width E.

The embeddings of numbers are those of Gorishniy et al., "On embeddings for numerical features in
tabular deep learning", https://arxiv.org/abs/2203.05556. All features are computed at once, without
a loop over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hpc_train.models.initial import Initial
from hpc_train.models.tabular.sizes import FREQUENCIES, NumericKind, TableSizes

FREQUENCY_STD = 0.1  # of the trained frequencies when training begins


def parameter(*shape: int) -> Parameter:
    """A parameter of zeros. `models.initial` gives it its values."""
    return Parameter(torch.empty(shape).zero_())


class NumericEmbedding(nn.Module):
    """Turns numbers into vectors. Each kind computes them in its own way in `embed`.

    A missing number (NaN) counts as 0, the centre of its feature, and adds a trained vector. This
    vector begins at 0.

    Args:
        features: number of features n.
        width: width E of the vectors.
    """

    stacked_vectors = ("bias", "missing")

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.bias = parameter(features, width)
        self.missing = parameter(features, width)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        width = self.bias.shape[1]
        return {"bias": Initial(std=width**-0.5), "missing": Initial()}

    def embed(self, x: Tensor) -> Tensor:
        """Turn numbers of shape (B, n) into vectors (B, n, E). No number is missing."""
        raise NotImplementedError

    def forward(self, numeric: Tensor) -> Tensor:
        """Turn numbers of shape (B, n), NaN where one is missing, into vectors (B, n, E)."""
        numeric = numeric.to(self.bias.dtype)
        missing = numeric.isnan()
        vectors = self.embed(numeric.masked_fill(missing, 0.0))
        return torch.addcmul(
            vectors, missing.unsqueeze(2).to(vectors.dtype), self.missing.to(vectors.dtype)
        )


class PiecewiseLinearEmbedding(NumericEmbedding):
    """Embeds a number by the bins of its feature.

    Bin t of T counts how far the number has come in it: 0 below the bin, 1 above it, and the share
    of the way in between. A linear layer of each feature makes a vector of these. A number outside
    of all bins counts as the nearest edge, so that no value of a new table is far from all that was
    trained on.

    The layer begins as a straight line over all bins, as that of TabM does (Gorishniy et al.,
    https://arxiv.org/abs/2410.24210): its weights are those of the bins, which begin at 0, and a
    slope that all bins of a feature share.

    Args:
        edges: the edges of each feature's bins. They are constants.
        width: width E of the vectors.
    """

    left: Tensor
    rate: Tensor
    rise: Tensor

    def __init__(self, edges: Sequence[Sequence[float]], width: int) -> None:
        features, bins = len(edges), max(len(one) for one in edges) - 1
        super().__init__(features, width)
        self.weight = parameter(features, bins, width)
        self.slope = parameter(features, width)
        # Features with fewer bins have some in which every number has come as far as 0.
        pad = [0.0] * bins
        left = [[*one[:-1], *pad][:bins] for one in edges]
        rate = [[*(1 / (high - low) for low, high in pairwise(one)), *pad][:bins] for one in edges]
        self.register_buffer("left", torch.tensor(left), persistent=False)
        self.register_buffer("rate", torch.tensor(rate), persistent=False)
        # With it, values that are evenly spread over the bins have a variance of 1.
        rise = [[math.sqrt(12) / (len(one) - 1)] for one in edges]
        self.register_buffer("rise", torch.tensor(rise), persistent=False)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        slope = Initial(std=self.slope.shape[1] ** -0.5)
        return {**super().initials(), "weight": Initial(), "slope": slope}

    def encode(self, x: Tensor) -> Tensor:
        """How far numbers of shape (B, n) have come in each bin, (B, n, T), from 0 to 1."""
        return (x.unsqueeze(2) - self.left).mul_(self.rate).clamp_(0, 1)

    def embed(self, x: Tensor) -> Tensor:
        """Turn numbers of shape (B, n) into vectors (B, n, E)."""
        weight = self.weight + (self.slope * self.rise).unsqueeze(1)
        bias = self.bias - math.sqrt(3) * self.slope
        way = self.encode(x).transpose(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), way, weight).transpose(0, 1)


class PeriodicEmbedding(NumericEmbedding):
    """Embeds a number by sines and cosines with trained frequencies, a linear layer and a ReLU.

    Args:
        features: number of features n.
        width: width E of the vectors.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.frequency = parameter(features, FREQUENCIES)
        self.weight = parameter(features, 2 * FREQUENCIES, width)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins. The sum of the squares of sines and cosines is constant."""
        own = {
            "frequency": Initial(std=FREQUENCY_STD),
            "weight": Initial(std=FREQUENCIES**-0.5),
        }
        return super().initials() | own

    def embed(self, x: Tensor) -> Tensor:
        """Turn numbers of shape (B, n) into vectors (B, n, E)."""
        angle = x.unsqueeze(2) * (2 * math.pi * self.frequency)
        waves = torch.cat((angle.sin(), angle.cos()), 2).transpose(0, 1)
        return torch.baddbmm(self.bias.unsqueeze(1), waves, self.weight).relu().transpose(0, 1)


class LinearEmbedding(NumericEmbedding):
    """Embeds a number by a vector times the number, and another vector added.

    Args:
        features: number of features n.
        width: width E of the vectors.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__(features, width)
        self.weight = parameter(features, width)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {**super().initials(), "weight": Initial(std=self.bias.shape[1] ** -0.5)}

    def embed(self, x: Tensor) -> Tensor:
        """Turn numbers of shape (B, n) into vectors (B, n, E)."""
        return torch.addcmul(self.bias, x.unsqueeze(2), self.weight)


class CategoricalEmbedding(nn.Module):
    """Looks up a trained vector for each code of each feature, in one table for all features.

    The rows of the unknown code, 0, begin as zeros. They are trained only if the training data has
    unknown categories, such as rare ones that preparing has cut off. If it has none, an unknown
    category adds nothing to a model's input.

    Args:
        codes: number of codes of each feature.
        width: width E of the vectors.
    """

    offsets: Tensor

    def __init__(self, codes: Sequence[int], width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(codes), width)
        starts = [sum(codes[:place]) for place in range(len(codes))]
        self.unknown = tuple(starts)
        self.register_buffer("offsets", torch.tensor(starts), persistent=False)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        std = self.table.embedding_dim**-0.5
        return {"table.weight": Initial(std=std, blank=self.unknown)}

    def forward(self, categorical: Tensor) -> Tensor:
        """Turn integer codes of shape (B, c) into vectors (B, c, E)."""
        vectors: Tensor = self.table(categorical + self.offsets)
        return vectors


class FeatureEmbedding(nn.Module):
    """Turns all features of a row into vectors, the numeric ones first.

    Args:
        sizes: the sizes of the table.
        width: width E of the vectors.
        numeric: how numbers become vectors.
    """

    def __init__(self, sizes: TableSizes, width: int, numeric: NumericKind) -> None:
        super().__init__()
        self.numeric: NumericEmbedding | None = None
        self.categorical: CategoricalEmbedding | None = None
        if sizes.edges and numeric == "piecewise_linear":
            self.numeric = PiecewiseLinearEmbedding(sizes.edges, width)
        elif sizes.edges:
            kind = PeriodicEmbedding if numeric == "periodic" else LinearEmbedding
            self.numeric = kind(len(sizes.edges), width)
        if sizes.codes:
            self.categorical = CategoricalEmbedding(sizes.codes, width)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Turn numbers (B, n) and codes (B, c) into vectors of shape (B, n + c, E)."""
        if self.categorical is None:
            assert self.numeric is not None  # a table has features
            numbers: Tensor = self.numeric(numeric)
            return numbers
        categories: Tensor = self.categorical(categorical)
        if self.numeric is None:
            return categories
        return torch.cat((self.numeric(numeric), categories), 1)
