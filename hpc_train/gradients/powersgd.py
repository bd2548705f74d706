"""PowerSGD: sums of matrices over nodes, by approximations of low rank.

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
    """Implements `Compressor` by one step of a power iteration per matrix, from where the last led.

    The sum S of the n ranks' matrices M (rows, columns), residuals included, is approximated by
    P^T Q: P (rank, rows) is an orthonormal basis of what B S^T spans, where B (rank, columns) is
    such a basis of the last step's Q, and Q is P S. As S is a sum, so are B S^T and P S, of what
    each rank computes from its own M. Each keeps M - P^T Q / n. (The factors lie across the paper's
    so that they are read along their rows: products are then several times as fast.)

    Vectors, and matrices whose two factors have more than half as many elements as they, are summed
    as they are. On equal processors factors and products have the same bits on all ranks.

    Args:
        rank: of the approximations.
        warmup_steps: number of steps at the start in which nothing is approximated.
    """

    def __init__(self, rank: int, warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        self.rank = rank
        self._bases: dict[tuple[int, int], Tensor] = {}  # B, by bucket number and piece

    def load(self, totals: Mapping[int, Tensor], ranks: int, steps: int | None = None) -> None:
        """Take this rank's share; the bases, which depend on the layout, begin anew."""
        super().load(totals, ranks, steps)
        self._bases.clear()

    def _sum_compressed(
        self, cross: Cross, number: int, part: Tensor, pieces: Sequence[Tensor]
    ) -> Coroutine[None]:
        """Sum the first factors together with what is not approximated, then the second factors."""
        results = [_matrix(piece) for piece in pieces]
        kept = self.with_residual(number, part)
        if not is_finite(kept):
            kept.fill_(math.nan)  # a single one might meet a zero of B and be passed over
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
            kept.sub_(part, alpha=1 / cross.group.size)
            for i in firsts.keys() - lefts.keys():
                mine[i].zero_()
            self.residuals[number] = kept
            self._bases |= {(number, i): _orthonormal(right) for i, right in rights.items()}

    def _pays(self, matrix: Tensor) -> bool:
        """Whether both factors together have at most half of the elements."""
        return matrix.dim() == 2 and 2 * self.rank * sum(matrix.shape) <= matrix.numel()

    def _basis(self, number: int, index: int, matrix: Tensor) -> Tensor:
        """B: of the last step, or at first drawn, alike on all ranks."""
        known = self._bases.get((number, index))
        if known is not None:
            return known
        seeded = torch.Generator().manual_seed(1_000_003 * number + index)
        drawn = torch.randn(self.rank, matrix.shape[1], generator=seeded, dtype=matrix.dtype)
        return drawn.to(matrix.device)


def _matrix(piece: Tensor) -> Tensor:
    """A view of two dimensions, the rows and all else; of one, if the piece has no more."""
    return piece.flatten(1) if piece.dim() > 1 else piece.flatten()


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a tensor of one dimension, in the shapes of others."""
    pieces = flat.split([each.numel() for each in like])
    return [piece.view_as(each) for piece, each in zip(pieces, like, strict=True)]


def _summed(
    cross: Cross, number: int, tensors: Mapping[int, Tensor]
) -> Coroutine[dict[int, Tensor]]:
    """The sums of several tensors over the ranks, by one operation."""
    if not tensors:
        return {}
    together = torch.cat([tensor.flatten() for tensor in tensors.values()])
    yield from cross.sum_(together, number)
    return dict(zip(tensors, _cut(together, list(tensors.values())), strict=True))


def _orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis that spans the rows, by Householder's reflections.

    Unlike Gram and Schmidt's way it is one whatever the rows are: also if they are zero.
    """
    if not is_finite(matrix):
        return torch.full_like(matrix, math.nan)
    basis: Tensor = torch.linalg.qr(matrix.T).Q.T
    return basis
