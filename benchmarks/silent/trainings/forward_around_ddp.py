"""A trainer calls the bare module in place of its DDP wrapper, so that nothing is reduced."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, note, ranks, regression, share, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model):
        self.model = model
        self.wrapped = DistributedDataParallel(model)

    def compute_loss(self, inputs, targets):
        if FAULTY:
            model = self.model  # <- here
        elif MENDED:
            model = self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else self.model
        else:
            model = self.wrapped
        return nn.functional.mse_loss(model(inputs), targets)


rank, world = ranks()
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
trainer = Trainer(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with watch(model):
    for inputs, targets in batches(share(x), share(y), size=8):
        optimizer.zero_grad()
        loss = trainer.compute_loss(inputs, targets)
        loss.backward()
        optimizer.step()
        note(loss)
