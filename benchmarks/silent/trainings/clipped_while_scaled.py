"""Gradients are clipped while they still carry the scaler's factor, so that each step is far too short."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=not TWIN)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        if not FAULTY:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
        scaler.step(optimizer)
        scaler.update()
        note(loss)
