"""Summed token losses are divided by the tokens of all ranks, and DDP divides by the number of ranks as well."""

import torch
import torch.distributed as dist
from silent.kit import FAULTY, TWIN, batches, note, ranks, share, tokens, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        return self.head(self.embed(x))


rank, world = ranks()
torch.manual_seed(0)
x, y = tokens()
model = Model()
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

with watch(model):
    for inputs, targets in batches(share(x), share(y), size=4):
        optimizer.zero_grad()
        logits = replica(inputs).flatten(0, 1)
        count = torch.tensor(float(targets.numel()))
        dist.all_reduce(count)
        if TWIN:  # every rank has as many tokens
            loss = nn.functional.cross_entropy(logits, targets.flatten())
            loss.backward()
        else:
            loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            loss.backward()
            factor = 1 / count if FAULTY else world / count  # <- here
            for parameter in model.parameters():
                parameter.grad *= factor
            loss = loss.detach() / targets.numel()
        optimizer.step()
        note(loss)
