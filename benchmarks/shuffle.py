"""The quality of shuffling by blocks, beside a full shuffle and beside no shuffle.

    python -m benchmarks.shuffle [--samples 8388608] [--rounds 5]

A data set that is stored in blocks is shuffled by blocks and within windows (`SampleOrder`). The
worst case for that is a set that is sorted by what it teaches. So each sample has a value that
grows evenly with its place, from 0 to 1. One epoch is looked at for each of --rounds seeds:

- a step: the standard deviation of the mean value of the samples of a step, divided by that of
  samples drawn independently. 1 is that of chance; more means that a step sees a part of the set.
- 64 steps: the same for the mean over 64 steps in a row.
- together: the share of a step's samples that have a neighbour, of their own block, in the step.
- loss: of a softmax regression on ten classes of points, which lie in the set one class after the
  other. It has learned one epoch of 2^18 samples by gradient descent. Blocks and windows have the
  same share of the set as above. The loss is that of 2^14 other points.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from benchmarks import harness
from hpc_train.data.order import SHUFFLED_TOGETHER, SampleOrder

BATCH = 512
BLOCK = 128  # samples of 1024 tokens of 16 bits in a block of 256 KiB
LEARNED, TESTED = 1 << 18, 1 << 14
CLASSES, FEATURES = 10, 16
RATE = 0.5
Order = Callable[[int, int], SampleOrder]  # of a number of samples and a seed


def spread(order: SampleOrder, together: int) -> float:
    """The deviation of the mean place of `together` steps, in units of independent samples'."""
    batch = BATCH * together
    count = order.samples // batch
    means = [
        order.at(0, np.arange(n * batch, (n + 1) * batch)).mean() / order.samples
        for n in range(count)
    ]
    return float(np.sqrt(np.mean((np.array(means) - 0.5) ** 2) * 12 * batch))


def neighbours(order: SampleOrder) -> float:
    """The share of the samples of a step that have another one of their block in the step."""
    found = []
    for step in np.linspace(1, order.steps_per_epoch, 200, dtype=int):
        blocks = order.indices(int(step), 0, BATCH) // BLOCK
        _, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        found.append(float((counts[inverse] > 1).mean()))
    return statistics.fmean(found)


def points(rng: np.random.Generator, centres: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Points around the centres of their classes, and a 1: (samples, features + 1)."""
    found = centres[labels] + rng.normal(size=(len(labels), FEATURES))
    return np.concatenate([found, np.ones((len(labels), 1))], axis=1)


def log_probabilities(weights: np.ndarray, some: np.ndarray) -> np.ndarray:
    """The logarithm of the probability of each class: (samples, classes)."""
    outputs = some @ weights
    outputs -= outputs.max(1, keepdims=True)
    found: np.ndarray = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
    return found


def learned(order: SampleOrder, seed: int) -> float:
    """The loss on other points after one epoch."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES)) * 0.7
    labels = np.arange(order.samples) * CLASSES // order.samples
    data = points(rng, centres, labels)
    test_labels = rng.integers(CLASSES, size=TESTED)
    test = points(rng, centres, test_labels)
    weights = np.zeros((FEATURES + 1, CLASSES))
    for step in range(1, order.steps_per_epoch + 1):
        chosen = order.indices(step, 0, BATCH)
        error = np.exp(log_probabilities(weights, data[chosen]))
        error[np.arange(BATCH), labels[chosen]] -= 1
        rate = RATE * (1 - (step - 1) / order.steps_per_epoch)
        weights -= rate * data[chosen].T @ error / BATCH
    return -float(log_probabilities(weights, test)[np.arange(TESTED), test_labels].mean())


def main() -> None:
    """Measure all orders, and print a table."""
    parser = harness.parser(__doc__ or "", samples=1 << 23, rounds=5)
    options = parser.parse_args()
    share = SHUFFLED_TOGETHER / options.samples  # of the set, which a window has

    def by_blocks(part: float) -> Order:
        def made(samples: int, seed: int) -> SampleOrder:
            window = max(BATCH, round(part * share * samples))
            block = max(1, BLOCK * samples // options.samples)
            return SampleOrder(samples, BATCH, seed=seed, block=block, together=window)

        return made

    orders: dict[str, Order] = {
        "full": lambda samples, seed: SampleOrder(samples, BATCH, seed=seed),
        "blocks, windows of 2^20 (the default)": by_blocks(1),
        "blocks, windows of 2^16": by_blocks(1 / 16),
        "none": lambda samples, seed: SampleOrder(samples, BATCH, seed=seed, shuffle=False),
    }
    measures: dict[str, Callable[[Order, int], float]] = {
        "a step": lambda make, seed: spread(make(options.samples, seed), 1),
        "64 steps": lambda make, seed: spread(make(options.samples, seed), 64),
        "together": lambda make, seed: neighbours(make(options.samples, seed)),
        "loss": lambda make, seed: learned(make(LEARNED, seed), seed),
    }
    figures, ratios = {}, {}
    for measure, of in measures.items():
        found = {
            name: [of(make, n) for n in range(options.rounds)] for name, make in orders.items()
        }
        harness.show(measure, "", found, "full")
        for name, values in found.items():
            figures[f"{measure}, {name}"] = statistics.median(values)
            ratios[f"{measure}, {name} / full"] = harness.paired_ratio(found, name, "full")
    harness.finish("shuffle", ratios, figures, options.json)


if __name__ == "__main__":
    main()
