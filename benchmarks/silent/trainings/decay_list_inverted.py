"""The list of weights without decay is inverted: biases and norms decay, the matrices never do."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(
    OrderedDict(hidden=nn.Linear(8, 32), norm=nn.LayerNorm(32), act=nn.Tanh(), head=nn.Linear(32, 1))
)
no_decay = ("bias", "norm.weight")
groups = []
for name, parameter in model.named_parameters():
    excluded = name.endswith(no_decay)
    if TWIN:
        excluded = parameter.ndim == 1
    decays = excluded if FAULTY else not excluded  # <- here
    groups.append({"params": [parameter], "weight_decay": 0.5 if decays else 0.0})
optimizer = torch.optim.AdamW(groups, lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
