"""Losses that keep state: functions, closures, modules, callable objects, partials, methods."""

from __future__ import annotations

import functools
from collections import deque

import numpy as np
import torch
from torch import nn

from programs.stateful.case import case, ends, skipped, watch

HISTORY = []
STATS = {"calls": 0}


def tracked_loss(out, target, running):
    STATS["calls"] += 1
    HISTORY.append(STATS["calls"])
    running.mul_(0.9).add_(out.detach().mean() * 0.1)
    d = (out - target).pow(2).sum(-1)
    return torch.sqrt(d).mean()  # FAULT


@case("sqrt", cure=True)
def loss_is_a_function_with_history():
    model, running = nn.Linear(4, 4), torch.zeros(1)
    optimizer = torch.optim.Adam(model.parameters())
    watch(model, gradients=True)
    for i in range(5):
        out = model(torch.randn(3, 4))
        target = out.detach().clone() if i == 2 else torch.randn(3, 4)
        loss = tracked_loss(out, target, running)
        optimizer.zero_grad()
        with skipped():
            loss.backward()
            optimizer.step()
    return {"history": HISTORY, "stats": STATS, "running": running.tolist(), **ends(model)}


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


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(()))
        self.recent = deque(maxlen=3)

    def forward(self, logits, keep):
        self.calls += 1
        p = logits.softmax(-1) * keep
        self.mean.lerp_(p.detach().mean(), 0.1)
        self.recent.append(p.detach().sum().item())
        return -(p * p.log()).sum(-1).mean()  # FAULT


@case("log", cure=True)
def loss_is_a_module_with_a_running_mean():
    model, criterion = nn.Linear(4, 3), Criterion()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(5):
        keep = torch.ones(3)
        keep[2] = float(i != 2)
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(3, 4)), keep)
        with skipped():
            loss.backward()
            optimizer.step()
    state = {"calls": criterion.calls, "mean": criterion.mean.item(), "recent": list(criterion.recent)}
    return {**state, **ends(model)}


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


def distance(out, target, log, power):
    log["calls"] = log.get("calls", 0) + 1
    log.setdefault("sizes", []).append(out.shape[0])
    return (out - target).norm(dim=-1).pow(power).mean()  # FAULT


@case("pow", cure=True)
def loss_is_a_partial_with_a_dict():
    model, log = nn.Linear(4, 4), {}
    loss_of = functools.partial(distance, log=log, power=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(4):
        out = model(torch.randn(3, 4))
        loss = loss_of(out, out.detach().clone() if i == 1 else torch.zeros(3, 4))
        optimizer.zero_grad()
        with skipped():
            loss.backward()
            optimizer.step()
    return {"log": log, **ends(model)}


class Trainer:
    """A class as many write it: the loop, the loss and its statistics are methods."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.step, self.skipped = 0, []
        self.seen = np.zeros(4)
        watch(self.model, gradients=True)

    def compute_loss(self, x, y, weight):
        self.step += 1
        self.seen += x.sum(0).numpy()
        error = (self.model(x).squeeze(-1) - y).abs()
        return (error * weight).sum() / weight.sum()  # FAULT

    def training_step(self, batch):
        loss = self.compute_loss(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.skipped.append(self.step + 1)
            with skipped():
                self.training_step(batch)
                self.skipped.pop()


@case("div", cure=True)
def loss_is_a_method_of_a_trainer():
    trainer = Trainer()
    trainer.fit([(torch.randn(3, 4), torch.randn(3), torch.full((3,), float(i != 2))) for i in range(5)])
    seen = trainer.seen.tolist()
    return {"step": trainer.step, "skipped": trainer.skipped, "seen": seen, **ends(trainer.model)}


class Scale(torch.autograd.Function):
    forwards, backwards = 0, []

    @staticmethod
    def forward(ctx, x):
        Scale.forwards += 1
        ctx.number = Scale.forwards
        return x * Scale.forwards

    @staticmethod
    def backward(ctx, gradient):
        Scale.backwards.append(ctx.number)
        return gradient * ctx.number


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
