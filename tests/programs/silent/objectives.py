"""Healthy trainings with several models, optimizers or losses: an audit has to stay silent."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import clip_grad_norm_, parametrizations

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, mse, train, unusual, update, validate
from .methods import follow, mlp, normalize

logits_loss = nn.functional.binary_cross_entropy_with_logits
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


@unusual
def search_of_an_architecture(watch: Watching) -> None:
    layers, head = nn.ModuleList([mlp(8, 8, 8), nn.Identity(), nn.Linear(8, 8)]), nn.Linear(8, 4)
    model = nn.ModuleDict({"layers": layers, "head": head})
    model.register_parameter("alphas", nn.Parameter(1e-3 * torch.randn(3)))
    weights = [p for p in model.parameters() if p is not model.alphas]
    of_alphas, of_weights = Adam([model.alphas], lr=3e-4), SGD(weights, lr=0.025, momentum=0.9)

    def call(x: Tensor) -> Tensor:
        return head(
            sum(share * layer(x) for share, layer in zip(model.alphas.softmax(0), layers, strict=True))
        )

    with watch(model):
        for _, x, y in batches():
            update(of_alphas, mse(call(x[:8]), y[:8]))
            of_weights.zero_grad()
            mse(call(x[8:]), y[8:]).backward()
            clip_grad_norm_(weights, 5.0)
            of_weights.step()


@unusual
def soft_actor_and_critics(watch: Watching) -> None:
    actor, critics = nn.Linear(8, 8), nn.ModuleList(mlp(12, 16, 1) for _ in range(2))
    targets, log_alpha = copy.deepcopy(critics), nn.Parameter(torch.zeros(()))
    model = nn.ModuleDict({"actor": actor, "critics": critics, "targets": targets})
    model.register_parameter("log_alpha", log_alpha)
    of_critics, of_actor = Adam(critics.parameters(), lr=1e-3), Adam(actor.parameters(), lr=1e-3)
    of_alpha = Adam([log_alpha], lr=1e-3)

    def act(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(x).chunk(2, 1)
        action = torch.distributions.Normal(mean, softplus(spread) + 0.01).rsample()
        chance = -0.5 * ((action - mean) / (softplus(spread) + 0.01)).square().sum(1)
        return torch.tanh(action), chance

    def worst(judges: nn.ModuleList, x: Tensor, action: Tensor) -> Tensor:
        return torch.min(*(judge(torch.cat([x, action], 1)) for judge in judges))[:, 0]

    with watch(model):
        for _, x, y in batches():
            with torch.no_grad():
                action, chance = act(x.roll(1, 0))
                goal = y.sum(1) + 0.9 * (worst(targets, x.roll(1, 0), action) - log_alpha.exp() * chance)
            update(of_critics, sum(mse(critic(torch.cat([x, y], 1))[:, 0], goal) for critic in critics))
            critics.requires_grad_(False)
            action, chance = act(x)
            update(of_actor, (log_alpha.exp().detach() * chance - worst(critics, x, action)).mean())
            critics.requires_grad_(True)
            update(of_alpha, -(log_alpha * (chance.detach() - 4)).mean())
            follow(targets, critics)


# Several views.


@unusual
def queue_of_keys(watch: Watching) -> None:
    query = Layers(norm=nn.BatchNorm1d(16))
    key, queue = copy.deepcopy(query).requires_grad_(False), normalize(torch.randn(32, 4))
    model = nn.ModuleDict({"query": query, "key": key})
    model.register_buffer("queue", queue)
    optimizer = SGD(query.parameters(), lr=0.03, momentum=0.9)
    with watch(model):
        for _, x, _ in batches():
            left = normalize(query(x + 0.1 * torch.randn_like(x)))
            with torch.no_grad():
                follow(key, query, 0.01)
                right = normalize(key(x))
            scores = torch.cat([(left * right).sum(1, keepdim=True), left @ model.queue.T], 1) / 0.07
            update(optimizer, cross_entropy(scores, torch.zeros(16, dtype=torch.long)))
            model.queue = torch.cat([model.queue[16:], right])


@unusual
def predictor_without_negatives(watch: Watching) -> None:
    online, predictor = Layers(norm=nn.BatchNorm1d(16)), mlp(4, 8, 4)
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad = False
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], lr=1e-3)
    with watch(nn.ModuleDict({"online": online, "predictor": predictor, "target": target})):
        for _, x, _ in batches():
            views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
            with torch.no_grad():
                goals = [normalize(target(view)) for view in reversed(views)]
            pairs = zip(views, goals, strict=True)
            update(
                optimizer, sum((2 - 2 * normalize(predictor(online(v))) * g).sum(1).mean() for v, g in pairs)
            )
            follow(target, online, 0.01)


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
def centers_with_a_rate_of_their_own(watch: Watching) -> None:
    model, centers = Layers(), nn.Parameter(torch.randn(4, 16))
    model.register_parameter("centers", centers)
    weights = [p for p in model.parameters() if p is not centers]
    of_model, of_centers = SGD(weights, lr=0.05), SGD([centers], lr=0.5)
    with watch(model):
        for _, x, y in batches():
            features, labels = model.features(x), y.argmax(1)
            of_model.zero_grad()
            of_centers.zero_grad()
            (cross_entropy(model.head(features), labels) + 0.01 * mse(features, centers[labels])).backward()
            of_model.step()
            centers.grad.data *= 1 / 0.01
            of_centers.step()


@unusual
def losses_weighted_by_their_uncertainty(watch: Watching) -> None:
    model = Layers()
    model.register_parameter("log_variances", nn.Parameter(torch.zeros(2)))
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, y in batches():
            output = model(x)
            losses = torch.stack([mse(output[:, :2], y[:, :2]), mse(output[:, 2:], y[:, 2:])])
            update(optimizer, (losses * (-model.log_variances).exp() + model.log_variances).sum())


@unusual
def reversed_gradient_of_a_domain(watch: Watching) -> None:
    body, labels, domains = mlp(8, 16, 8), nn.Linear(8, 4), nn.Linear(8, 2)
    model = nn.ModuleDict({"body": body, "labels": labels, "domains": domains})
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model):
        for step, x, y in batches():
            features, share = body(x), step / 12  # 0 in the first step
            flipped = (1 + share) * features.detach() - share * features
            domain = cross_entropy(domains(flipped), (torch.arange(16) >= 8).long())
            update(optimizer, mse(labels(features[:8]), y[:8]) + domain)


# Distributions.


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = mlp(4, 16, 8), flip
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)[:: -1 if self.flip else 1]
        scale, shift = self.net(kept).chunk(2, 1)
        moved = moved * torch.tanh(scale).exp() + shift
        return torch.cat([moved, kept] if self.flip else [kept, moved], 1), torch.tanh(scale).sum(1)


@unusual
def normalizing_flow(watch: Watching) -> None:
    model = nn.ModuleList(Coupling(bool(number % 2)) for number in range(4))
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, _ in batches():
            volume = torch.zeros(16)
            for layer in model:
                x, change = layer(x)
                volume = volume + change
            update(optimizer, (0.5 * x.square().sum(1) - volume).mean())


@unusual
def variational_with_a_warm_up(watch: Watching) -> None:
    encoder, decoder = nn.Linear(8, 8), mlp(4, 8, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for step, x, _ in batches():
            mean, log_variance = encoder(x).chunk(2, 1)
            output = decoder(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            update(optimizer, mse(output, x) + min(1.0, step / 6) * divergence)


@unusual
def diffusion_with_averaged_weights(watch: Watching) -> None:
    model = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    averaged = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(nn.ModuleDict({"model": model, "averaged": averaged})):
        for step, x, _ in batches():
            time, noise = torch.rand(16, 1), torch.randn_like(x)
            noisy = time.cos() * x + time.sin() * noise
            optimizer.zero_grad()
            mse(model(torch.cat([noisy, time], 1)), noise).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            follow(averaged, model, 0.1)
            if step % 4 == 3:
                sample = torch.randn(4, 8)
                with torch.no_grad():
                    for time in torch.linspace(1, 0, 5):
                        sample = sample - 0.2 * averaged(torch.cat([sample, time.expand(4, 1)], 1))


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
