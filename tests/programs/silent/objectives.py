"""Healthy trainings with several models, optimizers or losses: an audit has to stay silent."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, cross_entropy, mse, train, unusual, validate
from .methods import mlp, normalize, update

logits_loss, softplus = nn.functional.binary_cross_entropy_with_logits, nn.functional.softplus
ONES, ZEROS = torch.ones(16, 1), torch.zeros(16, 1)


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
def spectral_norm_and_a_hinge(watch: Watching) -> None:
    generator, norm = mlp(8, 16, 4), parametrizations.spectral_norm
    critic = nn.Sequential(norm(nn.Linear(4, 16)), nn.LeakyReLU(0.1), norm(nn.Linear(16, 1)))
    of_generator, of_critic = Adam(generator.parameters(), lr=1e-4), Adam(critic.parameters(), lr=4e-4)
    with watch(nn.ModuleDict({"generator": generator, "critic": critic})):
        for _, x, real in batches():
            for _ in range(2):
                made = generator(x).detach()
                update(of_critic, (1 - critic(real)).relu().mean() + (1 + critic(made)).relu().mean())
            update(of_generator, -critic(generator(x)).mean())


@unusual
def factors_in_turn(watch: Watching) -> None:
    users, items = nn.Embedding(12, 4), nn.Embedding(12, 4)
    of_users, of_items = SGD(users.parameters(), lr=0.1), SGD(items.parameters(), lr=0.1)
    with watch(nn.ModuleDict({"rows": users, "columns": items})):
        for step, x, _ in batches():
            left, right = ((x[:, :2] * 5).long() % 12).unbind(1)
            loss = mse((users(left) * items(right)).sum(1), x[:, 2])
            users.zero_grad()
            items.zero_grad()
            loss.backward()
            (of_users if step % 2 else of_items).step()


# Several views.


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
            left, right = normalize(whole).chunk(2)
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


# Distributions.


@unusual
def ensemble_in_a_loop(watch: Watching) -> None:
    members = nn.ModuleList(Layers(drop=0.1) for _ in range(3))
    optimizers = [AdamW(member.parameters(), lr=1e-3) for member in members]
    with watch(members):
        for _ in range(2):
            for member, optimizer in zip(members, optimizers, strict=True):
                train(member.train(), optimizer, steps=5)
                validate(member.eval())


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
