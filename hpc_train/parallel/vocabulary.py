"""Embedding and loss over a vocabulary that the ranks of a tensor-parallel group share.

No rank holds the whole embedding table or whole logits. The method is from Shoeybi et al.,
"Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from hpc_train.collectives import Collectives
from hpc_train.collectives.regions import summed, summed_and_cut
from hpc_train.errors import DataError, UserError
from hpc_train.parallel.linear import TOKENS


class VocabParallelEmbedding(nn.Module):
    """An embedding that ranks share: this rank holds V / tp rows, from row `rank * V / tp` on.

    `num_embeddings` is the whole V.

    Args:
        weight: this rank's rows, (V / tp, C).
        over: the ranks that share the embedding.
        cut_output: whether each rank returns only its part of the tokens (dimension 1).
    """

    def __init__(self, weight: Parameter, over: Collectives, *, cut_output: bool) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = len(weight) * over.group.size, weight.shape[1]
        self.weight = weight
        self.over, self.cut_output = over, cut_output

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Embed int64 tokens of shape (B, T) in (B, T, C). Collective over the tensor group.

        With `cut_output` the result has the shape (B, T / tp, C).

        Raises:
            DataError: a token is not in the vocabulary.
        """
        _check_inside(input, self.num_embeddings)
        local = input - self.over.group.rank * len(self.weight)
        outside = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(outside, 0), self.weight)
        x = x.masked_fill(outside.unsqueeze(-1), 0)
        return summed_and_cut(x, self.over, TOKENS) if self.cut_output else summed(x, self.over)


class VocabParallelCrossEntropy(nn.Module):
    """The cross-entropy of logits, where each rank holds its part of the vocabulary.

    Args:
        over: the ranks that share the logits.
        ignore_index: targets with this value do not count.
        reduction: "none" for the loss of each target, 0 for those that do not count, or "mean" for
            the mean over the targets that count.
    """

    def __init__(
        self, over: Collectives, ignore_index: int = -100, *, reduction: str = "mean"
    ) -> None:
        super().__init__()
        self.over, self.ignore_index, self.reduction = over, ignore_index, reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The loss in nats, the same on all ranks. Collective over the tensor group.

        It is a scalar, or with reduction none of shape (N). It is computed in float32 if the logits
        have 16 bits.

        Args:
            input: this rank's part of the logits, of shape (N, V / tp).
            target: int64 of shape (N).

        Raises:
            UserError: the shapes are others. torch's own loss would accept some of them.
            DataError: a target that counts is not in the vocabulary.
        """
        if input.dim() != 2 or target.shape != input.shape[:1]:
            raise UserError(
                f"the vocab-parallel loss has logits of shape {list(input.shape)} "
                f"and targets of shape {list(target.shape)}",
                "flatten them to (N, V) and (N), as flatten(0, -2) does: a rank has V / tp columns",
            )
        counted = target != self.ignore_index
        if target.is_cpu:  # to choose those that count, a GPU would have to be waited for
            _check_inside(target[counted], input.shape[-1] * self.over.group.size)
        losses: Tensor = _CrossEntropy.apply(input, target, self.over)
        losses = losses.masked_fill(~counted, 0)
        return losses if self.reduction == "none" else losses.sum() / counted.sum()


@contextmanager
def whole_logits_missed(model: nn.Module, over: Collectives) -> Iterator[None]:
    """A context for a loss. It says why torch's own loss of a part of the logits fails.

    Args:
        model: has a `tensor_plan`, if ranks share its layers.
        over: the ranks that share them.

    Raises:
        UserError: a target is beyond the logits that this rank has.
    """
    try:
        yield
    except IndexError as error:
        divided = over.group.size > 1 and "vocab" in getattr(model, "tensor_plan", {}).values()
        if not divided or "out of bounds" not in str(error):
            raise
        what = str(error).rstrip(".")
        raise UserError(
            f"the loss fails ({what}); a rank may have only its part of the logits",
            "in place of F.cross_entropy let the model have an nn.CrossEntropyLoss, with the style "
            "vocab in `tensor_plan`",
        ) from error


def _check_inside(tokens: Tensor, vocab: int) -> None:
    """Check tokens as torch's own layers do, but not on a GPU: the check would wait for it."""
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < vocab:
            raise DataError(f"token {token} is not in the vocabulary of {vocab}", "enlarge it")


class _CrossEntropy(torch.autograd.Function):
    """log(sum(exp(logits))) - logits[target] of each row, from two small sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, over: Collectives) -> Tensor:
        ctx.dtype = logits.dtype
        largest = logits.max(dim=-1).values
        largest = largest.to(torch.promote_types(logits.dtype, torch.float32))
        over.max_(largest)
        shifted = logits - largest.unsqueeze(-1)
        local = targets - over.group.rank * logits.shape[-1]
        inside = (local >= 0) & (local < logits.shape[-1])
        index = local.masked_fill(~inside, 0).unsqueeze(-1)
        picked = shifted.gather(-1, index).squeeze(-1).masked_fill(~inside, 0)
        share = shifted.exp_()
        sums = torch.stack([share.sum(-1), picked])
        over.sum_(sums)
        share /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(share, index, inside)
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        share, index, inside = ctx.saved_tensors
        dlogits = share * dy.unsqueeze(-1)
        dlogits.scatter_add_(-1, index, -(dy * inside).unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None
