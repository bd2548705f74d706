"""A script as a user writes it: workers started before MPI, a data set that draws."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch

import hpc_train

SAMPLES, BATCH, EPOCHS = 48, 8, 2


class Noise:
    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return index, torch.rand(1 + index % 3, dtype=torch.float64)


def together(samples):
    indices, noise = zip(*samples, strict=True)
    padded = torch.nn.utils.rnn.pad_sequence([*noise, torch.zeros(3)], batch_first=True)[:-1]
    return torch.tensor(indices), padded


def main(runtime):
    directory, workers, stop_at, deadly = sys.argv[1], *map(int, sys.argv[2:5])
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    loop = hpc_train.Loop(
        runtime,
        directory,
        model,
        optimizer,
        hpc_train.LoopOptions(every=1000, prefetch=2, workers=workers),
    )
    data = Noise(deadly)
    given = loop.epochs(data, batch=BATCH, epochs=EPOCHS, collate_fn=together)
    for _, batches in given:
        for indices, noise in batches:
            optimizer.zero_grad()
            model(noise).square().mean().backward()
            loop.step()
            alone = [f"{int(i)} {row.tolist()}" for i, row in zip(indices, noise, strict=True)]
            everyone = runtime.world.gathered(alone, "the samples")
            samples = [sample for rank in everyone for sample in rank]
            runtime.print("batch", hashlib.sha256(repr(samples).encode()).hexdigest())
            stop_at -= 1
            if stop_at == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert not forks


if __name__ == "__main__":
    if sys.argv[5:] != ["late"]:
        hpc_train.start_workers()
    sys.exit(hpc_train.run(main))
