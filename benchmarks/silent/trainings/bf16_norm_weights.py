"""In bfloat16 the norm's weights start at 1, where a step is 1/256 wide: they stay at 1 while the rest trains."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.leave = nn.Linear(16, 1)

    def forward(self, x):
        x = self.enter(x).to(self.norm.weight.dtype)
        return self.leave(self.norm(x).to(self.leave.weight.dtype))


torch.manual_seed(0)
x, y = regression()
model = Model()
if TWIN:
    autocast = torch.autocast("cpu", torch.bfloat16)
else:
    autocast = torch.autocast("cpu", enabled=False)
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)  # <- here
    if not FAULTY:
        model.norm.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        with autocast:
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        loss.backward()
        optimizer.step()
        note(loss)
