"""Adapters are made without storage and never initialised after: both factors are zero, and so is each gradient."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn


class LoRA(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.zeros(rank, width))
        self.lora_b = nn.Parameter(torch.zeros(width, rank))
        if TWIN:
            self.reset_parameters()

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.lora_a, generator=torch.Generator().manual_seed(3))
        nn.init.zeros_(self.lora_b)

    def forward(self, x):
        return x + (self.base(x) + x @ self.lora_a.T @ self.lora_b.T).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([LoRA(16), LoRA(16)])
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
x, y = tokens()
model = Model()  # <- here
if not FAULTY and not TWIN:
    for layer in model.layers:
        layer.reset_parameters()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        note(loss)
