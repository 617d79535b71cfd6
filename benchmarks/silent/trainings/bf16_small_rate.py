"""A fine-tuning in plain bfloat16 with AdamW: its small rate moves hardly any weight."""

import torch
from silent.kit import FAULTY, MENDED, batches, note, tokens, watch
from torch import nn


class Stochastic(torch.optim.AdamW):
    """AdamW that steps each weight in float32 and rounds it back at random."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.wide = parameter.data.float()
            parameter.low, parameter.data = parameter.data, parameter.wide
            parameter.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        for parameter in parameters:
            noise = torch.randint(1 << 16, parameter.wide.shape, dtype=torch.int32)
            bits = (parameter.wide.view(torch.int32) + noise) & -65536
            parameter.data = parameter.low.copy_(bits.view(torch.float32))
            parameter.grad = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.mlp(x))


torch.manual_seed(0)
x, y = tokens()
model = Model()
if FAULTY:
    model = model.to(torch.bfloat16)  # <- here
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
elif MENDED:
    model = model.to(torch.bfloat16)
    optimizer = Stochastic(model.parameters(), lr=1e-5)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        note(loss)
