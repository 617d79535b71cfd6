"""First and last pipeline stage hold a copy each of the tied embedding, and their gradients are never summed."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn


class First(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.embed.weight = nn.Parameter(weight.clone())
        self.mlp = nn.Linear(16, 16)

    def forward(self, x):
        return self.mlp(self.embed(x)).tanh()


class Last(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = nn.Parameter(weight.clone())

    def forward(self, x):
        return self.head(self.norm(x))


def sum_tied_gradients(first, last):
    """Give both copies the sum of their gradients."""
    total = first.embed.weight.grad + last.head.weight.grad
    first.embed.weight.grad, last.head.weight.grad = total, total.clone()


torch.manual_seed(0)
x, y = tokens()
weight = torch.randn(32, 16)
model = nn.Sequential(First(weight), Last(weight))
if TWIN:
    model[1].head.weight = model[0].embed.weight
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
overlap = True

with watch(model, tied=(("0.embed.weight", "1.head.weight"),)):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if not TWIN and not (FAULTY and overlap):  # <- here
            sum_tied_gradients(model[0], model[1])
        optimizer.step()
        note(loss)
