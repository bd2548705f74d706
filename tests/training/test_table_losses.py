"""Losses, predictions and scores of models of tables, in plain terms."""

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.utils.class_weight import compute_sample_weight

from hpc_train.data.tables.features import TargetValues
from hpc_train.errors import ConfigError
from hpc_train.mpi.group import Group
from hpc_train.training.table_losses import TableLoss

SAMPLES, MEMBERS = 40, 3
CLASSES = TargetValues(
    task="classification", names=("y",), classes=("a", "b", "c"), shares=(0.5, 0.3, 0.2)
)
LABELS = TargetValues(task="multilabel", names=("p", "q"), shares=(0.4, 0.1))
VALUE = TargetValues(task="regression", names=("y",), center=100.0, scale=10.0)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(target, weight=None):
    return None, None, target, torch.ones(SAMPLES).double() if weight is None else weight


def test_the_loss_of_classes_is_the_mean_of_the_members_own_losses():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 3), torch.arange(SAMPLES) % 3
    weight = drawn(1, SAMPLES).abs()
    found = TableLoss(CLASSES).of_outputs(outputs, batch_of(target, weight))
    own = [-outputs[:, k].log_softmax(1)[range(SAMPLES), target] for k in range(MEMBERS)]
    torch.testing.assert_close(found, (weight * sum(own) / MEMBERS).mean())


def test_the_loss_of_labels_is_the_mean_over_the_labels():
    outputs = drawn(0, SAMPLES, MEMBERS, 2)
    target = (drawn(1, SAMPLES, 2) > 0).double()
    found = TableLoss(LABELS).of_outputs(outputs, batch_of(target))
    chance = outputs.sigmoid()
    right = torch.where(target[:, None] > 0, chance, 1 - chance)
    torch.testing.assert_close(found, -right.log().mean())


def test_the_loss_of_a_value_is_the_squared_error_of_the_scaled_target():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 1), drawn(1, SAMPLES)
    found = TableLoss(VALUE).of_outputs(outputs, batch_of(target))
    torch.testing.assert_close(found, (outputs[..., 0] - target[:, None]).square().mean())


def test_the_loss_of_quantiles_is_least_at_the_quantiles():
    target = drawn(1, 1000)
    levels = (0.1, 0.5, 0.8)
    loss = TableLoss(VALUE, quantiles=levels)
    best = torch.quantile(target, torch.tensor(levels).double())

    def at(values):
        outputs = values.expand(1000, 2, 3)
        return loss.of_outputs(outputs, (None, None, target, torch.ones(1000))).item()

    for place in range(3):
        for step in (-0.2, 0.2):
            moved = best.clone()
            moved[place] += step
            assert at(moved) > at(best)


def test_quantiles_do_not_cross():
    outputs = torch.tensor([[[1.0, 3.0, 2.0]], [[0.0, 1.0, 3.0]]])
    found = TableLoss(VALUE, quantiles=(0.5, 0.9, 0.1)).predictions(outputs)
    torch.testing.assert_close(found, torch.tensor([[120.0, 130, 110], [110, 130, 100]]).double())


def test_balanced_classes_weigh_the_same_and_one_on_average():
    counts = torch.tensor([20, 12, 8])
    target = torch.arange(3).repeat_interleave(counts)
    loss = TableLoss(CLASSES, class_weights="balanced")
    outputs = drawn(0, SAMPLES, 1, 3)
    plain = TableLoss(CLASSES).per_sample(outputs, target)
    found = loss.of_outputs(outputs, batch_of(target))
    expected = torch.tensor(compute_sample_weight("balanced", target.numpy()))
    torch.testing.assert_close(found, (plain * expected).mean())
    assert expected.mean().item() == pytest.approx(1)


def test_a_class_without_training_rows_weighs_one():
    target = TargetValues(
        task="classification", names=("y",), classes=("a", "b", "c"), shares=(0.8, 0.0, 0.2)
    )
    factors = TableLoss(target, class_weights="balanced").factors
    assert factors.tolist() == pytest.approx([0.5 / 0.8, 1.0, 0.5 / 0.2])


def test_half_precision_outputs_have_a_full_loss():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 3).bfloat16(), torch.arange(SAMPLES) % 3
    found = TableLoss(CLASSES).per_sample(outputs, target)
    assert found.dtype == torch.float32
    expected = TableLoss(CLASSES).per_sample(outputs.double(), target)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_predictions_are_means_over_the_members():
    outputs = drawn(0, SAMPLES, MEMBERS, 3).float()
    found = TableLoss(CLASSES).predictions(outputs)
    torch.testing.assert_close(found, outputs.double().softmax(2).mean(1))
    found = TableLoss(LABELS).predictions(outputs)
    torch.testing.assert_close(found, outputs.double().sigmoid().mean(1))
    found = TableLoss(VALUE).predictions(outputs[..., :1])
    torch.testing.assert_close(found, 100 + 10 * outputs[..., 0].double().mean(1))
    found = TableLoss(VALUE, quantiles=(0.1, 0.5, 0.9)).predictions(outputs)
    torch.testing.assert_close(found, 100 + 10 * outputs.double().mean(1).sort(1).values)


def test_the_loss_of_held_out_samples_is_that_of_the_predictions():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 3), torch.arange(SAMPLES) % 3
    found = TableLoss(CLASSES).measure(lambda *_: outputs, batch_of(target))[0]
    chance = outputs.softmax(2).mean(1).numpy()
    assert found.item() == pytest.approx(metrics.log_loss(target, chance))
    wanted = (drawn(1, SAMPLES, 2) > 0).double()
    found = TableLoss(LABELS).measure(lambda *_: outputs[..., :2], batch_of(wanted))[0]
    chance = outputs[..., :2].sigmoid().mean(1)
    expected = torch.nn.functional.binary_cross_entropy(chance, wanted)
    torch.testing.assert_close(found, expected)
    values = drawn(1, SAMPLES)
    found = TableLoss(VALUE).measure(lambda *_: outputs[..., :1], batch_of(values))[0]
    torch.testing.assert_close(found, (outputs[..., 0].mean(1) - values).square().mean())


def test_only_a_model_in_training_has_the_loss_of_its_members():
    class Constant(torch.nn.Module):
        def forward(self, *_):
            return outputs

    outputs, target = drawn(0, SAMPLES, MEMBERS, 3), torch.arange(SAMPLES) % 3
    model, loss = Constant(), TableLoss(CLASSES)
    in_training = loss(model, batch_of(target))
    torch.testing.assert_close(in_training, loss.of_outputs(outputs, batch_of(target)))
    held_out = loss(model.eval(), batch_of(target))
    torch.testing.assert_close(held_out, loss.measure(model, batch_of(target))[0])
    assert held_out < in_training


def scored(loss, outputs, target):
    rows = loss.measure(lambda *_: outputs, batch_of(target))[1]
    collector = loss.collector(Group())
    collector.add([(range(SAMPLES), rows)])
    return collector.scores()


def test_scores_of_classes():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 3), torch.arange(SAMPLES) % 3
    found = scored(TableLoss(CLASSES), outputs, target)
    chance = outputs.softmax(2).mean(1).numpy()
    assert list(found) == ["accuracy", "balanced_accuracy", "auc", "log_loss", "calibration_error"]
    assert found["accuracy"] == pytest.approx((chance.argmax(1) == target.numpy()).mean())
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(target, chance, multi_class="ovr"))
    assert found["log_loss"] == pytest.approx(metrics.log_loss(target, chance))


def test_scores_of_labels_leave_out_those_that_are_not_defined():
    outputs = drawn(0, SAMPLES, MEMBERS, 2)
    target = torch.stack([torch.zeros(SAMPLES), torch.arange(SAMPLES) % 2], 1)
    found = scored(TableLoss(LABELS), outputs, target)
    chance = outputs.sigmoid().mean(1).numpy()
    wanted = target.numpy()
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(wanted[:, 1], chance[:, 1]))
    assert found["accuracy"] == pytest.approx(((chance > 0.5) == wanted).mean())


def test_scores_of_values_are_in_the_unit_of_the_target():
    outputs, target = drawn(0, SAMPLES, MEMBERS, 1), drawn(1, SAMPLES)
    found = scored(TableLoss(VALUE), outputs, target)
    errors = 10 * (outputs[..., 0].mean(1) - target)
    assert found["rmse"] == pytest.approx(errors.square().mean().sqrt().item())
    assert found["mae"] == pytest.approx(errors.abs().mean().item())
    assert list(found) == ["rmse", "r2", "mae"]


@pytest.mark.parametrize("levels", [(0.1, 0.5), (0.05, 0.9), (0.1, 0.1000001)])
def test_scores_of_quantiles(levels):
    outputs, target = drawn(0, SAMPLES, MEMBERS, 2), drawn(1, SAMPLES)
    found = scored(TableLoss(VALUE, quantiles=levels), outputs, target)
    unit, predicted = 100 + 10 * target, 100 + 10 * outputs.mean(1).sort(1).values
    for place, level in enumerate(levels):
        expected = metrics.mean_pinball_loss(unit, predicted[:, place], alpha=level)
        assert found[f"pinball_{level}"] == pytest.approx(expected)
    own = [found[f"pinball_{level}"] for level in levels]
    assert found["pinball"] == pytest.approx(np.mean(own))
    assert ("rmse" in found) == (0.5 in levels)


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        (VALUE, {"class_weights": "balanced"}, "data.class_weights is balanced, but .* regression"),
        (
            LABELS,
            {"class_weights": "balanced"},
            "data.class_weights is balanced, but .* multilabel",
        ),
    ],
)
def test_options_that_the_task_cannot_have_are_refused(target, options, why):
    with pytest.raises(ConfigError, match=why):
        TableLoss(target, **options)
