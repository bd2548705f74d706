"""The cross-entropy over a shared vocabulary against torch's; and what is never in memory."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.collectives import connect
from hpc_train.collectives.alone import AloneCollectives
from hpc_train.errors import DataError, UserError
from hpc_train.mpi.group import Group
from hpc_train.parallel.tensor import parallelize
from hpc_train.parallel.vocabulary import VocabParallelCrossEntropy, VocabParallelEmbedding
from tests.parallel.test_tensor import assembled

several = pytest.mark.mpi


def logits_of(rows, vocab, scale=1.0):
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).double()


def in_parts(group, logits, targets, ignore_index=-100):
    """The loss, and the gradient of the whole logits, by the group's ranks. Collective."""
    mine = logits.chunk(group.size, 1)[group.rank].clone().requires_grad_()
    loss = VocabParallelCrossEntropy(connect(group), ignore_index)(mine, targets)
    (3 * loss).backward()
    parts = group.comm.allgather(mine.grad) if group.comm else [mine.grad]
    return loss.detach(), torch.cat(parts, 1)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["", "large"])
@pytest.mark.parametrize("ignored", [-100, 0, 11])
def test_loss_and_gradient_are_torchs(group, scale, ignored):
    targets = torch.arange(24) % 12
    if ignored == -100:
        targets[::5] = ignored
    whole = logits_of(24, 12, scale).requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=ignored)
    (3 * expected).backward()
    loss, gradient = in_parts(group, whole.detach(), targets, ignored)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_losses_of_single_targets_are_torchs(group):
    model, text = Language(12), (torch.arange(24) % 12).view(2, 12)
    model.loss = nn.CrossEntropyLoss(reduction="none")
    text[1, 3:] = 5
    targets, over = text.clone(), torch.arange(24.0).double()
    targets[:, ::3] = targets[1] = -100
    reference = deepcopy(model)
    plan = dict.fromkeys(("token", "output", "loss"), "vocab")
    specs = parallelize(model, plan, connect(group))
    losses = [one.of(text, targets) for one in (model, reference)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-14)
    for one in losses:
        (one * over).sum().backward()
    found = assembled(model.token.weight.grad, specs.get("token.weight"), group)
    torch.testing.assert_close(found, reference.token.weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(1, 2, 3, 4)
def test_with_all_targets_ignored_the_loss_is_nan_as_in_torch(group):
    loss, _ = in_parts(group, logits_of(4, 12), torch.full((4,), -100))
    assert loss.isnan()


@pytest.mark.parametrize(
    "shapes", [((2, 12, 5), (2, 5)), ((12,), ()), ((4, 12), (4, 12)), ((3, 48), (12,))]
)
def test_shapes_that_only_torchs_loss_takes_are_refused(shapes):
    logits, targets = torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.long)
    with pytest.raises(UserError, match=r"flatten them to \(N, V\) and \(N\)"):
        VocabParallelCrossEntropy(AloneCollectives(Group()))(logits, targets)


@pytest.mark.parametrize("token", [-1, 48])
def test_tokens_outside_of_the_vocabulary_are_told_and_not_ignored(token):
    rows, over = nn.Parameter(torch.zeros(12, 2)), AloneCollectives(Group(1, 4))
    with pytest.raises(DataError, match=f"token {token} is not in the vocabulary of 48"):
        VocabParallelEmbedding(rows, over, cut_output=False)(torch.tensor([[3, token]]))
    with pytest.raises(DataError, match=f"token {token} is not in the vocabulary of 48"):
        VocabParallelCrossEntropy(over)(torch.zeros(2, 12), torch.tensor([3, token]))


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that operators make."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(made) if isinstance(t, torch.Tensor)}
        return made


class Language(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(vocab, 8)
        self.output = nn.Linear(8, vocab, bias=False)
        self.output.weight = self.token.weight
        self.loss = nn.CrossEntropyLoss()
        self.double()

    def forward(self, text):
        return self.of(text, text)

    def of(self, text, targets):
        return self.loss(self.output(self.token(text)).flatten(0, 1), targets.flatten())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_neither_whole_logits_nor_the_whole_table_are_ever_made(group, cut):
    vocab, text = 12 * 37, torch.arange(24).view(2, 12)
    model = Language(vocab)
    reference = deepcopy(model)
    plan = dict.fromkeys(("token", "output", "loss"), "vocab")
    specs = parallelize(model, plan, connect(group), sequence_parallel=cut)
    with Shapes() as shapes:
        model(text).backward()
    reference(text).backward()
    found = assembled(model.token.weight.grad, specs.get("token.weight"), group)
    torch.testing.assert_close(found, reference.token.weight.grad, rtol=1e-12, atol=1e-14)
    assert (24, vocab // group.size) in shapes.seen
    assert any(vocab in shape for shape in shapes.seen) == (group.size == 1)
