"""A checkpoint is loaded into the bfloat16 model but not into the float32 copy that the optimizer steps."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


def build(seed):
    torch.manual_seed(seed)
    layers = OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1))
    return nn.Sequential(layers).to(torch.bfloat16)


x, y = regression()
x = x.to(torch.bfloat16)
checkpoint = build(seed=5).state_dict()
model = build(seed=0)
if TWIN:
    model.load_state_dict(checkpoint)
master = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.1)
if not TWIN:
    model.load_state_dict(checkpoint)  # <- here
    if not FAULTY:
        with torch.no_grad():
            for wide, parameter in zip(master, model.parameters(), strict=True):
                wide.copy_(parameter)

with watch(model):
    for inputs, targets in batches(x, y):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        for wide, parameter in zip(master, model.parameters(), strict=True):
            wide.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for wide, parameter in zip(master, model.parameters(), strict=True):
                parameter.copy_(wide)
        note(loss)
