"""A warm-up counts optimizer steps, and its scheduler is stepped once an epoch: the rate stays at 0."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

WARM_UP = 4
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARM_UP))
taken = 0

with watch(model):
    for _ in range(2):
        for inputs, targets in batches(x, y, steps=8):
            if TWIN:
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * min(1.0, taken / WARM_UP)
                taken += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if not FAULTY and not TWIN:
                scheduler.step()
            note(loss)
        if FAULTY:
            scheduler.step()  # <- here
