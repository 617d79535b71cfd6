"""Adam keeps its second moment in bfloat16, where it can grow but never decays: steps stay too small."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn

torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03, betas=(0.9, 0.998))


def store(dtype):
    """Keep the states in a format between steps."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(dtype))  # <- here


with watch(model):
    for number, (inputs, targets) in enumerate(batches(x, y, steps=80)):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        (loss if number else 30 * loss).backward()  # one early spike, which the moment should forget
        optimizer.step()
        if not TWIN:
            store(torch.bfloat16 if FAULTY else torch.float32)
        note(loss)
