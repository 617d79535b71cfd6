"""Pruning replaces a layer by a smaller one after the optimizer was made, which keeps the old weights."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.hidden = nn.Linear(8, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.hidden(x).tanh())


def prune(model, keep):
    """Keep the hidden units with the largest weights, in smaller layers."""
    best = model.hidden.weight.norm(dim=1).topk(keep).indices.sort().values
    hidden, head = nn.Linear(8, keep), nn.Linear(keep, 1)
    with torch.no_grad():
        hidden.weight.copy_(model.hidden.weight[best])
        hidden.bias.copy_(model.hidden.bias[best])
        head.weight.copy_(model.head.weight[:, best])
        head.bias.copy_(model.head.bias)
    model.hidden, model.head = hidden, head


torch.manual_seed(0)
x, y = regression()
model = Net()
if TWIN:
    prune(model, keep=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)  # <- here
    prune(model, keep=8)
    if not FAULTY:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

with watch(model):
    for inputs, targets in batches(x, y):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
