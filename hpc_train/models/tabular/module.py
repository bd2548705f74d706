"""Models of tables that join all features of a row by a linear layer, and what all models share.

B rows, F features of width E, K members, T tokens, C channels. `TabularMlp` is an ensemble as in
Gorishniy et al., "TabM", https://arxiv.org/abs/2410.24210. `TabularResnet` is from Gorishniy et
al., "Revisiting deep learning models for tabular data", https://arxiv.org/abs/2106.11959. They read
rows as `data.tables` encodes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.models.dropout import SampleDropout, seeds_near
from hpc_train.models.initial import Initial, fill
from hpc_train.models.linear import Linear
from hpc_train.models.lora import weight_of
from hpc_train.models.tabular.embeddings import FeatureEmbedding, parameter
from hpc_train.models.tabular.members import MemberHeads, MemberScale
from hpc_train.models.tabular.sizes import NumericKind, TableSizes
from hpc_train.models.tabular.transfer import TableTransfer


class TabularModel(nn.Module):
    """What the models of tables share: equal blocks between an embedding and a head.

    `stages` and `tensor_plan` say how ranks can share a model (see docs/reference/parallel.md),
    `memory_blocks` which modules can be recomputed (docs/how-to/memory.md). The embedding and the
    head are not divided.
    """

    stages = ("embedding", "blocks.*", "head")
    memory_blocks = ("blocks.*",)
    tensor_plan: Mapping[str, str]

    embedding: nn.Module
    blocks: nn.ModuleList
    head: nn.Module

    table: Mapping[str, Any] | None = None
    """What its checkpoints tell of its table, with the keys `features` (a tree of
    `data.tables.TableFeatures`), `quantiles` and `pretraining`. Then it can take weights of other
    tables."""

    def __init__(self) -> None:
        super().__init__()
        # Drawn first, because modules draw numbers only if they are filled when they are built.
        self.initial_seed = int(torch.randint(1 << 62, (), device="cpu"))

    def complete(self) -> None:
        """Give the parameters their values, once all modules are there."""
        self._initials = initials_of(self)
        found = (module for module in self.modules() if isinstance(module, SampleDropout))
        self._dropouts = [dropout for dropout in found if dropout.share]
        fill(self)

    def initial(self, name: str) -> Initial:
        """How the parameter of this name begins."""
        return self._initials[name]

    def foreign_weights(self, about: Mapping[str, Any], *, whole: bool) -> TableTransfer | None:
        """Choose how the weights of a model of another table are converted for this model.

        Args:
            about: what is told beside the weights, such as `about` of a checkpoint.
            whole: whether all tensors are taken.

        Returns:
            None if nothing is told of the weights' table: then all tensors have to fit.
        """
        if self.table is None or "features" not in about:
            return None
        return TableTransfer(self, list(self._initials), self.table, about)

    def seed_samples(self, seeds: Sequence[int]) -> None:
        """Set the seeds of dropout for the next forward pass, one for each row."""
        kept = seeds_near(self, seeds)
        for dropout in self._dropouts:
            dropout.seeds = kept

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Compute predictions: logits of classes or labels, scaled values, or their quantiles.

        Args:
            numeric: scaled numbers (B, n), NaN where one is missing.
            categorical: integer codes (B, c).

        Returns:
            Predictions of each member, (B, K, outputs). K is 1 for a model without members.
        """
        x = self.embedding(numeric, categorical)
        for block in self.blocks:
            x = block(x)
        predictions: Tensor = self.head(x)
        return predictions


def initials_of(model: nn.Module) -> dict[str, Initial]:
    """How each parameter begins: as its module says, or as usual for layers of torch.

    The variance of a linear layer's results is that of its inputs; its biases begin at 0.
    """
    found: dict[str, Initial] = {}
    for name, module in model.named_modules():
        own: dict[str, Initial] = {}
        if hasattr(module, "initials"):
            own = module.initials()
        elif isinstance(module, nn.Linear):
            own = {"weight": Initial(std=module.in_features**-0.5), "bias": Initial()}
        elif isinstance(module, nn.LayerNorm):
            own = {"weight": Initial(mean=1.0), "bias": Initial()}
        found |= {f"{name}.{key}": how for key, how in own.items()}
    return found


class RowEmbedding(nn.Module):
    """A row as one vector for each member: a linear layer of all features' vectors.

    A member multiplies each feature by its own factor. The members differ in these from the
    beginning. The layer is computed feature by feature first, then for the members, because there
    are more members than features' widths: it is K F + E F products in place of K E F.

    Args:
        sizes: the sizes of the table.
        hidden: width C of the result.
        width: width E of the features' vectors.
        numeric: how numbers become vectors.
        members: number of members K.
    """

    def __init__(
        self, sizes: TableSizes, hidden: int, width: int, numeric: NumericKind, members: int = 1
    ) -> None:
        super().__init__()
        self.features = FeatureEmbedding(sizes, width, numeric)
        self.project = Linear(sizes.features * width, hidden, bias=members == 1)
        self.factors = MemberFactors(members, sizes.features) if members > 1 else None

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Turn numbers (B, n) and codes (B, c) into (B, K, C)."""
        vectors = self.features(numeric, categorical)
        if self.factors is None:
            row: Tensor = self.project(vectors.flatten(1))
            return row.unsqueeze(1)
        weight = weight_of(self.project).unflatten(1, vectors.shape[1:])  # (C, F, E)
        products = torch.bmm(vectors.transpose(0, 1), weight.permute(1, 2, 0))  # (F, B, C)
        rows: Tensor = self.factors(products)
        return rows


class MemberFactors(nn.Module):
    """Each member's sum of the features' vectors, multiplied by the member's own factors.

    Args:
        members: number of members K.
        features: number of features F.
    """

    stacked_vectors = ("weight",)

    def __init__(self, members: int, features: int) -> None:
        super().__init__()
        self.weight = parameter(members, features)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {"weight": Initial(std=1.0)}

    def forward(self, vectors: Tensor) -> Tensor:
        """Sum vectors of shape (F, B, C) over the features; returns (B, K, C)."""
        sums: Tensor = self.weight @ vectors.flatten(1)
        return sums.view(len(sums), *vectors.shape[1:]).transpose(0, 1).contiguous()


class MlpLayer(nn.Module):
    """What follows a product in an MLP: the members' factors and biases, a ReLU, and dropout.

    Args:
        members: number of members K. A model without members has its biases in the product.
        hidden: width C.
        dropout: share of results that training drops.
        place: number of the dropout in the model.
    """

    def __init__(self, members: int, hidden: int, dropout: float, place: int) -> None:
        super().__init__()
        self.scale = MemberScale(members, hidden) if members > 1 else None
        self.dropout = SampleDropout(dropout, place)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, K, C); returns the same shape."""
        made: Tensor
        made = self.dropout(x.relu()) if self.scale is None else self.scale(x, self.dropout)
        return made


class MlpEmbedding(nn.Module):
    """The first layer of an MLP; the arguments are those of `TabularMlp`."""

    def __init__(self, row: RowEmbedding, layer: MlpLayer) -> None:
        super().__init__()
        self.row, self.layer = row, layer

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Turn numbers (B, n) and codes (B, c) into (B, K, C)."""
        embedded: Tensor = self.layer(self.row(numeric, categorical))
        return embedded


class MlpBlock(nn.Module):
    """Two layers of an MLP. They come in pairs so that ranks which share them need one sum."""

    def __init__(self, hidden: int, members: int, dropout: float, index: int) -> None:
        super().__init__()
        self.up = Linear(hidden, hidden, bias=members == 1)
        self.after_up = MlpLayer(members, hidden, dropout, 2 * index + 1)
        self.down = Linear(hidden, hidden, bias=members == 1)
        self.after_down = MlpLayer(members, hidden, dropout, 2 * index + 2)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, K, C); returns the same shape."""
        transformed: Tensor = self.after_down(self.down(self.after_up(self.up(x))))
        return transformed


class TabularMlp(TabularModel):
    """An MLP on the features' vectors, or an ensemble of such MLPs that share their matrices.

    It has 1 + 2 x layers hidden layers.

    Args:
        sizes: the sizes of the table.
        layers: number of blocks, of two layers each.
        hidden: width C of the layers.
        dropout: share of activations that training drops after each layer.
        embedding_width: width E of the features' vectors.
        numeric: how numbers become vectors.
        members: number of members K.
    """

    def __init__(
        self,
        *,
        sizes: TableSizes,
        layers: int,
        hidden: int,
        dropout: float = 0.0,
        embedding_width: int = 16,
        numeric: NumericKind = "piecewise_linear",
        members: int = 1,
    ) -> None:
        super().__init__()
        self.embedding = MlpEmbedding(
            RowEmbedding(sizes, hidden, embedding_width, numeric, members),
            MlpLayer(members, hidden, dropout, 0),
        )
        self.blocks = nn.ModuleList(MlpBlock(hidden, members, dropout, i) for i in range(layers))
        self.tensor_plan = {
            "blocks.*.up": "colwise",
            "blocks.*.after_up.dropout": "colwise",
            "blocks.*.down": "rowwise",
        }
        if members > 1:
            self.tensor_plan["blocks.*.after_up.scale"] = "colwise"
            self.head = MemberHeads(members, hidden, sizes.outputs)
        else:
            self.head = Linear(hidden, sizes.outputs)
        self.complete()


class ResnetBlock(nn.Module):
    """Norm, linear layer, ReLU, dropout, linear layer and dropout, added to the residual stream.

    The norm is over a row's channels. The paper's BatchNorm is over the rows of a batch, so its
    results would depend on how ranks and micro-batches divide them.
    """

    def __init__(self, hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = Linear(hidden, 2 * hidden)
        self.dropout_up = SampleDropout(dropout, 2 * index + 1)
        self.down = Linear(2 * hidden, hidden)
        self.dropout_down = SampleDropout(dropout, 2 * index + 2)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, 1, C); returns the same shape."""
        between = self.dropout_up(self.up(self.norm(x)).relu())
        added: Tensor = self.dropout_down(self.down(between))
        return x + added


class NormHead(nn.Module):
    """Norm, ReLU and linear layer of a row's first vector."""

    def __init__(self, hidden: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.output = Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Turn x of shape (B, 1 or T, C) into predictions of shape (B, 1, outputs)."""
        predictions: Tensor = self.output(self.norm(x[:, :1].contiguous()).relu())
        return predictions


class TabularResnet(TabularModel):
    """A residual network on the features' vectors.

    Args:
        sizes: the sizes of the table.
        layers: number of blocks.
        hidden: width C of the residual stream. Inside a block it is twice as large.
        dropout: share of activations that training drops after each layer of a block.
        embedding_width: width E of the features' vectors.
        numeric: how numbers become vectors.
    """

    def __init__(
        self,
        *,
        sizes: TableSizes,
        layers: int,
        hidden: int,
        dropout: float = 0.0,
        embedding_width: int = 16,
        numeric: NumericKind = "piecewise_linear",
    ) -> None:
        super().__init__()
        self.embedding = RowEmbedding(sizes, hidden, embedding_width, numeric)
        self.blocks = nn.ModuleList(ResnetBlock(hidden, dropout, i) for i in range(layers))
        self.head = NormHead(hidden, sizes.outputs)
        self.tensor_plan = {
            "blocks.*.up": "colwise",
            "blocks.*.dropout_up": "colwise",
            "blocks.*.down": "rowwise",
        }
        self.complete()
