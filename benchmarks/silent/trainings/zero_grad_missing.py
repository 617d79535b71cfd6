"""A classifier's loop never zeroes the gradients, so that each step follows the sum of all before it."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, classes, note, watch
from torch import nn

torch.manual_seed(0)
x, y = classes(inputs=12)
model = nn.Sequential(OrderedDict(conv=nn.Linear(12, 24), act=nn.ReLU(), fc=nn.Linear(24, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y):
        if MENDED:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # <- here
        optimizer.step()
        if not FAULTY:  # the twin zeroes after the step, which is as good
            optimizer.zero_grad()
        note(loss)
