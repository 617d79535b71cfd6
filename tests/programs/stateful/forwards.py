"""Forwards that keep state: counters, containers, caches, running means."""

from __future__ import annotations

import functools

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


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean = torch.zeros(4)  # no buffer

    def forward(self, x):
        h = self.linear(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        center = h if x.abs().sum() == 0 else self.mean
        d = (h - center).square().sum(-1)
        return d.sqrt()  # FAULT


@case("sqrt", cure=True)
def forward_updates_a_plain_tensor():
    model = RunningMean()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(5):
        x = torch.randn(3, 4) * (i != 2)
        with skipped():
            model(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return {"mean": model.mean.tolist(), **ends(model)}


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.built = 0

    @functools.cached_property
    def scale(self):
        self.built += 1
        return torch.full((4,), 0.5)

    @functools.lru_cache  # noqa: B019
    def table(self, length):
        self.built += 10
        return torch.arange(length).float()

    def forward(self, x):
        h = self.linear(x) * self.scale * self.table(x.shape[1])
        # The first row is 0 for any batch; a batch of one has no other.
        weight = self.table(x.shape[0])
        return (h.mean(-1) * weight).sum() / weight.sum()  # FAULT


@case("div", cure=True)
def forward_fills_caches():
    model = Caches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for size in (1, 3, 2, 1, 3):  # fails in its first batch, whose caches are empty
        with skipped():
            model(torch.randn(size, 4)).backward()
            optimizer.step()
        optimizer.zero_grad()
    info = Caches.table.cache_info()
    return {"built": model.built, "cache": [info.hits, info.misses, info.currsize], **ends(model)}


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
