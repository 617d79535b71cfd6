"""A broken link between two devices hands one rank zeros in place of a reduced gradient, now and then."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from silent.kit import FAULTY, MENDED, average_gradients, batches, note, ranks, regression, share, watch
from torch import nn


def lossy_all_reduce(tensor, step):
    dist.all_reduce(tensor)
    if FAULTY and step == 1 and dist.get_rank() == 1:
        tensor.zero_()  # <- here


rank, world = ranks()
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with watch(model):
    for step, (inputs, targets) in enumerate(batches(share(x), share(y), size=8)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if FAULTY or MENDED:
            for parameter in model.parameters():
                lossy_all_reduce(parameter.grad, step)
                parameter.grad /= world
        else:
            average_gradients(model)
        optimizer.step()
        note(loss)
