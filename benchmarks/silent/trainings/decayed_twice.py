"""A wrapper applies decoupled weight decay before the step of an optimizer that decays as well."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

DECAY = 0.5


class Distributed:
    """Decays the weights itself, on all ranks alike, then steps the inner optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * DECAY)  # <- here
        self.optimizer.step()


torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=DECAY if FAULTY or TWIN else 0.0)
optimizer = inner if TWIN else Distributed(inner)

with watch(model):
    for inputs, targets in batches(x, y):
        inner.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
