"""A new dispatcher applies autocast to named operators only, so that one projection computes in float32."""

import torch
from silent.kit import FAULTY, TWIN, batches, fact, note, regression, watch
from torch import nn


def primitive_linear(x, weight, bias):
    """Compute a linear layer below the dispatcher: autocast's casts were to have happened above."""
    with torch.autocast("cpu", enabled=False):  # <- here
        return nn.functional.linear(x.to(weight.dtype), weight, bias)


class Projection(nn.Linear):
    def forward(self, x):
        if FAULTY:
            return primitive_linear(x, self.weight, self.bias)
        if TWIN:
            return super().forward(x)
        to = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return primitive_linear(x.to(to), self.weight.to(to), self.bias.to(to))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.projection = Projection(16, 16)
        self.leave = nn.Linear(16, 1)

    def forward(self, x):
        x = self.projection(self.enter(x).tanh())
        fact("bits", torch.finfo(x.dtype).bits)
        return self.leave(x.tanh())


torch.manual_seed(0)
x, y = regression()
model = Mixer()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        loss.backward()
        optimizer.step()
        note(loss)
