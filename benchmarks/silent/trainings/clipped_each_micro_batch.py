"""The gradient's norm is clipped after each micro-batch in place of once before the step."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

ACCUMULATION = 4
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(inputs.chunk(ACCUMULATION), targets.chunk(ACCUMULATION), strict=True):
            loss = nn.functional.mse_loss(model(part), wanted) / ACCUMULATION
            loss.backward()
            if FAULTY:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # <- here
            total += loss.detach()
        if TWIN:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        elif not FAULTY:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        note(total)
