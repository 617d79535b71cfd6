"""A model is made without storage and then materialised: each parameter gets its own, the tied head's too."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mlp = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mlp(self.embed(x)).tanh())


torch.manual_seed(0)
x, y = tokens()
weights = Model().state_dict()
if TWIN:
    model = Model()
else:
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")  # <- here
    if not FAULTY:
        model.tie()
model.load_state_dict(weights)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

with watch(model, tied=(("embed.weight", "head.weight"),)):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        note(loss)
