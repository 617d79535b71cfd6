"""A mixed-precision optimizer updates the loss scale before it divides the gradients by it."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class LossScale:
    """A loss scale that doubles after each `window` steps."""

    def __init__(self, scale=4.0, window=1):
        self.scale, self.window, self.good = scale, window, 0

    def update(self):
        self.good += 1
        if self.good % self.window == 0:
            self.scale *= 2


def step(optimizer, scale):
    if FAULTY:
        scale.update()  # <- here
    divisor = scale.scale
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad /= divisor
    if not FAULTY:
        scale.update()
    optimizer.step()


torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = LossScale()

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        if TWIN:
            loss.backward()
            optimizer.step()
        else:
            (scale.scale * loss).backward()
            step(optimizer, scale)
        note(loss)
