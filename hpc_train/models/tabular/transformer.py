"""The transformer of tables: each feature is a token. B rows, T tokens, C channels.

It is the FT-Transformer of Gorishniy et al., "Revisiting deep learning models for tabular data",
https://arxiv.org/abs/2106.11959. T is the number of features plus 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpc_train.models.attention import Attention
from hpc_train.models.dropout import SampleDropout
from hpc_train.models.initial import Initial
from hpc_train.models.linear import Linear
from hpc_train.models.tabular.embeddings import FeatureEmbedding, parameter
from hpc_train.models.tabular.module import NormHead, TabularModel
from hpc_train.models.tabular.sizes import NumericKind, TableSizes, gated_width


class TokenEmbedding(nn.Module):
    """The features' vectors as tokens, behind a token of its own on which the head relies (CLS)."""

    def __init__(self, sizes: TableSizes, hidden: int, numeric: NumericKind) -> None:
        super().__init__()
        self.features = FeatureEmbedding(sizes, hidden, numeric)
        self.cls = parameter(hidden)

    def initials(self) -> dict[str, Initial]:
        """How each parameter of its own begins."""
        return {"cls": Initial(std=len(self.cls) ** -0.5)}

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Turn numbers (B, n) and codes (B, c) into (B, T, C)."""
        vectors: Tensor = self.features(numeric, categorical)
        cls = self.cls.to(vectors.dtype).expand(len(vectors), 1, -1)
        return torch.cat((cls, vectors), 1)


class GatedMlp(nn.Module):
    """Two linear layers, with a ReGLU between them: results times the ReLU of other results.

    Args:
        hidden: channels C.
        groups: number of groups that the results between the layers are divided into. Rows of the
            first layer are ordered group by group, so that a rank's consecutive rows are whole
            groups of both kinds of results.
        dropout: share of the results between the layers that training drops.
        place: number of the dropout in the model.
    """

    def __init__(self, hidden: int, groups: int, dropout: float, place: int) -> None:
        super().__init__()
        width = gated_width(hidden, groups)
        self.group_width = width // groups
        self.up = Linear(hidden, 2 * width)
        self.dropout = SampleDropout(dropout, place)
        self.down = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape."""
        value, gate = self.up(x).unflatten(-1, (-1, 2, self.group_width)).unbind(-2)
        transformed: Tensor = self.down(self.dropout((value * gate.relu()).flatten(-2)))
        return transformed


class TransformerBlock(nn.Module):
    """Attention and gated MLP, each behind a norm and added to the residual stream.

    There is no norm before the attention of the first block, as in the paper.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, index: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden) if index else nn.Identity()
        self.attention = Attention(hidden, heads, causal=False)
        self.dropout_attention = SampleDropout(dropout, 2 * index)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp = GatedMlp(hidden, heads, dropout, 2 * index + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x of shape (B, T, C); returns the same shape."""
        x = x + self.dropout_attention(self.attention(self.norm_attention(x)))
        added: Tensor = self.mlp(self.norm_mlp(x))
        return x + added


class TabularTransformer(TabularModel):
    """The FT-Transformer: a transformer whose tokens are a row's features.

    Args:
        sizes: the sizes of the table.
        layers: number of blocks.
        hidden: channels C of the residual stream.
        heads: attention heads; they divide `hidden`.
        dropout: share of activations that training drops after each attention and inside of each
            MLP.
        numeric: how numbers become vectors.
    """

    def __init__(
        self,
        *,
        sizes: TableSizes,
        layers: int,
        hidden: int,
        heads: int,
        dropout: float = 0.0,
        numeric: NumericKind = "piecewise_linear",
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(sizes, hidden, numeric)
        self.blocks = nn.ModuleList(
            TransformerBlock(hidden, heads, dropout, i) for i in range(layers)
        )
        self.head = NormHead(hidden, sizes.outputs)
        self.tensor_plan = {
            "blocks.*.attention.qkv": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.dropout": "colwise",
            "blocks.*.mlp.down": "rowwise",
        }
        self.complete()
