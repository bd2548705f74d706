"""Your own module under any layout: tensor- and pipeline-parallel on scikit-learn's digits.

Run mpirun -np 4 python examples/own_parallel.py --parallel.tp 2 --parallel.pp 2, or another layout.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hpc_train

DEFAULTS = [
    *("--run.dir", "runs/layers", "--run.epochs", "6"),
    *("--data.batch", "64", "--data.micro_batch", "8"),
    *("--optimizer.lr", "0.003", "--precision.dtype", "float64"),
]


class Layer(nn.Module):
    """A wide layer with a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        """Transform x of shape (samples, width)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A stack of layers, with the two attributes that layouts need."""

    # The modules that `forward` calls one after another. The ranks of a pipeline divide them.
    stages = ("first", "layers.*", "last")
    # The linear layers that tensor-parallel ranks share: into the wide part, then out of it.
    tensor_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        """Compute logits (samples, 10) from pixels (samples, 64)."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def main(runtime):
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    training = TensorDataset(pixels[:1500], labels[:1500])
    validation = TensorDataset(pixels[1500:], labels[1500:])

    config = hpc_train.load_config(options=[*DEFAULTS, *sys.argv[1:]])
    # With the class, and not a module, each rank makes the initial values of its own part.
    task = hpc_train.TrainingTask(Classifier, training, loss, validation=validation)
    trainer = hpc_train.Trainer(config, task, runtime)
    trainer.train()
    held_out = trainer.validate()  # every rank must call it
    runtime.print(f"loss on held-out digits: {held_out:.12f}")


def loss(model, batch):
    pixels, labels = batch
    return nn.functional.cross_entropy(model(pixels), labels)


if __name__ == "__main__":
    sys.exit(hpc_train.run(main))
