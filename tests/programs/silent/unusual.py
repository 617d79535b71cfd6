"""Healthy trainings of unusual shape, on each of which an audit has to stay silent."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import update_bn

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, mse, train, unusual, update, validate


@unusual
def sharpness_aware(watch: Watching) -> None:
    model = Layers()
    optimizer, weights = SGD(model.parameters(), lr=0.05, momentum=0.9), list(model.parameters())
    with watch(model):
        for _, x, y in batches():
            mse(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in weights]).norm()
            moves = [0.05 * p.grad / norm for p in weights]
            with torch.no_grad():
                torch._foreach_add_(weights, moves)
            optimizer.zero_grad()
            mse(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(weights, moves)
            optimizer.step()
            optimizer.zero_grad()


@unusual
def gradient_surgery(watch: Watching) -> None:
    model = Layers()
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, y in batches():
            output, gradients = model(x), []
            for task in range(2):
                optimizer.zero_grad()
                mse(output[:, task], y[:, task]).backward(retain_graph=task == 0)
                gradients.append([p.grad.clone() for p in model.parameters()])
            for p, first, second in zip(model.parameters(), *gradients, strict=True):
                dot = (first * second).sum().clamp(max=0)
                p.grad = first + second - dot * second / second.norm().square().clamp(min=1e-12)
            optimizer.step()


@unusual
def domains_in_turn(watch: Watching) -> None:
    body, heads = Layers(), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model, turn = nn.ModuleDict({"body": body, "heads": heads}), iter(range(12))
    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), lambda x: heads[next(turn) // 2 % 3](body(x)))


@unusual
def entropy_temperature(watch: Watching) -> None:
    agent = nn.ModuleDict({"actor": nn.Linear(8, 4), "critic": nn.Linear(12, 1)})
    agent.register_parameter("log_alpha", nn.Parameter(torch.tensor(0.0)))
    optimizers = [Adam(part.parameters(), 1e-3) for part in (agent["critic"], agent["actor"])]
    optimizers.append(Adam([agent.log_alpha], 1e-3))
    with watch(agent):
        for _, x, y in batches():
            for turn, optimizer in enumerate(optimizers):
                action = torch.tanh(agent["actor"](x)) if turn else y
                value, entropy = agent["critic"](torch.cat([x, action], 1)), -action.square().mean()
                loss = mse(value, y.sum(1, keepdim=True)) if turn == 0 else -value.mean()
                if turn == 1:
                    loss = loss - agent.log_alpha.exp().detach() * entropy
                elif turn == 2:
                    loss = (agent.log_alpha * (entropy + 0.5).detach()).sum()
                update(optimizer, loss)


@unusual
def resting_last_layer(watch: Watching) -> None:
    model = Layers()

    def rest(step: int) -> None:
        for p in model.head.parameters() if step < 6 else ():
            p.grad = None

    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), before=rest)


@unusual
def dropout_as_uncertainty(watch: Watching) -> None:
    model = Layers(norm=nn.BatchNorm1d(16), drop=0.2)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _ in range(3):
            train(model.train(), optimizer, steps=4)
            model.eval()
            model.drop.train()
            with torch.no_grad():
                torch.stack([model(torch.ones(4, 8)) for _ in range(5)]).std(0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.layer(x))
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert, self.classifier = Encoder(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.bert(x)[0])


@unusual
def pooler_of_a_token_tagger(watch: Watching) -> None:
    model = Tagger()
    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), lambda x: model(x.view(4, 4, 8)).view(16, 4))


@unusual
def locked_image_tower(watch: Watching) -> None:
    model = nn.ModuleDict({"image": Layers(norm=nn.BatchNorm1d(16)).requires_grad_(False), "text": Layers()})
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, _ in batches():
            model.train()
            model["image"].eval()
            with torch.no_grad():
                image = model["image"](x)
            scores = model.scale.exp() * image @ model["text"](x).T
            pairs = torch.arange(16)
            update(optimizer, cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs))


@unusual
def rollouts(watch: Watching) -> None:
    policy, value = Layers(), Layers()
    model = nn.ModuleDict({"policy": policy, "value": value})
    optimizer = Adam(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, y in batches(4):
            with torch.no_grad():
                before = [policy(x + step).log_softmax(1) for step in range(6)]
                advantage = y.sum(1) - value(x)[:, 0]
            for _ in range(3):
                ratio = (policy(x).log_softmax(1) - before[0])[:, 0].exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                optimizer.zero_grad()
                (mse(value(x)[:, 0], y.sum(1)) - surrogate.mean()).backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()


@unusual
def precise_statistics(watch: Watching) -> None:
    model = Layers(norm=nn.BatchNorm1d(16))
    optimizer = SGD(model.parameters(), lr=0.05)
    with watch(model):
        for _ in range(3):
            train(model.train(), optimizer, steps=4)
            update_bn([x for _, x, _ in batches(4)], model)
            validate(model.eval(), 1)


@unusual
def lookahead(watch: Watching) -> None:
    model = Layers()
    slow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def look(step: int) -> None:
        for p, kept in zip(model.parameters(), slow, strict=True) if step % 3 == 2 else ():
            p.copy_(kept.lerp_(p, 0.5))

    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-2), after=look)


@unusual
def critic_with_gradient_penalty(watch: Watching) -> None:
    generator, critic = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
    of_generator, of_critic = Adam(generator.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    with watch(nn.ModuleDict({"generator": generator, "critic": critic})):
        for step, x, real in batches():
            made = generator(x).detach()
            mixed = (0.3 * real + 0.7 * made).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
            update(of_critic, critic(made).mean() - critic(real).mean() + penalty)
            if step % 3 == 2:
                update(of_generator, -critic(generator(x)).mean())


@unusual
def self_conditioning(watch: Watching) -> None:
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.1), nn.SiLU(), nn.Linear(16, 4))

    def call(x: Tensor) -> Tensor:
        guess = torch.zeros(16, 4)
        if x[0, 0] > 0:
            with torch.no_grad():
                guess = model(torch.cat([x, guess], 1))
        return model(torch.cat([x, guess], 1))

    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), call)


@unusual
def layers_dropped_at_random(watch: Watching) -> None:
    layers, head, turn = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4), iter(range(12))
    model = nn.ModuleDict({"layers": layers, "head": head})

    def call(x: Tensor) -> Tensor:
        step = next(turn)
        for number, layer in enumerate(layers):
            x = x + torch.tanh(layer(x)) if (step * 7 + number * 3) % 4 else x
        return head(x)

    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3), call)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        index = torch.cdist(hidden.detach(), self.codes).argmin(1)
        nearest = self.codes[index]
        with torch.no_grad():
            self.codes.index_copy_(0, index, nearest.lerp(hidden, 0.1))
        return self.decoder(hidden + (nearest - hidden).detach())


@unusual
def straight_through_codes(watch: Watching) -> None:
    model = Quantised()
    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3))


@unusual
def unfrozen_layer_by_layer(watch: Watching) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
    model[:3].requires_grad_(False)
    optimizer = AdamW(model[3].parameters(), lr=1e-3)

    def unfreeze(step: int) -> None:
        if step in (2, 5, 8):
            layer = model[2 - step // 3].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-4})

    with watch(model):
        train(model, optimizer, after=unfreeze)


@unusual
def layers_released_from_a_rate_of_zero(watch: Watching) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    groups = [{"params": [*model[0].parameters()], "lr": 0.0}, {"params": [*model[2].parameters()]}]
    optimizer = AdamW(groups, lr=1e-3)
    with watch(model):
        train(model, optimizer, after=lambda step: step == 4 and optimizer.param_groups[0].update(lr=1e-4))


@unusual
def truncated_recurrence_with_measured_norms(watch: Watching) -> None:
    cell, head, state = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4), [torch.zeros(1, 4, 16)]
    model = nn.ModuleDict({"cell": cell, "head": head})

    def call(x: Tensor) -> Tensor:
        output, state[0] = cell(x.view(4, 4, 8), state[0].detach())
        return head(output).view(16, 4)

    def measure(step: int) -> None:
        clip_grad_norm_(model.parameters(), float("inf")).item()

    with watch(model):
        train(model, SGD(model.parameters(), lr=0.05), call, before=measure)


@unusual
def batches_without_a_confident_label(watch: Watching) -> None:
    model = Layers(drop=0.1)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model):
        for step, x, _ in batches():
            with torch.no_grad():
                guess = model(x).argmax(1)
            mask = torch.full((16,), float(step % 3 != 1))
            update(optimizer, (cross_entropy(model(x + 0.1), guess, reduction="none") * mask).mean())
