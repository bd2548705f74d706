"""Your own module and data set under the Trainer: a small network on scikit-learn's wines.

Run python examples/own_model.py [--section.key VALUE ...], or run it by mpirun, horovodrun or srun.
"""

import sys

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import hpc_train

# All keys of `hpc-train train --help` apply except data.path and those of section model. Options on
# the command line override these.
DEFAULTS = [
    *("--run.dir", "runs/wines", "--run.epochs", "30"),
    *("--data.batch", "24", "--data.validation_every", "50"),
    *("--optimizer.lr", "0.01", "--optimizer.schedule", "cosine"),
]


def main(runtime):
    table = load_wine()
    features = torch.tensor(table.data, dtype=torch.float32)
    features = (features - features.mean(0)) / features.std(0)
    wines = TensorDataset(features, torch.tensor(table.target))
    order = torch.randperm(len(wines), generator=torch.Generator().manual_seed(0)).tolist()
    training = torch.utils.data.Subset(wines, order[:144])
    validation = torch.utils.data.Subset(wines, order[144:])

    config = hpc_train.load_config(options=[*DEFAULTS, *sys.argv[1:]])
    torch.manual_seed(config.run.seed)
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    task = hpc_train.TrainingTask(model, training, loss, validation=validation)
    trainer = hpc_train.Trainer(config, task, runtime)
    trainer.train()
    held_out = trainer.validate()  # every rank must call it
    runtime.print(f"loss on held-out wines: {held_out:.3f}")


def loss(model, batch):
    features, labels = batch
    features = features.to(next(model.parameters()).dtype)  # for --precision.dtype float64
    return cross_entropy(model(features), labels)


if __name__ == "__main__":
    sys.exit(hpc_train.run(main))
