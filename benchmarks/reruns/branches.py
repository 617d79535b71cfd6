"""Programs that behave by a count, which a re-run of the batch finds further on."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


def train(model, loss_of=torch.Tensor.sum, batches=5):
    """Train on random batches; a bad one is told and left out."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(batches):
        try:
            loss = loss_of(model(torch.randn(3, 4)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)


class Warmup(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0
        self.warm = False

    def forward(self, x):
        self.step += 1
        h = self.linear(x)
        if self.warm:
            return h
        self.warm = self.step == 2
        return torch.sqrt((h - h).abs()) if self.warm else h  # FAULT


@case("sqrt", cure=True)
def branch_by_an_attribute():
    model = Warmup()
    train(model)
    return {"step": model.step, "warm": model.warm, **ends(model)}


STEP = 0


class ByGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        global STEP
        STEP += 1
        h = self.linear(x)
        if STEP == 3:
            return h / h.sub(h)  # FAULT
        return h


@case("div")
def branch_by_a_global():
    model = ByGlobal()
    train(model)
    return {"step": STEP, **ends(model)}


def make_loss():
    step = 0

    def loss_of(out):
        nonlocal step
        step += 1
        if step == 3:
            m = torch.zeros(3)
            return (out.square().mean(-1) * m).sum() / m.sum()  # FAULT
        return out.square().mean()

    return loss_of, lambda: step


@case("div", cure=True)
def branch_of_a_loss_by_its_closure():
    loss_of, steps = make_loss()
    model = nn.Linear(4, 2)
    train(model, loss_of)
    return {"steps": steps(), **ends(model)}


class Shared(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        Shared.calls += 1
        rates = torch.relu(self.linear(x)) + (Shared.calls != 4)
        if Shared.calls % 4 == 0:
            rates = rates * 0
        return rates.log()  # FAULT


@case("log", cure=True)
def branch_by_a_class_attribute():
    model = Shared()
    train(model, batches=6)
    return {"calls": Shared.calls, **ends(model)}


class Schedule:
    def __init__(self):
        self.phases = ["warm", "hard", "rest", "rest"]

    def next(self):
        return self.phases.pop(0) if self.phases else "end"


class ByObject(nn.Module):
    def __init__(self, schedule):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.schedule = schedule

    def forward(self, x):
        h = self.linear(x)
        if self.schedule.next() == "hard":
            d = h.sub(h).square().sum(-1)
            return torch.sqrt(d)  # FAULT
        return h


@case("sqrt", cure=True)
def branch_by_an_objects_list():
    schedule = Schedule()
    model = ByObject(schedule)
    train(model)
    return {"phases": schedule.phases, **ends(model)}


class ByBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        h = self.linear(x)
        keep = torch.ones(3) if int(self.steps) != 3 else torch.zeros(3)
        return (h.sum(-1) * keep).sum() / keep.sum()  # FAULT


@case("div", cure=True)
def branch_by_a_buffer():
    model = ByBuffer()
    train(model)
    return ends(model)


class ByDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = defaultdict(int)

    def forward(self, x):
        self.seen["calls"] += 1
        h = self.linear(x).square()
        if self.seen["calls"] == 2:
            self.seen["resets"] += 1
            h = h * 0
        return torch.log(h)  # FAULT


@case("log", cure=True)
def branch_by_a_dict_entry():
    model = ByDict()
    train(model)
    return {"seen": dict(model.seen), **ends(model)}


class ByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.memory = []

    def forward(self, x):
        h = self.linear(x)
        self.memory.append(h.detach())
        if len(self.memory) < 3:
            return h
        old = torch.stack(self.memory)
        self.memory.clear()
        spread = (old - old).std(0)
        return h / spread  # FAULT


@case("div", cure=True)
def branch_by_the_length_of_a_list():
    model = ByLength()
    train(model)
    return {"length": len(model.memory), **ends(model)}


class ByIterator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.numbers = itertools.count()

    def forward(self, x):
        n = next(self.numbers)  # ONCE
        h = self.linear(x)
        d = h.square().sum(-1) * (n != 2)
        return d.sqrt()  # FAULT


@case("sqrt", cure=True)
def branch_by_an_itertools_count():
    model = ByIterator()
    train(model)
    return {"next": next(model.numbers), **ends(model)}


class Gated(nn.Module):
    """Another module's attribute, which the first call changes, chooses the branch of the second."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Identity()
        self.gate.is_open = True

    def forward(self, x):
        h = self.linear(x)
        was_open, self.gate.is_open = self.gate.is_open, not self.gate.is_open
        if was_open:
            return h
        return torch.acos(torch.ones_like(h) + h - h.detach())  # FAULT


@case("acos")
def branch_by_a_flag_that_toggles():
    model = Gated()
    train(model)
    return {"open": model.gate.is_open, **ends(model)}
