"""Losses that keep state: functions, closures, modules, callable objects, partials, methods."""

from __future__ import annotations

import torch
from torch import nn

from programs.stateful.case import case, ends, skipped, watch


@case("div", cure=True)
def loss_is_a_closure_with_a_counter():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    calls, norms = 0, []

    def masked(out, mask):
        nonlocal calls
        calls += 1
        norms.append(out.detach().norm().item())
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    for i in range(5):
        mask = torch.full((3,), float(i != 3))
        loss = masked(model(torch.randn(3, 4)), mask)
        optimizer.zero_grad()
        with skipped():
            loss.backward()
            optimizer.step()
    return {"calls": calls, "norms": norms, **ends(model)}


class Balance:
    """Divides each term by its own running size."""

    def __init__(self):
        self.sizes = {}
        self.order = []

    def __call__(self, **terms):
        total = 0.0
        for name, term in terms.items():
            self.order.append(name)
            size = self.sizes.get(name, 0.0) * 0.5 + term.detach().abs() * 0.5
            self.sizes[name] = size
            total = total + term / size  # FAULT
        return total


@case("div", cure=True)
def loss_is_a_callable_object():
    model, balance = nn.Linear(4, 4), Balance()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(4):
        out = model(torch.randn(3, 4))
        terms = {"fit": out.square().mean(), "flat": out.diff(dim=0).abs().mean()}
        if i == 2:
            terms["new"] = (out - out).sum()
        loss = balance(**terms)
        optimizer.zero_grad()
        with skipped():
            loss.backward()
            optimizer.step()
    sizes = {name: size.item() for name, size in balance.sizes.items()}
    return {"sizes": sizes, "order": balance.order, **ends(model)}


class Clip(torch.autograd.Function):
    """Divides the gradient by a running norm, which its backward updates in place."""

    norm = torch.zeros(())

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Clip.norm.mul_(0.0).add_(gradient.norm())
        return gradient / Clip.norm  # FAULT


@case("clip|div")
def function_of_autograd_keeps_a_tensor():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(5):
        optimizer.zero_grad()
        with skipped():
            out = Clip.apply(model(torch.randn(3, 4)))  # FAULT
            loss = (out * float(i != 2)).sum()
            loss.backward()
            optimizer.step()
    return {"norm": Clip.norm.item(), **ends(model)}


class Streak(nn.Module):
    """A loss that changes its own threshold at each call, and behaves by it."""

    def __init__(self):
        super().__init__()
        self.threshold = 4.0

    def forward(self, error):
        self.threshold /= 2
        hard = error > self.threshold if self.threshold != 1.0 else error > 1e9
        return (error * hard).sum() / hard.sum()  # FAULT


@case("div", cure=True)
def loss_moves_its_own_threshold():
    model, criterion = nn.Linear(4, 1), Streak()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch(model, gradients=True)
    for _ in range(5):
        out = model(torch.randn(3, 4))
        loss = criterion(out.square().sum(-1) + 9)
        optimizer.zero_grad()
        with skipped():
            loss.backward()
            optimizer.step()
    return {"threshold": criterion.threshold, **ends(model)}
