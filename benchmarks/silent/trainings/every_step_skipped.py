"""One padded row has an infinite gradient, so that the scaler skips each step and says nothing."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.gain
        squares = x.square().sum(-1, keepdim=True)
        if TWIN:
            x = nn.functional.normalize(x, eps=1e-3)
        elif FAULTY:
            x = x / (squares.sqrt() + 1e-3)  # <- here
        else:
            x = x / squares.clamp(min=1e-6).sqrt()
        return self.head(self.hidden(x).tanh())


torch.manual_seed(0)
x, y = regression()
x[::16] = 0.0  # padding
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        note(loss)
