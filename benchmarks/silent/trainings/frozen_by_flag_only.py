"""A layer is frozen by `requires_grad` in mid-training; its old gradient stays, and the optimizer goes on with it."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

with watch(model):
    for step, (inputs, targets) in enumerate(batches(x, y)):
        optimizer.zero_grad(set_to_none=False)
        if step == 2:
            model.hidden.requires_grad_(False)  # <- here
            if not FAULTY and not TWIN:
                for parameter in model.hidden.parameters():
                    parameter.grad = None
            elif TWIN:
                optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
