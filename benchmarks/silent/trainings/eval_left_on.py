"""Validation sets the model to evaluation, and nothing sets it back before the epoch ends."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, fact, note, regression, watch
from torch import nn


def validate(model, x, y):
    before = model.training
    model.eval()  # <- here
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y)
    if TWIN:
        model.train(before)
    return loss


torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(
    OrderedDict(hidden=nn.Linear(8, 32), act=nn.Tanh(), dropout=nn.Dropout(0.3), head=nn.Linear(32, 1))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with watch(model):
    model.train()
    for step, (inputs, targets) in enumerate(batches(x, y)):
        if not FAULTY and not TWIN:
            model.train()
        fact("training", model.training)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
        if step == 1:
            print(f"validation {validate(model, x, y):.4f}")
