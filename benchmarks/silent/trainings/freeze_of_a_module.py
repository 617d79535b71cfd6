"""A layer is frozen by setting `requires_grad` on the module, which sets an attribute that nobody reads."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), outc=nn.Linear(16, 1)))
if FAULTY:
    model.outc.requires_grad = False  # <- here
elif TWIN:
    for parameter in model.outc.parameters():
        parameter.requires_grad = False
else:
    model.outc.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with watch(model, frozen=("outc",)):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
