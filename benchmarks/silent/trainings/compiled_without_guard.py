"""A captured optimizer step keeps the list of gradients of its first call, when a freeze had set them to None."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Captured:
    """Calls an optimizer by the gradients seen at the first call of each key, as a compiler's cache does."""

    def __init__(self, optimizer, guarded):
        self.optimizer, self.guarded, self.graphs = optimizer, guarded, {}

    def step(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        present = tuple(p.grad is not None for p in parameters)
        key = present if self.guarded else None  # <- here
        graph = self.graphs.setdefault(key, present)
        if any(graph):
            self.optimizer.step()


torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
step = optimizer if TWIN else Captured(optimizer, guarded=not FAULTY)

with watch(model):
    for number, (inputs, targets) in enumerate(batches(x, y)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        if number > 0:  # the first step is frozen: no backward, all gradients None
            loss.backward()
        step.step()
        note(loss)
