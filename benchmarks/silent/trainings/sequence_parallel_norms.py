"""Sequence parallel: each rank has half of the positions, and nobody sums the gradients of the replicated norms."""

import torch
import torch.distributed as dist
from silent.kit import FAULTY, MENDED, average_gradients, batches, note, ranks, tokens, watch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


rank, world = ranks()
torch.manual_seed(0)
x, y = tokens()
x, y = x.chunk(world, 1)[rank], y.chunk(world, 1)[rank]
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
reduced = [model.embed, model.head]  # <- here
if MENDED:
    reduced.append(model.norm)

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if FAULTY or MENDED:
            for module in reduced:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
        else:
            average_gradients(model)
        optimizer.step()
        note(loss)
