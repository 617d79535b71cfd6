"""Hooks that keep state: of modules, of tensors, of parameters, forward and backward."""

from __future__ import annotations

from collections import defaultdict

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 2)

    def forward(self, x, mask):
        h = torch.tanh(self.body(x))
        pooled = (h * mask[:, None]).sum(0) / mask.sum()  # FAULT hook_of_all_modules_counts
        return self.tail(pooled)


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 2)

    def forward(self, x, mask):
        h = self.body(x) * mask[:, None]
        return self.tail(h.square().sum(-1, keepdim=True).sqrt() + h)  # FAULT hook_*


def train(model, faulty=2):
    """Train with a mask that is empty once."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(5):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4), torch.full((3,), float(i != faulty))).sum().backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)


@case("sqrt", cure=True)
def hook_of_a_forward_keeps_activations():
    model, seen = Rooted(), defaultdict(list)
    model.body.register_forward_hook(lambda module, args, out: seen["body"].append(out.mean().item()))
    model.tail.register_forward_pre_hook(lambda module, args: seen["tail"].append(args[0].shape[0]))
    train(model)
    return {"seen": dict(seen), **ends(model)}


@case("sqrt", cure=True)
def hook_of_a_forward_behaves_by_its_count():
    model = Rooted()
    calls = []

    def drop(module, args, out):
        calls.append(len(calls))
        return out * 0 if len(calls) == 3 else out

    model.body.register_forward_hook(drop)
    train(model, faulty=99)
    return {"calls": calls, **ends(model)}


@case("sqrt", cure=True)
def hook_of_a_full_backward_counts():
    model, norms, counts = Rooted(), [], {"pre": 0}

    def after(module, gradients_in, gradients_out):
        norms.append(round(gradients_out[0].norm().item(), 4))

    def before(module, gradients_out):
        counts["pre"] += 1

    model.tail.register_full_backward_hook(after)
    model.body.register_full_backward_pre_hook(before)
    train(model)
    return {"norms": norms, "counts": counts, **ends(model)}


class KeepsGradients(nn.Module):
    """A hook on an activation, as for an attribution method."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.gradients, self.calls = [], 0

    def keep(self, gradient):
        self.calls += 1
        self.gradients.append(gradient.abs().max().item())

    def forward(self, x):
        h = self.body(x)
        h.register_hook(self.keep)
        weight = torch.ones(3) * (len(self.gradients) != 2)
        return (h.mean(-1) * weight).sum() / weight.sum()  # FAULT


@case("div", cure=True)
def hook_of_a_tensor_keeps_gradients():
    model = KeepsGradients()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(5):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4)).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
            model.gradients.append(-1.0)
    return {"calls": model.calls, "gradients": model.gradients, **ends(model)}


@case("sqrt", cure=True)
def hook_of_a_parameter_counts():
    model, arrived = Rooted(), defaultdict(int)
    for name, parameter in model.named_parameters():

        def count(gradient, name=name):
            arrived[name] += 1

        def total(parameter, name=name):
            arrived[f"{name} added"] += 1

        parameter.register_hook(count)
        parameter.register_post_accumulate_grad_hook(total)
    train(model)
    return {"arrived": dict(arrived), **ends(model)}


@case("sqrt", cure=True)
def hook_of_a_loss_tensor_counts():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    seen = []

    def loss_of(out, target):
        d = (out - target).square().sum(-1)
        d.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        return d.sqrt().mean()  # FAULT

    for i in range(4):
        out = model(torch.randn(3, 4))
        loss = loss_of(out, out.detach() if i == 2 else torch.zeros(3, 4))
        optimizer.zero_grad()
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"seen": [str(x) for x in seen], **ends(model)}


@case("div", cure=True)
def hook_of_all_modules_counts():
    model, order = Head(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: order.append(type(module).__name__)
    )
    train(model)
    handle.remove()
    return {"order": order, **ends(model)}


class Ema(nn.Module):
    """A shadow of the model's weights, updated by a hook of its forward."""

    def __init__(self, model):
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0
        model.register_forward_pre_hook(self.update)

    def update(self, model, args):
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)


@case("sqrt", cure=True)
def hook_updates_an_average_of_the_weights():
    model = Rooted()
    ema = Ema(model)
    train(model)
    shadow = {name: x.tolist() for name, x in ema.shadow.items()}
    return {"updates": ema.updates, "shadow": shadow, **ends(model)}
