"""The groups name their decay `weight_decay_rate`, which no optimizer of torch reads."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(
    OrderedDict(hidden=nn.Linear(8, 32), norm=nn.LayerNorm(32), act=nn.Tanh(), head=nn.Linear(32, 1))
)
key = "weight_decay_rate" if FAULTY else "weight_decay"
no_decay = ("bias", "norm.weight")
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not n.endswith(no_decay)], key: 0.5},  # <- here
    {"params": [p for n, p in named if n.endswith(no_decay)], key: 0.0},
]
if TWIN:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
