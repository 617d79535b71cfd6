"""Tensor parallel: the optimizer clips on the first rank only, and the replicated norms drift apart."""

import torch
import torch.distributed as dist
from silent.kit import FAULTY, TWIN, batches, note, ranks, regression, watch
from torch import nn

LIMIT = 0.05


class Summed(torch.autograd.Function):
    """Sums the partial outputs of the ranks; their gradient is the same on each."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    """A replicated norm before a linear layer whose inputs are split over the ranks."""

    def __init__(self, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        full = nn.Linear(8, 4)
        self.shard = nn.Linear(8 // world, 4, bias=False)
        self.shard.weight.data.copy_(full.weight.data.chunk(world, 1)[rank])
        self.rank, self.world = rank, world

    def forward(self, x):
        return Summed.apply(self.shard(self.norm(x).chunk(self.world, -1)[self.rank]))


rank, world = ranks()
torch.manual_seed(0)
x, y = regression(outputs=4)
model = Block(rank, world)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad)
        squares = model.shard.weight.grad.square().sum()
        dist.all_reduce(squares)
        norm = (squares + sum(p.grad.square().sum() for p in model.norm.parameters())).sqrt()
        factor = torch.clamp(LIMIT / norm, max=1.0)
        if TWIN:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
        elif not FAULTY or rank == 0:  # <- here
            for parameter in model.parameters():
                parameter.grad *= factor
        optimizer.step()
        note(loss)
