"""An ordinary training script in one process: a small CNN on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 8


def main():
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
    loader = DataLoader(training, batch_size=60, shuffle=True)

    for epoch in range(1, EPOCHS + 1):
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.4f}")

    model.eval()
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy on held-out digits: {right:.3f}")


if __name__ == "__main__":
    main()
