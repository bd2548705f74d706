"""The script horovod_script.py with checkpoints, exact resume, and a stop at the time limit.

Run it with horovodrun -np N, mpirun -np N, srun or hpc-train launch. Run it again to resume after a
stop. Compare the two: `diff examples/horovod_script.py examples/horovod_script_resumable.py`.
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import hpc_train

EPOCHS = 8


def main(runtime):
    hvd.init()
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
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loop = hpc_train.Loop(runtime, "runs/hvd", model, optimizer, hpc_train.LoopOptions(every=20))

    for epoch, loader in loop.epochs(training, batch=60, epochs=EPOCHS):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")

    model.eval()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    if hvd.rank() == 0:
        print(f"accuracy on held-out digits: {right:.3f}")


if __name__ == "__main__":
    raise SystemExit(hpc_train.run(main))
