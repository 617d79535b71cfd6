"""Modules that are not watched, and change when the loss calls them: critics, teachers, averages, banks."""

from __future__ import annotations

import copy

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn
from torch.optim.swa_utils import AveragedModel


def train(model, loss_of, batches=5):
    """Train with a mask that is empty once."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(batches):
        optimizer.zero_grad()
        loss = loss_of(torch.randn(3, 4), torch.full((3,), float(i != 2)))
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)


def state_of(module):
    """Return parameters and buffers as lists."""
    return {name: x.tolist() for name, x in module.state_dict().items()}


@case("div", cure=True)
def critic_with_running_statistics():
    generator = nn.Linear(4, 2)
    critic = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))

    def loss_of(x, mask):
        score = critic(generator(x)).squeeze(-1)
        return (score * mask).sum() / mask.sum()  # FAULT

    train(generator, loss_of)
    return {"critic": state_of(critic), **ends(generator)}


@case("div", cure=True)
def critic_with_spectral_norm():
    generator = nn.Linear(4, 4)
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1)
    )

    def loss_of(x, mask):
        score = critic(generator(x)).squeeze(-1)
        return (score * mask).sum() / mask.sum()  # FAULT

    train(generator, loss_of)
    return {"critic": state_of(critic), **ends(generator)}


@case("div", cure=True)
def critic_that_the_loss_trains():
    """The helper that makes the loss takes a step of the critic first."""
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    other = torch.optim.Adam(critic.parameters(), 1e-2)
    steps = []

    def train_critic(fake):
        other.zero_grad()
        critic(fake.detach()).square().mean().backward()
        other.step()
        steps.append(len(steps))

    def loss_of(x, mask):
        fake = generator(x)
        train_critic(fake)
        return (critic(fake).squeeze(-1) * mask).sum() / mask.sum()  # FAULT

    train(generator, loss_of)
    moments = [x["exp_avg"].tolist() for x in other.state.values()]
    return {"critic": state_of(critic), "steps": steps, "moments": moments, **ends(generator)}


@case("div", cure=True)
def teacher_that_follows():
    student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    teacher = copy.deepcopy(student)
    center = torch.zeros(4)

    @torch.no_grad()
    def follow(out):
        for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            ours.lerp_(theirs, 0.1)
        center.mul_(0.9).add_(out.mean(0), alpha=0.1)

    def loss_of(x, mask):
        target = teacher(x + torch.randn_like(x) * 0.1).detach()
        follow(target)
        d = (student(x) - target + center).square().mean(-1)
        return (d * mask).sum() / mask.sum()  # FAULT

    train(student, loss_of)
    return {"teacher": state_of(teacher), "center": center.tolist(), **ends(student)}


@case("div", cure=True)
def average_that_the_loss_updates():
    model = nn.Linear(4, 2)
    average = AveragedModel(model)

    def loss_of(x, mask):
        average.update_parameters(model)
        d = (model(x) - average(x).detach() * 0.5).square().mean(-1)
        return (d * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of)
    return {"average": state_of(average), **ends(model)}


class Bank:
    """A queue of keys, written in place at a position that moves on."""

    def __init__(self):
        self.keys = torch.randn(8, 4)
        self.at = 0

    def put(self, keys):
        rows = (torch.arange(len(keys)) + self.at) % 8
        self.keys[rows] = keys
        self.at = (self.at + len(keys)) % 8


@case("div", cure=True)
def bank_of_keys():
    model, bank = nn.Linear(4, 4), Bank()

    def loss_of(x, mask):
        queries = model(x)
        scores = (queries @ bank.keys.T.clone()).logsumexp(-1)
        bank.put(queries.detach())
        return (scores * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of)
    return {"keys": bank.keys.tolist(), "at": bank.at, **ends(model)}


class Codebook(nn.Module):
    """Codes that follow what was assigned to them. One that was never used has a size of 0."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("sizes", torch.ones(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        z = self.encode(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(-1)
        used = torch.zeros(3).index_add_(0, nearest, torch.ones(len(x)))
        self.sizes.lerp_(used, 1.0 if self.calls == 3 else 0.1)
        sums = torch.zeros(3, 4).index_add(0, nearest, z)
        means = sums / self.sizes[:, None]  # FAULT
        return z - means[nearest], means


@case("div", cure=True)
def codebook_in_the_model():
    model = Codebook()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch(model, gradients=True)
    for _ in range(5):
        optimizer.zero_grad()
        try:
            residue, means = model(torch.randn(2, 4))
            (residue.square().mean() + means.square().mean() * 0.1).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"calls": model.calls, **ends(model)}


class Grows(nn.Module):
    """Makes its head in its first call, whose batch is bad, and a further layer every second call."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 2)
        if self.calls % 2 == 0:
            self.add_module(f"extra{self.calls}", nn.Linear(2, 2))
        h = self.head(torch.tanh(self.body(x)))
        return (h.mean(-1) * mask).sum() / mask.sum()  # FAULT


@case("div", cure=True)
def model_that_grows():
    model = Grows()
    watch(model, gradients=True)
    for i in range(4):
        try:
            model(torch.randn(3, 4), torch.full((3,), float(i > 0))).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        except NonFinite as error:
            tell(error)
        model.zero_grad()
    return {"calls": model.calls, **ends(model)}
