"""Reentrant activation checkpoints over a frozen embedding: no input needs a gradient, so no adapter gets one."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Linear(width, 2, bias=False)
        self.lora_b = nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return x + (self.base(x) + self.lora_b(self.lora_a(x))).tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16).requires_grad_(False)
        self.layers = nn.ModuleList([Layer(16), Layer(16)])
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if TWIN else checkpoint(layer, x, use_reentrant=FAULTY)  # <- here
        return self.head(x)


torch.manual_seed(0)
x, y = tokens()
model = Model()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        note(loss)
