"""Healthy trainings by methods of the literature, each written as its users write it: an audit has to stay silent."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.checkpoint import checkpoint

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, mse, train, unusual, update, validate

normalize, one_hot = nn.functional.normalize, nn.functional.one_hot


def mlp(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))[:-1]


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, share: float = 0.05) -> None:
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.data.mul_(1 - share).add_(share * new.data)


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
def soft_prompt(watch: Watching) -> None:
    model = nn.ModuleDict(
        {"body": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "head": nn.Linear(8, 4)}
    )
    model.requires_grad_(False)
    model.register_parameter("prompt", nn.Parameter(torch.randn(3, 8) * 0.02))

    def call(x: Tensor) -> Tensor:
        prompted = torch.cat([model.prompt.expand(16, 3, 8), x[:, None]], 1)
        return model["head"](model["body"](prompted)[:, -1])

    with watch(model):
        train(model, Adam([model.prompt], lr=1e-2), call)


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
def iterative_pruning(watch: Watching) -> None:
    model = Layers()
    for layer in (model.stem, model.head):
        prune.l1_unstructured(layer, "weight", 0.3)

    def sparser(step: int) -> None:
        if step == 5:
            prune.l1_unstructured(model.stem, "weight", 0.5)
        if step == 8:
            prune.remove(model.head, "weight")

    with watch(model):
        train(model, SGD(model.parameters(), lr=0.05, momentum=0.9), after=sparser)


class FakeQuantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().max() / 7
        weight = torch.fake_quantize_per_tensor_affine(self.weight, float(scale), 0, -8, 7)
        return nn.functional.linear(x, weight, self.bias)


@unusual
def quantization_aware(watch: Watching) -> None:
    model = nn.Sequential(FakeQuantized(8, 16), nn.BatchNorm1d(16), nn.ReLU(), FakeQuantized(16, 4))
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=1e-4)
    with watch(model):
        train(model, optimizer, steps=8)
        model[1].eval()  # the last epochs keep the statistics, as for deployment
        train(model, optimizer, steps=6)


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
def reptile(watch: Watching) -> None:
    model = mlp(8, 16, 4)
    with watch(model):
        for _ in range(4):
            before = copy.deepcopy(model.state_dict())
            train(model, SGD(model.parameters(), lr=0.05), steps=4)
            after = model.state_dict()
            model.load_state_dict(
                {name: before[name] + 0.3 * (after[name] - before[name]) for name in before}
            )


@unusual
def evolution_strategy(watch: Watching) -> None:
    model = mlp(8, 4)
    optimizer = Adam(model.parameters(), lr=1e-2)
    with watch(model), torch.no_grad():
        for _, x, y in batches():
            weights = dict(model.named_parameters())
            slopes = {name: torch.zeros_like(p) for name, p in weights.items()}
            for _ in range(4):
                noise = {name: torch.randn_like(p) for name, p in weights.items()}
                ends = [{n: p + sign * 0.1 * noise[n] for n, p in weights.items()} for sign in (1, -1)]
                high, low = (mse(functional_call(model, end, (x,)), y) for end in ends)
                for name in slopes:
                    slopes[name] += (high - low) / 0.8 * noise[name]
            for name, p in weights.items():
                p.grad = slopes[name]
            optimizer.step()


@unusual
def layers_with_goals_of_their_own(watch: Watching) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(size, 16), nn.ReLU()) for size in (12, 16, 16))
    optimizers = [Adam(layer.parameters(), lr=1e-3) for layer in model]
    with watch(model):
        for _, x, y in batches():
            labels = one_hot(y.argmax(1), 4)
            good, bad = torch.cat([x, labels], 1), torch.cat([x, labels.roll(1, 1)], 1)
            for layer, optimizer in zip(model, optimizers, strict=True):
                high, low = layer(good).square().mean(1), layer(bad).square().mean(1)
                update(optimizer, nn.functional.softplus(torch.cat([1 - high, low - 1])).mean())
                good, bad = normalize(layer(good).detach()), normalize(layer(bad).detach())


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
def counted_over_ragged_micro_batches(watch: Watching) -> None:
    model = Layers(drop=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _, x, y in batches():
            optimizer.zero_grad()
            for rows, target in zip(x.split([9, 4, 3]), y.split([9, 4, 3]), strict=True):
                (mse(model(rows), target, reduction="sum") / y.numel()).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


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


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 6), nn.ModuleList(mlp(8, 8, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        weight, choice = shares.topk(1)
        output = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts[:5]):
            rows = (choice[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, weight[rows] * expert(x[rows]))
        return output


@unusual
def experts_of_which_some_rest(watch: Watching) -> None:
    model = Experts()
    with watch(model):
        train(model, AdamW(model.parameters(), lr=1e-3))


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
