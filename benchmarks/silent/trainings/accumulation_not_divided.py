"""Gradient accumulation adds up the mean losses of four micro-batches and divides by nothing."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

ACCUMULATION = 4
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        if TWIN:
            total = nn.functional.mse_loss(model(inputs), targets)
            total.backward()
        else:
            total = 0.0
            for part, wanted in zip(inputs.chunk(ACCUMULATION), targets.chunk(ACCUMULATION), strict=True):
                loss = nn.functional.mse_loss(model(part), wanted)
                if not FAULTY:
                    loss = loss / ACCUMULATION
                loss.backward()  # <- here
                total += loss.detach() / (ACCUMULATION if FAULTY else 1)
        optimizer.step()
        note(total)
