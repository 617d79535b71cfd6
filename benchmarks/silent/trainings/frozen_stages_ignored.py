"""A backbone freezes its first stages only in `train()`, which the loop never calls."""

import torch
from silent.kit import FAULTY, TWIN, batches, classes, note, watch
from torch import nn


class Backbone(nn.Module):
    """Stages of which the first `frozen_stages` are not to be trained."""

    def __init__(self, frozen_stages):
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 4)
        self.frozen_stages = frozen_stages
        if TWIN:
            self.freeze()

    def freeze(self):
        for stage in self.stages[: self.frozen_stages]:
            stage.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.freeze()
        return self

    def forward(self, x):
        for stage in self.stages:
            x = stage(x).relu()
        return self.head(x)


torch.manual_seed(0)
x, y = classes(inputs=12)
model = Backbone(frozen_stages=1)  # <- here
if not FAULTY:
    model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

with watch(model, frozen=("stages.0",)):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
