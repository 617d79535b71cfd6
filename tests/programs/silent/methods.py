"""Healthy trainings by methods of the literature, each written as its users write it: an audit has to stay silent."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, cross_entropy, mse, train, unusual, validate

logits_loss, softplus = nn.functional.binary_cross_entropy_with_logits, nn.functional.softplus
ONES, ZEROS = torch.ones(16, 1), torch.zeros(16, 1)


def mlp(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))[:-1]


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Some weights are trained, others rest.


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@unusual
def low_rank_adapters(watch: Watching) -> None:
    model = Layers(drop=0.1).requires_grad_(False)
    model.stem, model.head = LowRank(model.stem), LowRank(model.head)
    with watch(model):
        train(model, AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))


@unusual
def fine_tuning_with_resting_norms(watch: Watching) -> None:
    model = Layers(norm=nn.BatchNorm1d(16), drop=0.1)
    model.norm.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with watch(model):
        for _ in range(3):
            model.train()
            model.norm.eval()
            train(model, optimizer, steps=4)
            validate(model.eval())


@unusual
def tied_embedding_in_two_groups(watch: Watching) -> None:
    model = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False))
    model[2].weight = model[0].weight
    groups = [{"params": [model[0].weight]}, {"params": list(model[1].parameters()), "weight_decay": 0.0}]
    with watch(model):
        optimizer = AdamW(groups, lr=1e-2)
        for _, x, _ in batches():
            tokens = (x * 4).long() % 12
            update(optimizer, cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()))


@unusual
def tasks_in_a_row(watch: Watching) -> None:
    model = nn.ModuleDict({"body": mlp(8, 16, 8), "heads": nn.ModuleList(nn.Linear(8, 4) for _ in range(3))})
    with watch(model):
        for head in model["heads"]:
            optimizer = Adam([*model["body"].parameters(), *head.parameters()], lr=1e-3)
            train(model, optimizer, lambda x, head=head: head(model["body"](x)), steps=8)


# Other ways to a gradient.


@unusual
def physics_informed(watch: Watching) -> None:
    model = mlp(2, 16, 16, 1)
    points = torch.rand(32, 2, requires_grad=True)
    border = torch.cat([torch.rand(16, 1), torch.zeros(16, 1)], 1)

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        (curve,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        return (slope[:, 1] - curve[:, 0]).square().mean() + mse(model(border), border[:, :1].sin())

    adam, newton = Adam(model.parameters(), lr=1e-3), torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        newton.zero_grad()
        residual = loss()
        residual.backward()
        return residual

    with watch(model):
        for _ in range(8):
            update(adam, loss())
        for _ in range(3):
            newton.step(closure)


@unusual
def meta_learning_of_second_order(watch: Watching) -> None:
    model = mlp(8, 16, 4)
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for step, x, y in batches():
            total = torch.zeros(())
            for task in range(2):
                weights, sign = dict(model.named_parameters()), 1 - 2 * ((step + task) % 2)
                for _ in range(2):
                    inner = mse(functional_call(model, weights, (x[:8],)), sign * y[:8])
                    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                    weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
                total = total + mse(functional_call(model, weights, (x[8:],)), sign * y[8:])
            update(optimizer, total / 2)


@unusual
def optimizer_inside_the_backward(watch: Watching) -> None:
    model = Layers()
    optimizers = {p: AdamW([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with watch(model):
        for _, x, y in batches():
            mse(model(x), y).backward()


@unusual
def last_window_of_an_epoch_is_short(watch: Watching) -> None:
    model = Layers()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _ in range(2):
            for step, x, y in batches(10):
                (mse(model(x), y) / 4).backward()
                if (step + 1) % 4 == 0 or step == 9:
                    optimizer.step()
                    optimizer.zero_grad()


@unusual
def rate_finder(watch: Watching) -> None:
    model = Layers(norm=nn.BatchNorm1d(16))
    kept, optimizer = copy.deepcopy(model.state_dict()), SGD(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=3.0)
    with watch(model):
        train(model, optimizer, after=lambda step: schedule.step())
        model.load_state_dict(kept)
        train(model, SGD(model.parameters(), lr=0.05), steps=8)


# Modules of unusual forwards and backwards.


@unusual
def reentrant_checkpoints(watch: Watching) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.SiLU()) for _ in range(3))
    model = nn.ModuleDict({"stem": nn.Linear(8, 8), "blocks": blocks, "head": nn.Linear(8, 4)})

    def call(x: Tensor) -> Tensor:
        x = model["stem"](x)
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return model["head"](x)

    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), call)


@unusual
def sparse_embedding(watch: Watching) -> None:
    words, head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)
    optimizers = torch.optim.SparseAdam(words.parameters(), lr=1e-2), Adam(head.parameters(), lr=1e-2)
    with watch(nn.Sequential(words, head)):
        for _, x, y in batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse(head(words((x * 9).long() % 40).mean(1)), y).backward()
            for optimizer in optimizers:
                optimizer.step()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: nn.Module, second: nn.Module, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            left = left + first(right)
            right = right + second(left)
        ctx.layers, ctx.ends = (first, second), (left.detach(), right.detach())
        return left, right

    @staticmethod
    def backward(ctx: Any, of_left: Tensor, of_right: Tensor) -> Any:
        (first, second), (left, right) = ctx.layers, ctx.ends
        with torch.enable_grad():
            left = left.requires_grad_(True)
            moved = second(left)
            torch.autograd.backward(moved, of_right)
        of_left, right = of_left + left.grad, (right - moved).detach().requires_grad_(True)
        with torch.enable_grad():
            torch.autograd.backward(first(right), of_left)
        return None, None, of_left, of_right + right.grad


@unusual
def reversible_layers(watch: Watching) -> None:
    stem, first, second, head = nn.Linear(8, 16), mlp(8, 8, 8), mlp(8, 8, 8), nn.Linear(16, 4)
    model = nn.ModuleList([stem, first, second, head])

    def call(x: Tensor) -> Tensor:
        return head(torch.cat(Reversed.apply(first, second, *stem(x).chunk(2, 1)), 1))

    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-3), call)


# Two players.


@unusual
def adversaries_of_the_tutorial(watch: Watching) -> None:
    generator, critic = mlp(8, 16, 4), mlp(4, 16, 1)
    of_generator = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    with watch(nn.ModuleDict({"generator": generator, "critic": critic})):
        for _, x, real in batches():
            critic.zero_grad()
            logits_loss(critic(real), ONES).backward()
            made = generator(x)
            logits_loss(critic(made.detach()), ZEROS).backward()
            of_critic.step()
            generator.zero_grad()
            logits_loss(critic(made), ONES).backward()
            of_generator.step()


@unusual
def critic_frozen_in_the_other_turn(watch: Watching) -> None:
    there, back, critic = mlp(8, 16, 4), mlp(4, 16, 8), mlp(4, 16, 1)
    of_makers = Adam([*there.parameters(), *back.parameters()], lr=2e-4)
    of_critic = Adam(critic.parameters(), lr=2e-4)
    with watch(nn.ModuleDict({"there": there, "back": back, "critic": critic})):
        for _, x, real in batches():
            critic.requires_grad_(False)
            made = there(x)
            update(of_makers, mse(critic(made), ONES) + 10 * mse(back(made), x))
            critic.requires_grad_(True)
            update(of_critic, 0.5 * (mse(critic(real), ONES) + mse(critic(made.detach()), ZEROS)))


@unusual
def lazy_penalty(watch: Watching) -> None:
    generator, critic = mlp(8, 16, 4), mlp(4, 16, 1)
    of_generator, of_critic = Adam(generator.parameters(), lr=2e-4), Adam(critic.parameters(), lr=2e-4)
    with watch(nn.ModuleDict({"generator": generator, "critic": critic})):
        for step, x, real in batches():
            update(of_critic, softplus(critic(generator(x).detach())).mean() + softplus(-critic(real)).mean())
            if step % 4 == 0:
                real = real.clone().requires_grad_(True)
                (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
                update(of_critic, 4 * 5 * slope.square().sum(1).mean())
            update(of_generator, softplus(-critic(generator(x))).mean())


@unusual
def value_network_with_a_late_copy(watch: Watching) -> None:
    policy = mlp(8, 16, 4)
    target, optimizer = copy.deepcopy(policy), AdamW(policy.parameters(), lr=1e-3, amsgrad=True)
    with watch(nn.ModuleDict({"policy": policy, "target": target})):
        for step, x, y in batches():
            with torch.no_grad():
                action = torch.cat([policy(row[None]).argmax(1) for row in x])
                goal = y[:, 0] + 0.9 * target(x.roll(1, 0)).max(1).values
            value = policy(x).gather(1, action[:, None])[:, 0]
            optimizer.zero_grad()
            nn.functional.smooth_l1_loss(value, goal).backward()
            torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
            optimizer.step()
            if step % 5 == 4:
                target.load_state_dict(policy.state_dict())


# Several views, several models.


@unusual
def large_contrast_in_two_passes(watch: Watching) -> None:
    model = Layers(drop=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, _ in batches():
            chunks, states, parts = torch.cat([x, x + 0.1]).chunk(4), [], []
            with torch.no_grad():
                for chunk in chunks:
                    states.append(torch.get_rng_state())
                    parts.append(model(chunk))
            whole = torch.cat(parts).requires_grad_(True)
            left, right = nn.functional.normalize(whole).chunk(2)
            cross_entropy(left @ right.T / 0.1, torch.arange(16)).backward()
            optimizer.zero_grad()
            for chunk, state, slope in zip(chunks, states, whole.grad.chunk(4), strict=True):
                torch.set_rng_state(state)
                (model(chunk) * slope).sum().backward()
            optimizer.step()


@unusual
def triplets_of_one_encoder(watch: Watching) -> None:
    model, triplet = mlp(8, 16, 4), nn.TripletMarginLoss(margin=0.2)
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for step, x, _ in batches():
            update(optimizer, triplet(model(x), model(x + 0.05), model(x.roll(1, 0) * (1 + step % 3))))


@unusual
def federated_averaging(watch: Watching) -> None:
    server = Layers()
    clients = nn.ModuleList(copy.deepcopy(server) for _ in range(2))
    with watch(nn.ModuleDict({"server": server, "clients": clients})):
        for _ in range(4):
            for client in clients:
                client.load_state_dict(server.state_dict())
                train(client, SGD(client.parameters(), lr=0.05), steps=3)
            states = [client.state_dict() for client in clients]
            server.load_state_dict({name: sum(s[name] for s in states) / 2 for name in states[0]})
            validate(server.eval())
