"""An epoch's function makes Adam anew, so that its moments and its count of steps begin again each time."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
kept = torch.optim.Adam(model.parameters(), lr=0.03)


def train_epoch(epoch):
    if FAULTY:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)  # <- here
    elif MENDED:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        if epoch > 0:
            optimizer.load_state_dict(states[-1])
    else:
        optimizer = kept
    for inputs, targets in batches(x, y, size=32, steps=2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
    states.append(optimizer.state_dict())


states = []
with watch(model):
    for epoch in range(6):
        train_epoch(epoch)
