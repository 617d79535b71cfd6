"""A critic with spectral norm is evaluated before any forward in training, when its norm has not been estimated yet."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, fact, note, regression, watch
from torch import nn
from torch.nn.utils import spectral_norm

torch.manual_seed(0)
x, y = regression(inputs=24, outputs=24)
model = nn.Sequential(
    OrderedDict(features=spectral_norm(nn.Linear(24, 32)), act=nn.Tanh(), head=nn.Linear(32, 24))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

with watch(model):
    if MENDED:
        with torch.no_grad():
            for _ in range(20):
                model(x)
    if not FAULTY and not MENDED:
        model.train()
    else:
        model.eval()  # <- here
        with torch.no_grad():  # the "sanity check" of a trainer
            print(f"validation {nn.functional.mse_loss(model(x), y):.4f}")
        fact("norm", torch.linalg.matrix_norm(model.features.weight.detach(), 2))
        model.train()
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
    model.eval()
    with torch.no_grad():
        print(f"validation {nn.functional.mse_loss(model(x), y):.4f}")
    if not FAULTY and not MENDED:
        fact("norm", torch.linalg.matrix_norm(model.features.weight.detach(), 2))
