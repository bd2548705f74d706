"""A forecast of a field from HDF5 files of others: a small convolutional network under the Trainer.

Run python examples/forecast.py [--section.key VALUE ...], or run it by mpirun, horovodrun or srun.
The files are made up: waves that travel over a square, as a simulation would have written them.
"""

import sys
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpc_train
from hpc_train.data import Arrays, Window

# All keys of `hpc-train train --help` apply except data.path and those of section model. Options on
# the command line override these. --run.steps also needs --run.epochs null.
DEFAULTS = [
    *("--run.dir", "runs/waves", "--run.epochs", "4"),
    *("--data.batch", "8", "--data.validation_every", "50"),
    *("--optimizer.lr", "0.003", "--optimizer.schedule", "cosine"),
]
FILES = [Path(f"waves-{year}.h5") for year in (2001, 2002, 2003)]
VARIABLES = ["height", "slope"]
WINDOW = Window(steps=3, ahead=1)


def main(runtime):
    if runtime.world.rank == 0:
        for seed, path in enumerate(FILES):
            write_waves(path, seed)
    world = runtime.world
    statistics = Arrays(FILES[:2], VARIABLES, group=world).statistics(world)
    how = {"window": WINDOW, "normalise": statistics, "group": world}
    training, validation = Arrays(FILES[:2], VARIABLES, **how), Arrays(FILES[2:], VARIABLES, **how)

    config = hpc_train.load_config(options=[*DEFAULTS, *sys.argv[1:]])
    torch.manual_seed(config.run.seed)
    task = hpc_train.TrainingTask(Forecast(), training, loss, validation=validation)
    trainer = hpc_train.Trainer(config, task, runtime)
    trainer.train()
    held_out = trainer.validate()  # every rank must call it
    runtime.print(f"error of the forecast for {FILES[2]}: {held_out:.4f}")


class Forecast(nn.Module):
    """Adds to the last row what convolutions make of the past ones."""

    def __init__(self):
        super().__init__()
        channels = len(VARIABLES)
        self.layers = nn.Sequential(
            nn.Conv2d(channels * WINDOW.steps, 24, 5, padding=2, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(24, channels, 5, padding=2, padding_mode="circular"),
        )

    def forward(self, past):
        """Forecast the row that follows past ones of shape (samples, steps, channels, 24, 24)."""
        return past[:, -1] + self.layers(past.flatten(1, 2))


def loss(model, batch):
    dtype = next(model.parameters()).dtype  # for --precision.dtype float64
    past, ahead = (part.to(dtype) for part in batch)
    return mse_loss(model(past), ahead[:, 0])


def write_waves(path, seed):
    """Write 100 hours of waves in compressed chunks, one of the variables packed into 16 bits."""
    random = np.random.default_rng(seed)
    place = np.stack(np.meshgrid(*[np.arange(24) / 24] * 2, indexing="ij"))
    height, slope = np.zeros((2, 100, 24, 24))
    hours = np.arange(100)[:, None, None]
    for wave in product((-2, -1, 0, 1, 2), repeat=2):
        size, phase = random.normal(), random.uniform(0, 2 * np.pi)
        angle = 2 * np.pi * np.tensordot(wave, place, 1) - 0.3 * np.hypot(*wave) * hours + phase
        height += size * np.sin(angle)
        slope += size * wave[0] * np.cos(angle)
    with h5py.File(path, "w") as file:
        layout = {"chunks": (10, 24, 24), "compression": "gzip", "shuffle": True}
        file.create_dataset("height", data=height.astype("f4"), fletcher32=True, **layout)
        packed = file.create_dataset("slope", data=(slope / 0.001).round().astype("i2"), **layout)
        packed.attrs["scale_factor"] = 0.001


if __name__ == "__main__":
    hpc_train.start_workers()  # before MPI: a process that it starts looks into the files
    sys.exit(hpc_train.run(main))
