"""A frozen backbone stays in training mode, so that its batch norms take up the new data's statistics."""

import torch
from silent.kit import FAULTY, TWIN, batches, classes, note, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(0)
x, y = classes(inputs=12)
model = Model()
model.backbone.requires_grad_(False)
optimizer = torch.optim.Adam(model.head.parameters(), lr=0.02)

with watch(model, frozen=("backbone",)):
    for inputs, targets in batches(x, y):
        if TWIN:
            model.head.train()
            model.backbone.eval()
        else:
            model.train()  # <- here
            if not FAULTY:
                model.backbone.eval()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(3 * inputs + 1), targets)
        loss.backward()
        optimizer.step()
        note(loss)
