"""Validation runs in training mode: its batches are dropped out, and change the batch norm's statistics."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, fact, note, regression, watch
from torch import nn


def validate(model, x, y):
    if TWIN:
        model.train(False)
    elif not FAULTY:
        model.eval()
    before = model.norm.num_batches_tracked.item()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y)  # <- here
    fact("counted", model.norm.num_batches_tracked.item() - before)
    model.train()
    return loss


torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(
    OrderedDict(hidden=nn.Linear(8, 32), norm=nn.BatchNorm1d(32), act=nn.Tanh(), head=nn.Linear(32, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with watch(model):
    for step, (inputs, targets) in enumerate(batches(x, y)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
        if step % 4 == 1:
            print(f"validation {validate(model, 2 * x, y):.4f}")
