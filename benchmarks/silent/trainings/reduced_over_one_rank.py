"""A mesh of shards of size one reduces gradients over the shard's group: each rank reduces with itself."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from silent.kit import FAULTY, MENDED, average_gradients, batches, note, ranks, regression, share, watch
from torch import nn

rank, world = ranks()
torch.manual_seed(0)
shards = [dist.new_group([member]) for member in range(world)]
group = shards[rank] if FAULTY else dist.group.WORLD  # <- here
x, y = regression()
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

with watch(model):
    for inputs, targets in batches(share(x), share(y), size=8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if FAULTY or MENDED:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        else:
            average_gradients(model)
        optimizer.step()
        note(loss)
