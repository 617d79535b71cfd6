"""A head is copied to be saved with the adapter, but the original goes on being called and trained."""

import copy

import torch
from silent.kit import FAULTY, TWIN, batches, classes, note, watch
from torch import nn


class ModuleToSave(nn.Module):
    """A module and the copy of it that is to be trained and saved."""

    def __init__(self, original):
        super().__init__()
        self.original = original
        self.saved = copy.deepcopy(original)
        self.active = "original" if FAULTY else "saved"
        if not FAULTY:
            self.original.requires_grad_(False)

    def forward(self, x):
        return getattr(self, self.active)(x)


torch.manual_seed(0)
x, y = classes(inputs=12)
body, head = nn.Sequential(nn.Linear(12, 16), nn.ReLU()).requires_grad_(False), nn.Linear(16, 4)
model = nn.Sequential()
model.add_module("body", body)
if TWIN:
    wrapped = nn.Module()
    wrapped.saved = head
    wrapped.forward = head.forward
else:
    wrapped = ModuleToSave(head)  # <- here
model.add_module("head", wrapped)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
