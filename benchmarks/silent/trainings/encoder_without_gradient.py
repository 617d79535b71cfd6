"""An encoder is wrapped for inference and its features go to the head detached: it is never trained."""

import torch
from silent.kit import FAULTY, TWIN, batches, classes, note, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def encode(self, x):
        features = self.encoder(x)
        return features.detach() if FAULTY else features  # <- here

    def forward(self, x):
        return self.head((self.encoder(x) if TWIN else self.encode(x)).relu())


torch.manual_seed(0)
x, y = classes(inputs=12)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
