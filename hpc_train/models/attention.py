"""Multi-head self-attention. Shapes use B samples, T tokens, C channels, H heads."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.kept import kept_with_its_graph
from hpc_train.models.linear import Linear


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        hidden: channels C.
        heads: number of heads H, which divides C.
        causal: whether a token attends to itself and to those before only.
    """

    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = hidden // heads, causal
        self.qkv = Linear(hidden, 3 * hidden)
        self.out = Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within x of shape (B, T, C); returns the same shape.

        Args:
            x: the activations.
            mask: what is added to the logarithms of weights, (B, 1, T, T). It takes the place of
                `causal`.
        """
        # Rows are ordered head by head, so that a rank's consecutive rows are whole heads. The
        # number of heads comes from the product, because each rank sees only its own heads.
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # (B, T, H, 3, C/H)
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind()  # (B, H, T, C/H) each
        attend = F.scaled_dot_product_attention  # it saves its inputs, which are kept, and y
        how: dict[str, Any] = {"is_causal": self.causal} if mask is None else {"attn_mask": mask}
        y = kept_with_its_graph(attend, query, key, value, **how)
        joined: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return joined
