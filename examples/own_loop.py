"""The script own_loop_single.py on many ranks, with checkpoints, stop and resume.

Run it with python, mpirun -np N, horovodrun -np N or srun. Run it again to resume after a stop.
Compare the two: `diff examples/own_loop_single.py examples/own_loop.py`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import hpc_train

EPOCHS = 8


def main(runtime):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    training = TensorDataset(images[:1500], labels[:1500])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loop = hpc_train.Loop(runtime, "runs/digits", model, optimizer)

    for epoch, loader in loop.epochs(training, batch=60, epochs=EPOCHS):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
        runtime.print(f"epoch {epoch}: loss {loop.mean(loss):.4f}")

    model.eval()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    runtime.print(f"accuracy on held-out digits: {right:.3f}")


if __name__ == "__main__":
    raise SystemExit(hpc_train.run(main))
