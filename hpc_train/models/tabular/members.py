"""The parts that differ between the members of an ensemble: K members, B rows.

The members share the matrices of their layers. Each has its own factors in front of and behind a
matrix, as in Wen et al., "BatchEnsemble", https://arxiv.org/abs/2002.06715. A model of a table
computes all of them at once, as in Gorishniy et al., "TabM", https://arxiv.org/abs/2410.24210. Each
layer is then one matrix product over all rows and members.

Between two layers there is a ReLU, which commutes with factors above 0. So the factors in front of
a matrix are those behind the one before, and only the first layer has both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpc_train.models.initial import Initial
from hpc_train.models.tabular.embeddings import parameter


class MemberScale(nn.Module):
    """Each member's factors and biases of a layer's results.

    Args:
        members: number of members K.
        width: number of the layer's results C.
    """

    stacked_vectors = ("weight", "bias")

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(members, width)
        self.bias = parameter(members, width)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {"weight": Initial(mean=1.0), "bias": Initial()}

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift results of shape (B, K, C), of all or some of the C; the same shape."""
        return torch.addcmul(self.bias.to(x.dtype), x, self.weight.to(x.dtype))


class MemberHeads(nn.Module):
    """A linear layer of each member, which shares nothing with the others.

    Args:
        members: number of members K.
        width: width C of the input.
        outputs: number of results of each member.
    """

    stacked_vectors = ("bias",)

    def __init__(self, members: int, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(members, width, outputs)
        self.bias = parameter(members, outputs)

    def initials(self) -> dict[str, Initial]:
        """How each parameter begins."""
        return {"weight": Initial(std=self.weight.shape[1] ** -0.5), "bias": Initial()}

    def forward(self, x: Tensor) -> Tensor:
        """Turn x of shape (B, K, C) into results of shape (B, K, outputs)."""
        members = torch.baddbmm(self.bias.unsqueeze(1), x.transpose(0, 1), self.weight)
        return members.transpose(0, 1)
