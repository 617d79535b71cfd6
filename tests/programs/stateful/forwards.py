"""Forwards that keep state: counters, containers, caches, running means."""

from __future__ import annotations

import torch
from torch import nn

from programs.stateful.case import case, ends, skipped, watch


def train(model, batches=5, lr=0.1):
    """Train on random batches; a bad one is told and left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    watch(model, gradients=True)
    for _ in range(batches):
        with skipped():
            loss = model(torch.randn(3, 4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class CountsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.log = []

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        h = self.linear(x)
        if self.calls == 3:
            h = torch.sqrt((h - h).sum(-1))  # FAULT
        return h


@case("sqrt", cure=True)
def forward_counts_its_calls():
    model = CountsCalls()
    train(model)
    return {"calls": model.calls, "log": model.log, **ends(model)}


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, memory):
        memory[:, 0] += 1
        x.sub_(memory)
        return self.linear(x) / memory[:, 3:]  # FAULT


@case("div")  # no cure is tried, as the batch's own input is gone
def forward_writes_tensors_of_the_program():
    model = WritesItsInput()
    memory, inputs = torch.ones(3, 4), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(5):
        x = torch.randn(3, 4)
        memory[1, 3] = float(i != 2)
        inputs.append(x)
        with skipped():
            model(x, memory).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return {"memory": memory.tolist(), "inputs": [x.tolist() for x in inputs], **ends(model)}
