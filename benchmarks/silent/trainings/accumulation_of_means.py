"""Micro-batches of unequal length are averaged one by one: a token of a short one counts for more."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn

LENGTHS = (8, 1, 2, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        return self.head(self.embed(x))


torch.manual_seed(0)
x, y = tokens()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)


def loss_of(inputs, targets, reduction):
    logits = model(inputs).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction=reduction)


with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        targets = targets.clone()
        for rows, length in zip(targets.chunk(4), LENGTHS, strict=True):
            rows[:, length:] = -100
        count = (targets != -100).sum()
        if TWIN:
            total = loss_of(inputs, targets, "mean")
            total.backward()
        else:
            total = 0.0
            for part, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                loss = loss_of(part, wanted, "sum") / count
                if FAULTY:
                    loss = loss_of(part, wanted, "mean") / 4  # <- here
                loss.backward()
                total += loss.detach()
        optimizer.step()
        note(total)
