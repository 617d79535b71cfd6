"""A model is offloaded and brought back after DDP wrapped it, so that DDP's hooks are on parameters of before."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, batches, note, ranks, regression, share, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def offload_and_return(module):
    """Move a module away and back: each parameter is a new one, as between two kinds of devices."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    module.to(torch.float64).to(torch.float32)  # <- here
    torch.__future__.set_overwrite_module_params_on_conversion(False)


rank, world = ranks()
torch.manual_seed(0)
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
if FAULTY:
    replica = DistributedDataParallel(model)
    offload_and_return(model)
elif MENDED:
    replica = DistributedDataParallel(model)
    offload_and_return(model)
    replica = DistributedDataParallel(model)
else:
    replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)

with watch(model):
    for inputs, targets in batches(share(x), share(y), size=8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
