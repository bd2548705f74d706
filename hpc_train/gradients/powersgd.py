"""PowerSGD: sums matrices over nodes by approximations of low rank.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", https://arxiv.org/abs/1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpc_train.collectives.coroutines import Coroutine
from hpc_train.gradients.compression import ErrorFeedback, is_finite

if TYPE_CHECKING:
    from hpc_train.collectives.ring import Cross


class PowerSgd(ErrorFeedback):
    """Implements `Compressor` by one step of a power iteration per matrix.

    The iteration starts from the result of the last step. S is the sum of the n ranks' matrices
    M (rows, columns), residuals included. It is approximated by P^T Q:

    - B (rank, columns) is an orthonormal basis of the rows of the last step's Q.
    - P (rank, rows) is an orthonormal basis of the rows of B S^T.
    - Q (rank, columns) is P S.

    Because S is a sum, B S^T and P S are sums over the ranks, too: each rank computes its term from
    its own M. Each rank keeps M - P^T Q / n as its residual. The factors are transposed in
    comparison with the paper, so that products read them along their rows and are several times as
    fast.

    Vectors are summed exactly. So are matrices whose two factors together have more than half as
    many elements as the matrix. On equal processors, factors and products have the same bits on all
    ranks.

    Args:
        rank: rank of the approximations.
        warmup_steps: number of steps at the start in which nothing is approximated.
    """

    def __init__(self, rank: int, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        self.rank = rank
        self._bases: dict[tuple[int, int], Tensor] = {}  # B, by bucket number and piece

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Take this rank's share of the residuals (see `Compressor`)."""
        super().load(totals, ranks, steps)
        self._bases.clear()  # they depend on the layout, which may be another one now

    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum B S^T and all exact pieces in one operation, then P S in another."""
        results = [_matrix(piece) for piece in pieces]
        kept = self.with_residual(number, part)
        if not is_finite(kept):
            kept.fill_(math.nan)  # a product could lose a single NaN where B is zero
        mine = _cut(kept, results)
        low = [i for i, matrix in enumerate(mine) if self._pays(matrix)]
        firsts = dict(enumerate(mine))
        firsts |= {i: self._basis(number, i, mine[i]) @ mine[i].T for i in low}
        sums = yield from _summed(cross, number, firsts)
        lefts = {i: _orthonormal(sums[i]) for i in low}
        rights = yield from _summed(cross, number, {i: lefts[i] @ mine[i] for i in low})
        for i, result in enumerate(results):
            result.copy_(lefts[i].T @ rights[i] if i in lefts else sums[i])
        if is_finite(part):
            kept.sub_(part, alpha=1 / cross.group.size)  # `mine` are views of `kept`
            for i in firsts.keys() - lefts.keys():
                mine[i].zero_()
            self.residuals[number] = kept
            self._bases |= {(number, i): _orthonormal(right) for i, right in rights.items()}

    def _pays(self, matrix: Tensor) -> bool:
        """Whether both factors together have at most half of the elements."""
        return matrix.dim() == 2 and 2 * self.rank * sum(matrix.shape) <= matrix.numel()

    def _basis(self, number: int, index: int, matrix: Tensor) -> Tensor:
        """B from the last step; in the first step random, the same on all ranks."""
        known = self._bases.get((number, index))
        if known is not None:
            return known
        seeded = torch.Generator().manual_seed(1_000_003 * number + index)
        drawn = torch.randn(self.rank, matrix.shape[1], generator=seeded, dtype=matrix.dtype)
        return drawn.to(matrix.device)


def _matrix(piece: Tensor) -> Tensor:
    """A view of a piece as a matrix (rows, all other dimensions); a vector stays a vector."""
    return piece.flatten(1) if piece.dim() > 1 else piece.flatten()


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a tensor of one dimension into views that have the shapes of other tensors."""
    pieces = flat.split([each.numel() for each in like])
    return [piece.view_as(each) for piece, each in zip(pieces, like, strict=True)]


def _summed(
    cross: Cross, number: int, tensors: Mapping[int, Tensor]
) -> Coroutine[dict[int, Tensor]]:
    """The sums of several tensors over the ranks, computed by one operation."""
    if not tensors:
        return {}
    together = torch.cat([tensor.flatten() for tensor in tensors.values()])
    yield from cross.sum_(together, number)
    return dict(zip(tensors, _cut(together, list(tensors.values())), strict=True))


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis whose span contains the rows, by Householder reflections.

    Unlike the Gram-Schmidt process, they give a basis even if rows are zero or dependent.
    """
    if not is_finite(matrix):
        return torch.full_like(matrix, math.nan)
    basis: Tensor = torch.linalg.qr(matrix.T).Q.T
    return basis
