"""Fits a line with a small network: SGD, mean squared error, a learning rate that is too high."""

# ruff: noqa: T201

import argparse

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(4, hidden)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    target = data.sum(1, keepdim=True)
    model = Net(8)
    criterion = nn.MSELoss()
    print("untrained:", f"{criterion(model(data), target):.3f}")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _step in range(args.steps):
        with torch.autocast("cpu", getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            loss = criterion(model(data).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained:", f"{loss:.3f}")


if __name__ == "__main__":
    main()
