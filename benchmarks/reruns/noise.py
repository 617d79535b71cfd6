"""Random numbers: the global states, and generators that the program owns."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


def train(model, loss_of, batches=5):
    """Train on random batches; a bad one is told and left out."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(batches):
        optimizer.zero_grad()
        try:
            loss_of(model(torch.randn(3, 4)), i).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)


class DrawsEverywhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = F.dropout(self.linear(x), 0.1)
        h = h + torch.randn_like(h) * random.random() + float(np.random.rand())
        d = (h * (self.calls != 3)).square().sum(-1)
        return d.sqrt()  # FAULT


@case("sqrt", cure=True)
def noise_of_the_global_states():
    model = DrawsEverywhere()
    train(model, lambda out, i: out.mean())
    return {"calls": model.calls, **ends(model)}


@case("div", cure=True)
def noise_of_generators_in_the_loss():
    model = nn.Linear(4, 2)
    ours = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)
    old = np.random.RandomState(4)

    def loss_of(out, i):
        noise = torch.rand(3, generator=ours[0]) + ours[1].random() + float(ours[2].random()) + old.rand()
        mask = torch.full((3,), float(i != 2))
        return (out.square().mean(-1) * mask * noise).sum() / mask.sum()  # FAULT

    train(model, loss_of)
    return {"old": old.rand(), **ends(model, *ours)}


class Masks(nn.Module):
    """Its own generator chooses which rows to keep; now and then that is none of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(2)

    def forward(self, x):
        keep = (torch.rand(3, generator=self.generator) < 0.4).float()
        return (self.linear(x).mean(-1) * keep).sum() / keep.sum()  # FAULT


@case("div", cure=True)
def noise_of_a_generator_chooses_the_rows():
    model = Masks()
    train(model, lambda out, i: out, batches=20)
    return ends(model, model.generator)


class Augment:
    """NumPy's generator, as an attribute of what the loss calls, chooses the branch."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.used = {"root": 0, "square": 0}

    def __call__(self, d):
        if self.rng.random() < 0.3:
            self.used["root"] += 1
            return torch.sqrt(d - d.detach()).mean()  # FAULT
        self.used["square"] += 1
        return d.square().mean()


@case("sqrt", cure=True)
def noise_of_numpy_chooses_the_branch():
    model, augment = nn.Linear(4, 2), Augment(5)
    train(model, lambda out, i: augment(out.square().sum(-1)), batches=8)
    return {"used": augment.used, **ends(model, augment.rng)}


@case("log", cure=True)
def noise_of_python_chooses_the_negatives():
    model, rng = nn.Linear(4, 6), random.Random(1)
    drawn = []

    def loss_of(out, i):
        weight = torch.zeros(6)
        for k in rng.sample(range(6), 3):
            weight[k] = float(i != 2)
            drawn.append(k)
        p = (out.softmax(-1) * weight).sum(-1)
        return -p.log().mean()  # FAULT

    train(model, loss_of)
    return {"drawn": drawn, **ends(model, rng)}


@case("div", cure=True)
def noise_is_reseeded_by_the_loss():
    model, seeds = nn.Linear(4, 2), []

    def loss_of(out, i):
        seeds.append(torch.initial_seed() % 1000)
        torch.manual_seed(len(seeds))
        random.seed(len(seeds))
        mask = torch.full((3,), float(i != 2)) * torch.rand(3).ceil()
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of)
    return {"seeds": seeds, **ends(model)}
