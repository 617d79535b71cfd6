"""A fine-tuning freezes everything but the norms, then the head too, and gives the optimizer the head."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, classes, note, watch
from torch import nn

torch.manual_seed(0)
x, y = classes(inputs=12)
model = nn.Sequential(
    OrderedDict(conv=nn.Linear(12, 16), bn=nn.BatchNorm1d(16), act=nn.ReLU(), fc=nn.Linear(16, 4))
)
for name, parameter in model.named_parameters():
    if "bn" not in name:
        parameter.requires_grad = False
if FAULTY:
    for parameter in model.fc.parameters():
        parameter.requires_grad = False  # <- here
elif MENDED:
    for parameter in model.fc.parameters():
        parameter.requires_grad = True
else:
    model.fc.requires_grad_(True)
trained = model.fc.parameters() if FAULTY else [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
