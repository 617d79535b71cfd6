"""`parameters()` is a generator: the optimizer uses it up, and the clipping that follows gets no weights."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
parameters = model.parameters()  # <- here
if not FAULTY:
    parameters = list(parameters)
optimizer = torch.optim.SGD(parameters, lr=0.2)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters() if TWIN else parameters, 0.1)
        optimizer.step()
        note(loss)
