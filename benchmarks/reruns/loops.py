"""Loops: closures of optimizers, iterators and data that the loss takes, generators, coroutines."""

from __future__ import annotations

import asyncio
import itertools

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


@case("sqrt|linalg|norm", cure=True)
def closure_of_lbfgs_counts():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    watch(model, gradients=True)
    calls, losses = 0, []
    for i in range(4):
        x = torch.randn(3, 4)
        target = model(x).detach() if i == 2 else torch.zeros(3, 4)

        def closure(x=x, target=target):
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            d = (model(x) - target).square().sum(-1)
            loss = d.sqrt().mean()  # FAULT
            losses.append(loss.item())
            loss.backward()
            return loss

        try:
            optimizer.step(closure)
        except NonFinite as error:
            tell(error)
    return {"calls": calls, "losses": losses, **ends(model)}


@case("div", cure=True)
def closure_of_sgd_behaves_by_its_count():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    state = {"calls": 0}

    def closure():
        state["calls"] += 1
        optimizer.zero_grad()
        mask = torch.zeros(3) if state["calls"] == 3 else torch.ones(3)
        loss = (model(torch.randn(3, 4)).square().mean(-1) * mask).sum() / mask.sum()  # FAULT
        loss.backward()
        return loss

    for _ in range(5):
        try:
            optimizer.step(closure)
        except NonFinite as error:
            tell(error)
    return {**state, **ends(model)}


def masks():
    for i in itertools.count():
        yield torch.full((3,), float(i != 2))


@case("div", cure=True, once=True)
def loss_takes_the_next_of_a_generator():
    model, source = nn.Linear(4, 2), masks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)

    def loss_of(out):
        mask = next(source)  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(3, 4)))
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"next": next(source).tolist(), **ends(model)}


class Reads(nn.Module):
    """A forward that takes its noise from a generator, which ends."""

    def __init__(self, amounts):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.amounts = (float(x) for x in amounts)

    def forward(self, x):
        amount = next(self.amounts)  # ONCE
        d = (self.linear(x) * amount).square().sum(-1)
        return d.sqrt()  # FAULT


@case("sqrt", cure=True, once=True)
def forward_reads_a_generator_to_its_end():
    model = Reads([1, 2, 0, 3, 4])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(5):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"left": list(model.amounts), **ends(model)}


class Numbers(Dataset):
    """Counts what was read of it, and adds noise."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 12

    def __getitem__(self, i):
        self.read.append(i)
        return torch.randn(4), torch.tensor(float(i not in (4, 5)))


def train_on(loader):
    """Take the weights of each batch from the loader inside the loss."""
    model, batches = nn.Linear(4, 2), iter(loader)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)

    def step():
        x, keep = next(batches)  # ONCE loader_*
        loss = (model(x).square().mean(-1) * keep).sum() / keep.sum()  # FAULT loader_*
        loss.backward()
        optimizer.step()

    for _ in range(5):
        optimizer.zero_grad()
        try:
            step()
        except NonFinite as error:
            tell(error)
    return {"left": [keep.tolist() for _, keep in batches], **ends(model)}


@case("div", cure=True)
def loader_is_read_by_the_loss():
    data = Numbers()
    state = train_on(DataLoader(data, 2))
    return {"read": data.read, **state}


@case("div", cure=True)
def loader_with_shuffling_is_read_by_the_loss():
    order = torch.Generator().manual_seed(9)
    data = Numbers()
    state = train_on(DataLoader(data, 1, shuffle=True, generator=order))
    return {"read": data.read, "next": torch.rand((), generator=order).item(), **state}


@case("div", cure=True)
def loader_with_workers_is_read_by_the_loss():
    return train_on(DataLoader(Numbers(), 2, num_workers=2, persistent_workers=False))


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(9):
            yield torch.randn(3, 4), torch.full((3,), float(i != 2))


class TakesNegatives(nn.Module):
    """A criterion that draws further samples of its own."""

    def __init__(self):
        super().__init__()
        self.stream = iter(DataLoader(Stream(), batch_size=None))

    def forward(self, out):
        negatives, mask = next(self.stream)  # ONCE
        scores = (out * negatives).sum(-1)
        return (scores * mask).sum() / mask.sum()  # FAULT


@case("div", cure=True, once=True)
def criterion_draws_negatives_from_a_loader():
    model, criterion = nn.Linear(4, 4), TakesNegatives()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(5):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(3, 4)))
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"left": sum(1 for _ in criterion.stream), **ends(model)}


@case("log", cure=True)
def loop_is_a_generator():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    seen = []

    def steps():
        for i in itertools.count():
            keep = yield i
            p = model(torch.randn(3, 4)).softmax(-1) * keep
            seen.append(p.sum().item())
            loss = -(p * p.log()).sum(-1).mean()  # FAULT
            optimizer.zero_grad()
            try:
                loss.backward()
                optimizer.step()
            except NonFinite as error:
                tell(error)

    loop = steps()
    next(loop)
    for i in range(5):
        loop.send(torch.tensor([1.0, 1.0, float(i != 2)]))
    loop.close()
    return {"seen": seen, **ends(model)}


@case("div", cure=True)
def loop_is_a_coroutine():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    events = []

    def masked(out, mask):
        events.append("loss")
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    async def feed(queue):
        for i in range(5):
            await queue.put(torch.full((3,), float(i != 2)))
            events.append("put")
            await asyncio.sleep(0)

    async def consume(queue):
        for _ in range(5):
            mask = await queue.get()
            optimizer.zero_grad()
            loss = masked(model(torch.randn(3, 4)), mask)
            try:
                loss.backward()
                optimizer.step()
            except NonFinite as error:
                tell(error)

    async def main():
        queue = asyncio.Queue(maxsize=1)
        await asyncio.gather(feed(queue), consume(queue))

    asyncio.run(main())
    return {"events": events, **ends(model)}


def masked_mean(x, mask, log):
    log.append(x.shape[0])
    return (x * mask).sum() / mask.sum()  # FAULT loop_calls_helpers


def losses_of(model, batch, log):
    terms = {}
    out = model(batch["x"])
    terms["fit"] = masked_mean(out.square().mean(-1), batch["mask"], log)
    terms["flat"] = out.abs().mean() * 0.1
    return terms


@case("div", cure=True)
def loop_calls_helpers():
    model, log = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    totals = {"fit": 0.0, "flat": 0.0}

    def train_step(batch):
        terms = losses_of(model, batch, log)
        for name, term in terms.items():
            totals[name] += term.item()
        sum(terms.values()).backward()

    for i in range(6):
        if i % 2 == 0:
            optimizer.zero_grad()
        try:
            train_step({"x": torch.randn(3, 4), "mask": torch.full((3,), float(i != 3))})
            if i % 2 == 1:  # gradients of two batches
                optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"totals": {k: str(v) for k, v in totals.items()}, "log": log, **ends(model)}
