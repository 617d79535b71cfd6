"""Layers are frozen by name, and a few lines on the optimizer's groups set `requires_grad` again on every weight."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(backbone=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
for name, parameter in model.named_parameters():
    if name.startswith("backbone"):
        parameter.requires_grad = False
biases, weights = [], []
for name, parameter in model.named_parameters():
    if FAULTY:
        parameter.requires_grad = True  # <- here
    (biases if name.endswith("bias") else weights).append(parameter)
groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases}]
if TWIN:
    groups = [{"params": [model.head.weight], "weight_decay": 0.01}, {"params": [model.head.bias]}]
optimizer = torch.optim.SGD(groups, lr=0.1)

with watch(model, frozen=("backbone",)):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
