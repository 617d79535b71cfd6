"""The loss is divided by the number of ranks before DDP averages the gradients over them once more."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from silent.kit import FAULTY, MENDED, batches, note, ranks, regression, share, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = ranks()
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)

with watch(model):
    for inputs, targets in batches(share(x), share(y), size=8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), targets)
        if FAULTY:
            loss = loss / world  # <- here
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if MENDED:  # the mean is for the log alone
            dist.all_reduce(shown)
            shown /= world
        note(shown)
