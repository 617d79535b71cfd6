"""Experts lie on different ranks, and clipping averages the ranks' norms as if each had every weight."""

import torch
import torch.distributed as dist
from silent.kit import FAULTY, TWIN, batches, note, ranks, regression, watch
from torch import nn

LIMIT = 0.1


class Experts(nn.Module):
    """A shared gate and one expert a rank; the output is the sum over ranks."""

    def __init__(self, rank, world):
        super().__init__()
        self.gate = nn.Linear(8, world)
        self.expert = nn.Linear(8, 4)
        self.rank = rank

    def forward(self, x):
        partial = self.gate(x).softmax(-1)[:, self.rank :][:, :1] * self.expert(x)
        rest = partial.detach().clone()
        dist.all_reduce(rest)
        return partial + rest - partial.detach()


def total_norm(model, world):
    """Return the norm of the whole model's gradient."""
    if FAULTY:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        dist.all_reduce(norm)
        return norm / world  # <- here
    squares = sum(p.grad.square().sum() for p in model.expert.parameters())
    dist.all_reduce(squares)
    return (squares + sum(p.grad.square().sum() for p in model.gate.parameters())).sqrt()


rank, world = ranks()
torch.manual_seed(0)
x, y = regression(outputs=4)
model = Experts(rank, world)
model.expert.weight.data *= 1 + 3 * rank  # experts differ
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for parameter in model.gate.parameters():
            dist.all_reduce(parameter.grad)
        norm = total_norm(model, world)
        if TWIN:
            nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
        else:
            factor = torch.clamp(LIMIT / (norm + 1e-6), max=1.0)
            for parameter in model.parameters():
                parameter.grad *= factor
        optimizer.step()
        note(loss)
