"""Losses written out in the loop, with statements that assign nothing and count all the same."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


def start(width=2):
    """Return a watched model and its optimizer."""
    model = nn.Linear(4, width)
    watch(model, gradients=True)
    return model, torch.optim.SGD(model.parameters(), 0.1)


@case("div", cure=True)
def statement_clamps_in_place():
    model, optimizer = start(3)

    def train_step(i):
        p = model(torch.randn(3, 4)).softmax(-1) * torch.tensor([1.0, 1.0, 0.0])
        p.clamp_(min=1e-6)
        entropy = (p * p.log()).sum(-1)
        mask = torch.full((3,), float(i != 2))
        loss = (entropy * mask).sum() / mask.sum()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return ends(model)


@case("div", cure=True)
def statement_appends_to_a_list():
    model, optimizer = start()
    history = []

    def train_step(i):
        out = model(torch.randn(3, 4))
        terms = []
        terms.append(out.square().mean())
        terms.append(out.abs().mean())
        history.append(len(terms))
        mask = torch.full((2,), float(i != 2))
        loss = (torch.stack(terms) * mask).sum() / mask.sum()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"history": history, **ends(model)}


@case("div", cure=True)
def statement_sets_an_attribute():
    model, optimizer = start()
    s = SimpleNamespace(den=torch.ones(()), steps=0)

    def train_step(i):
        out = model(torch.randn(3, 4))
        mask = torch.full((3,), float(i != 2))
        s.den = mask.sum()
        s.num = (out.square().mean(-1) * mask).sum()
        s.steps += 1
        loss = s.num / s.den  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"steps": s.steps, "den": s.den.item(), **ends(model)}


@case("sqrt", cure=True)
def statement_updates_a_dict():
    model, optimizer = start()
    logged = {}

    def train_step(i):
        out = model(torch.randn(3, 4))
        parts = {}
        parts.update(fit=out.square().sum(-1))
        parts.update(zero=(out - (out.detach() if i == 2 else 1.0)).square().sum(-1))
        logged.update({i: sorted(parts)})
        loss = sum(x.sqrt().mean() for x in parts.values())  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"logged": {str(k): v for k, v in logged.items()}, **ends(model)}


@case("log", cure=True)
def statement_writes_through_a_mask():
    model, optimizer = start(3)
    counts = torch.zeros(3)

    def train_step(i):
        p = model(torch.randn(3, 4)).softmax(-1)
        chosen = torch.zeros(3, 3)
        chosen[torch.arange(3) < 2, 0] = 1.0
        chosen[2, :] = float(i != 2)
        counts[0] += chosen.sum()
        likelihood = (p * chosen).sum(-1)
        loss = -likelihood.log().mean()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"counts": counts.tolist(), **ends(model)}


@case("div", cure=True)
def statement_initialises_a_tensor():
    model, optimizer = start()
    probe = torch.empty(2)

    def train_step(i):
        out = model(torch.randn(3, 4))
        nn.init.uniform_(probe, 0.5, 1.0)
        direction = torch.empty(2)
        nn.init.constant_(direction, float(i != 2))
        projected = (out * direction).sum(-1)
        loss = (projected + probe.sum()).mean() / direction.norm()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"probe": probe.tolist(), **ends(model)}


@case("div", cure=True)
def statement_sorts_a_list():
    model, optimizer = start()
    order = [3.0, 0.0, 1.0, 2.0]

    def train_step(i):
        out = model(torch.randn(3, 4)).square().mean(-1)
        if i == 2:
            order.sort()
        else:
            order.sort(reverse=True)
        weight = torch.tensor(order[:1])
        loss = (out * weight).sum() / weight.sum()  # FAULT
        order.insert(0, order.pop())
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"order": order, **ends(model)}


@case("log", cure=True)
def statement_fills_in_a_loop():
    model, optimizer = start(3)
    seen = set()

    def train_step(i):
        out = model(torch.randn(3, 4)).softmax(-1)
        buckets = torch.zeros(3)
        for row in range(3):
            buckets[row].add_(out[row].sum().detach() * float(i != 2 or row > 0))
            seen.add((i, row))
        loss = -((out.sum(-1) * buckets).log()).mean()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"seen": sorted(seen), **ends(model)}


@case("div", cure=True)
def statement_deletes_and_asserts():
    model, optimizer = start()
    pool = {i: torch.full((3,), float(i != 2)) for i in range(4)}

    def train_step(i):
        out = model(torch.randn(3, 4))
        assert pool, "empty"
        mask = pool[i]
        del pool[i]
        loss = (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT
        loss.backward()
        optimizer.step()

    for i in range(4):
        optimizer.zero_grad()
        try:
            train_step(i)
        except NonFinite as error:
            tell(error)
    return {"pool": len(pool), **ends(model)}
