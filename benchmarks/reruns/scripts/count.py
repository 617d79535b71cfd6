"""A script whose loss counts in a global, and takes another way every third time."""

import torch
from reruns.case import NonFinite, ends, tell, watch
from torch import nn

calls = 0
smooth = torch.zeros(())


def loss_of(out):
    global calls, smooth
    calls += 1
    d = out.square().sum(-1)
    smooth = smooth * 0.5 + d.detach().mean() * 0.5
    if calls == 3:
        d = d - d.detach()
    return d.sqrt().mean()  # FAULT


model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch(model, gradients=True)
for _ in range(5):
    optimizer.zero_grad()
    try:
        loss_of(model(torch.randn(3, 4))).backward()
        optimizer.step()
    except NonFinite as error:
        tell(error)

state = {"calls": calls, "smooth": smooth.item(), **ends(model)}
