from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from hpc_train.models import GPT
from hpc_train.models.dropout import SampleDropout
from hpc_train.seeds import mix, mix_each

SHAPE = {"vocab": 11, "sequence": 8, "layers": 2, "hidden": 16, "heads": 2}


def gpt(**changes):
    torch.manual_seed(0)
    return GPT(**{**SHAPE, **changes}).double()


def tokens(samples=3, length=8):
    return torch.randint(11, (samples, length), generator=torch.Generator().manual_seed(1))


def test_a_token_sees_only_those_before_it():
    model, text = gpt(), tokens()
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_shapes_and_a_shorter_text():
    assert gpt()(tokens(2, 5)).shape == (2, 5, 11)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits():
    model, text = gpt(), tokens()
    targets = text.roll(-1, 1)
    expected = F.cross_entropy(model(text).reshape(-1, 11), targets.reshape(-1))
    assert torch.allclose(model(text, targets), expected)
    assert model(text, targets).item() == pytest.approx(math.log(11), rel=0.05)


def test_documents_of_one_sample_have_the_losses_that_they_have_alone():
    model, text = gpt(), tokens(2)
    targets = text.roll(-1, 1)
    targets[0, 5:] = targets[1, 7] = -100
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6]])
    of_document = [(0, 0, 3), (0, 3, 5), (1, 0, 1), (1, 1, 7)]
    losses = [
        F.cross_entropy(model(text[None, row, a:b])[0], targets[row, a:b], reduction="sum")
        for row, a, b in of_document
    ]
    model.loss_over = "token"
    assert model(text, targets, positions).item() == pytest.approx(
        sum(losses).item() / 12, rel=1e-13
    )
    model.loss_over = "sample"
    by_sample = (sum(losses[:2]) / 5 + sum(losses[2:]) / 7).item() / 2
    assert model(text, targets, positions).item() == pytest.approx(by_sample, rel=1e-13)


@pytest.mark.parametrize("tie", [True, False])
def test_tied_embeddings_are_one_parameter(tie):
    model = gpt(tie_embeddings=tie)
    assert (model.head.output.weight is model.embedding.token.weight) == tie
    assert ("head.output.weight" in dict(model.named_parameters())) != tie


def test_initial_weights_are_those_of_gpt2():
    model = GPT(vocab=500, sequence=64, layers=4, hidden=128, heads=4)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(8) if ends else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_masks_belong_to_samples_and_not_to_batches():
    model, text = gpt(dropout=0.3), tokens(4)
    seeds = [mix(7, i) for i in range(4)]
    model.seed_samples(seeds)
    whole = model(text)
    model.seed_samples(seeds[2:])
    assert torch.allclose(model(text[2:]), whole[2:], atol=1e-12)
    model.seed_samples([mix(8, i) for i in range(4)])
    assert not torch.allclose(model(text), whole)


def test_no_masks_without_training():
    model, text = gpt(dropout=0.3).eval(), tokens()
    assert torch.equal(model(text), model(text))


def test_dropout_keeps_the_mean_and_drops_the_share():
    dropout = SampleDropout(0.25, place=1)
    dropout.seeds = [3]
    out = dropout(torch.ones(1, 400, 500))
    assert (out == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sections_of_a_mask_are_parts_of_the_whole_one(dim, parts):
    x = torch.ones(3, 8, 4)
    whole = SampleDropout(0.5, place=1)
    whole.seeds = [5, 6, 7]
    found = []
    for index, part in enumerate(x.chunk(parts, dim)):
        section = SampleDropout(0.5, place=1)
        section.seeds, section.section = whole.seeds, (dim, index, parts)
        found.append(section(part))
    assert torch.equal(torch.cat(found, dim), whole(x))


def test_samples_and_places_have_masks_that_agree_by_chance_only():
    masks = []
    for place in (0, 1):
        dropout = SampleDropout(0.5, place)
        dropout.seeds = [0, 1, 2]
        masks += [*dropout(torch.ones(3, 101, 99)).flatten(1)]
    # 10 000 elements agree in half of the places, with a standard deviation of 0.005.
    for one, other in combinations(masks, 2):
        assert (one == other).double().mean().item() == pytest.approx(0.5, abs=0.025)


def test_masks_of_many_samples_are_those_of_each():
    x = torch.ones(9, 70, 1001)  # more hashes than are computed at once
    dropout = SampleDropout(0.5, place=1)
    dropout.seeds = range(9)
    whole = dropout(x)
    for number in range(9):
        dropout.seeds = [number]
        assert torch.equal(dropout(x[:1])[0], whole[number])


def test_masks_are_those_of_any_number_of_threads():
    x, before = (
        torch.ones(9, 70, 1001),
        torch.get_num_threads(),
    )  # more hashes than are made at once
    dropout = SampleDropout(0.5, place=1)
    dropout.seeds = range(9)
    try:
        torch.set_num_threads(1)
        alone = dropout(x)
        torch.set_num_threads(2)
        assert torch.equal(dropout(x), alone)
    finally:
        torch.set_num_threads(before)


def test_forgotten_seeds_are_an_error():
    with pytest.raises(ValueError, match="call seed_samples"):
        gpt(dropout=0.1)(tokens())


def test_many_seeds_at_once_are_those_of_mix():
    last = [0, 1, 77, 2**40]
    assert mix_each((3, 4), last) == [mix(3, 4, one) for one in last]


def test_mix_gives_unrelated_seeds():
    seeds = {mix(a, b) for a in range(100) for b in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
