"""Judge the audit of steps by healthy trainings: it has to be silent on all of them.

    python benchmarks/judge_updates.py              # all, about two minutes
    python benchmarks/judge_updates.py adam tied    # those whose names contain one of the words

A line for each finding, which is a false alarm, and the number of silent trainings. Each is small and seeded, makes 12
steps, and is audited at each of them, which is the strictest setting: `watch(updates=1)`.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanwatch import watch
from nanwatch.report.update_finding import UpdateFinding

STEPS = 12
Parameters = list[nn.Parameter]


@dataclass
class Healthy:
    """A training: what makes its model, its optimizers, its batches, and what happens in a step."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = field(
        default=lambda own: torch.optim.AdamW(own, lr=1e-3)
    )
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    classes: bool = True
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    set_to_none: bool = True
    autocast: torch.dtype | None = None
    scaler: float | None = None
    clip: float | None = None
    clip_value: float | None = None
    evaluate: bool = False
    closure: bool = False
    before: Callable[[nn.Module], object] = lambda model: None
    parameters: Callable[[nn.Module], Any] = lambda model: [x for x in model.parameters() if x.requires_grad]
    after: Callable[[nn.Module, int], object] = lambda model, step: None
    run: Callable[[Healthy], tuple[UpdateFinding, ...]] | None = None

    def train(self) -> tuple[UpdateFinding, ...]:
        """Train, and return what the audit found."""
        torch.manual_seed(0)
        if self.run is not None:
            return self.run(self)
        model = self.model().to(self.dtype)
        self.before(model)
        optimizer = self.optimizer(list(self.parameters(model)))
        scheduler = None if self.scheduler is None else self.scheduler(optimizer)
        scaler = None if self.scaler is None else torch.amp.GradScaler("cpu", init_scale=self.scaler)
        with watch(model, updates=1, black_box=False, forecast=False, on_nonfinite="record") as w:
            for step in range(STEPS):
                self._step(model, optimizer, scaler)
                if scheduler is not None:
                    scheduler.step()
                self.after(model, step)
                if self.evaluate and step % 3 == 2:
                    model.eval()
                    with torch.no_grad():
                        for _ in range(3):
                            model(self._batch(model)[0])
                    model.train()
        return w.updates

    def _batch(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        vocabulary = getattr(model, "vocabulary", 0)
        if vocabulary:
            tokens = torch.randint(0, vocabulary, (8, 9))
            return tokens[:, :-1], tokens[:, 1:]
        x = torch.randn(16, *getattr(model, "shape", (8,)))
        y = torch.randint(0, 4, (16,)) if self.classes else torch.randn(16, 4)
        return (x.to(self.dtype) if self.autocast is None else x), y

    def _loss(self, model: nn.Module) -> Tensor:
        x, y = self._batch(model)
        with nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast):
            output = model(x)
        output, extra = output if isinstance(output, tuple) else (output, 0.0)
        output = output.float()
        if not self.classes:
            return F.mse_loss(output, y) + extra
        return F.cross_entropy(output.flatten(0, -2), y.flatten()) + extra

    def _step(self, model: nn.Module, optimizer: Any, scaler: Any) -> None:
        def gradients() -> Tensor:
            optimizer.zero_grad(set_to_none=self.set_to_none)
            for _ in range(self.accumulate):
                loss = self._loss(model) / self.accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if self.closure:
            optimizer.step(gradients)
            return
        gradients()
        if scaler is not None and self.clip is not None:
            scaler.unscale_(optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), self.clip_value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


# Models.


def mlp(*, drop: float = 0.1) -> nn.Module:
    """Return a classifier with batch norm and dropout."""
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(drop), nn.Linear(32, 4))


def plain() -> nn.Module:
    """Return a classifier without modes."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


class Image(nn.Sequential):
    """Convolutions in channels_last, with a bias in front of a norm."""

    shape = (3, 8, 8)

    def __init__(self) -> None:
        layers = [
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
        ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.to(memory_format=torch.channels_last)


class Language(nn.Module):
    """A transformer over tokens, with tied or free output weights."""

    vocabulary = 50

    def __init__(self, *, tied: bool = False, checkpointed: bool = False, attention: bool = True) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 16), nn.Parameter(torch.zeros(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """A mixture whose experts are called with the tokens that chose them, with all tokens or not at all."""

    def __init__(self, num: int = 8, top: int = 1, *, kind: str = "called") -> None:
        super().__init__()
        self.router = nn.Linear(8, num, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(num)
        )
        self.head, self.top, self.kind = nn.Linear(8, 4), top, kind
        # Two experts get nothing for a long time.
        self.register_buffer("bias", torch.tensor([-100.0] * 2 + [0.0] * (num - 2)))

    def forward(self, x: Tensor) -> Tensor:
        shares = (self.router(x) + self.bias).softmax(-1)
        values, chosen = shares.topk(self.top, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (values * (chosen == number)).sum(-1, keepdim=True)
            rows = share[:, 0].nonzero()[:, 0]
            if self.kind == "dense":
                total = total + share * expert(x)
            elif len(rows) or self.kind == "empty":
                total = total.index_add(0, rows, share[rows] * expert(x[rows]))
        return self.head(total + x)


class LoRA(nn.Module):
    """A frozen linear layer with an adapter that begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def lora() -> nn.Module:
    """Return an adapted classifier, whose head is frozen too."""
    return nn.Sequential(LoRA(nn.Linear(8, 32)), nn.GELU(), LoRA(nn.Linear(32, 4)))


class Tower(nn.Module):
    """A frozen tower under a trained head, in evaluation mode or without gradients if asked."""

    def __init__(self, *, frozen: bool = True, no_grad: bool = False, evaluated: bool = False) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)
        self.no_grad, self.evaluated = no_grad, evaluated
        if frozen:
            self.tower.requires_grad_(False)

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        if self.evaluated:
            self.tower.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.no_grad else nullcontext():
            features = self.tower(x)
        return self.head(features)


class Momentum(nn.Module):
    """A student with a teacher that follows it, inside the same model."""

    def __init__(self, *, needs_grad: bool = False) -> None:
        super().__init__()
        self.student = plain()
        self.teacher = copy.deepcopy(self.student).requires_grad_(needs_grad)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = self.teacher(x)
        output = self.student(x)
        return output, F.mse_loss(output, target)

    def follow(self) -> None:
        """Move the teacher towards the student."""
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.lerp_(new, 0.1)


class ZeroGain(nn.Module):
    """Branches behind gains that begin at zero, in two levels as in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        for layer in (self.gate, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.gate(x) * self.branch(x).relu())


class Unused(nn.Module):
    """A trunk with a pooler that no loss uses, and a token for masks that no batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pooler, self.head = nn.Linear(8, 64), nn.Linear(64, 4), nn.Linear(64, 4)
        self.mask = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x).tanh()
        self.pooler(features).tanh()
        return self.head(features)


class Tasks(nn.Module):
    """Two heads, of which each batch uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads, self.number = (
            nn.Linear(8, 16),
            nn.ModuleList(nn.Linear(16, 4) for _ in range(2)),
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.heads[self.number % 2](self.trunk(x).relu())


class Recurrent(nn.Module):
    """An LSTM with dropout over a sequence."""

    shape = (5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Normed(nn.Module):
    """Weight norm and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(500, 8, sparse=True, mode="mean"), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(torch.randint(0, 500, x.shape)))


# Optimizers that torch lacks.


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    m = self.state[x].setdefault("exp_avg", torch.zeros_like(x))
                    x.mul_(1 - group["lr"] * group["weight_decay"])
                    x.add_(torch.lerp(x.grad, m, group["betas"][0]).sign(), alpha=-group["lr"])
                    m.lerp_(x.grad, 1 - group["betas"][1])


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, which pulls the weights back every five steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.number = inner, 0
        super().__init__(inner.param_groups, {})
        self.slow = [x.detach().clone() for group in inner.param_groups for x in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.number += 1
        if self.number % 5 == 0:
            with torch.no_grad():
                held = [x for group in self.inner.param_groups for x in group["params"]]
                for x, slow in zip(held, self.slow, strict=True):
                    slow.lerp_(x, 0.5)
                    x.copy_(slow)


class Kahan(torch.optim.SGD):
    """SGD that keeps what bfloat16 rounds away."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                lost = self.state[x].setdefault("lost", torch.zeros_like(x))
                lost.sub_(x.grad, alpha=group["lr"])
                new = x + lost
                lost.sub_(new - x)
                x.copy_(new)


class Masters(torch.optim.Optimizer):
    """AdamW over float32 copies of the weights, which it writes back."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.copies = [nn.Parameter(x.detach().float()) for x in params]
        self.inner = torch.optim.AdamW(self.copies, lr=1e-4)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = self.param_groups[0]["params"]
        for x, master in zip(own, self.copies, strict=True):
            master.grad = None if x.grad is None else x.grad.float()
        self.inner.step()
        with torch.no_grad():
            for x, master in zip(own, self.copies, strict=True):
                x.copy_(master)


# Trainings of another shape.


def gan(one: Healthy, *, critics: int = 1, apart: bool = False) -> tuple[UpdateFinding, ...]:
    """Train a generator against a discriminator with an optimizer each, in one watched model or the generator alone."""
    both = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)),
            "d": nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1)),
        }
    )
    g, d = both["g"], both["d"]
    opt_g, opt_d = (torch.optim.Adam(x.parameters(), lr=2e-4, betas=(0.5, 0.999)) for x in (g, d))
    with watch(g if apart else both, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            for _ in range(critics):
                opt_d.zero_grad()
                with torch.no_grad():
                    fake = g(torch.randn(16, 4))
                F.softplus(-d(torch.randn(16, 8))).mean().backward()
                F.softplus(d(fake)).mean().backward()
                opt_d.step()
            opt_g.zero_grad()
            F.softplus(-d(g(torch.randn(16, 4)))).mean().backward()
            opt_g.step()
    return w.updates


def compiled(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Train a model that torch.compile has compiled with the eager backend."""
    model = mlp()
    fast, optimizer = torch.compile(model, backend="eager"), torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(fast, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(fast(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
            optimizer.step()
    return w.updates


def compiled_step(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Train with a compiled step."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with watch(model, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
            step()
    return w.updates


def two_losses(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Make a backward for each of two losses of one forward."""
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            optimizer.zero_grad()
            output = model(torch.randn(16, 8))
            for loss in (F.cross_entropy(output, torch.randint(0, 4, (16,))), output.square().mean()):
                loss.backward(retain_graph=True)
            optimizer.step()
    return w.updates


def split(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Train matrices with Muon and the rest with AdamW."""
    model = Language()
    matrices = [x for x in model.layers.parameters() if x.ndim == 2]
    rest = [x for x in model.parameters() if not any(x is own for own in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]
    with watch(model, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            tokens = torch.randint(0, 50, (8, 9))
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return w.updates


def unfrozen(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Unfreeze the first layer after five steps, with a group of its own."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-3)
    with watch(model, updates=1, black_box=False, forecast=False) as w:
        for step in range(STEPS):
            if step == 5:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-4})
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 4, (16,))).backward()
            optimizer.step()
    return w.updates


def reinforced(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Train a policy on rollouts without gradients, and a target network that follows."""
    model, target = plain(), plain().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            with torch.no_grad():
                states = [torch.randn(1, 8) for _ in range(8)]
                actions = [model(x).argmax(-1) for x in states]
                values = torch.randn(8) + 0.9 * target(torch.cat(states)).amax(-1)
            optimizer.zero_grad()
            chosen = model(torch.cat(states)).gather(1, torch.cat(actions)[:, None])[:, 0]
            F.smooth_l1_loss(chosen, values).backward()
            optimizer.step()
            target.load_state_dict(model.state_dict())
    return w.updates


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Return groups with weight decay for matrices alone."""
    own = list(model.parameters())
    return [
        {"params": [x for x in own if x.ndim > 1], "weight_decay": decay},
        {"params": [x for x in own if x.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a schedule that begins at 0."""
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / steps))


def trainings() -> Iterator[tuple[str, Healthy]]:
    """Yield all trainings, by name."""
    optim: Any = torch.optim
    yield from (
        (f"optimizer-{name}", Healthy(plain, make))
        for name, make in {
            "sgd": lambda own: optim.SGD(own, lr=0.1),
            "sgd-momentum": lambda own: optim.SGD(own, lr=0.1, momentum=0.9),
            "sgd-dampening": lambda own: optim.SGD(
                own, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-4
            ),
            "sgd-nesterov": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
            "sgd-nesterov-loop": lambda own: optim.SGD(
                own, lr=0.1, momentum=0.9, nesterov=True, foreach=False
            ),
            "sgd-fused": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, fused=True),
            "sgd-foreach": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, foreach=True),
            "adam": lambda own: optim.Adam(own),
            "adam-l2": lambda own: optim.Adam(own, weight_decay=0.1),
            "adam-amsgrad": lambda own: optim.Adam(own, amsgrad=True),
            "adam-fused": lambda own: optim.Adam(own, fused=True),
            "adam-foreach": lambda own: optim.Adam(own, foreach=True),
            "adam-tensor-lr": lambda own: optim.Adam(own, lr=torch.tensor(1e-3)),
            "adam-beta1-0": lambda own: optim.Adam(own, betas=(0.0, 0.99)),
            "adam-large-eps": lambda own: optim.Adam(own, eps=1.0),
            "adamw": lambda own: optim.AdamW(own),
            "adamw-decay": lambda own: optim.AdamW(own, weight_decay=0.5),
            "adamw-fused": lambda own: optim.AdamW(own, fused=True),
            "adamw-foreach": lambda own: optim.AdamW(own, foreach=True),
            "adamw-loop": lambda own: optim.AdamW(own, foreach=False),
            "adamw-maximize": lambda own: optim.AdamW(own, maximize=True),
            "adamw-tiny-lr": lambda own: optim.AdamW(own, lr=1e-7),
            "adamax": lambda own: optim.Adamax(own),
            "nadam": lambda own: optim.NAdam(own),
            "radam": lambda own: optim.RAdam(own),
            "adagrad": lambda own: optim.Adagrad(own),
            "adadelta": lambda own: optim.Adadelta(own),
            "rmsprop": lambda own: optim.RMSprop(own),
            "rmsprop-centered": lambda own: optim.RMSprop(own, centered=True, momentum=0.9),
            "rprop": lambda own: optim.Rprop(own),
            "asgd": lambda own: optim.ASGD(own),
            "adafactor": lambda own: optim.Adafactor(own),
            "lion": lambda own: Lion(own),
            "lion-decay": lambda own: Lion(own, weight_decay=0.1),
            "lookahead": lambda own: Lookahead(optim.SGD(own, lr=0.1)),
        }.items()
    )
    yield "optimizer-lbfgs", Healthy(plain, lambda own: optim.LBFGS(own, max_iter=3), closure=True)
    yield "optimizer-closure-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=0.1), closure=True)
    yield "optimizer-closure-adam", Healthy(mlp, closure=True)
    yield (
        "optimizer-sparse-adam",
        Healthy(
            Sparse,
            lambda own: optim.SparseAdam(own),
            parameters=lambda model: model.embed.parameters(),
            before=lambda model: model.head.requires_grad_(False),
        ),
    )
    yield "optimizer-sparse-sgd", Healthy(Sparse, lambda own: optim.SGD(own, lr=0.1))
    yield "optimizer-muon-and-adamw", Healthy(plain, run=split)
    yield "optimizer-nothing-set-to-none", Healthy(mlp, set_to_none=False)
    for name, make in {"mlp": mlp, "image": Image, "language": Language, "recurrent": Recurrent}.items():
        yield f"model-{name}", Healthy(make)
        yield f"model-{name}-sgd", Healthy(make, lambda own: optim.SGD(own, lr=0.05, momentum=0.9))
        yield f"model-{name}-evaluated", Healthy(make, evaluate=True)
        yield f"model-{name}-clipped", Healthy(make, clip=0.1)
        yield f"model-{name}-accumulated", Healthy(make, accumulate=4)
        if name != "recurrent":  # oneDNN has no such LSTM on every CPU
            yield f"model-{name}-bfloat16-autocast", Healthy(make, autocast=torch.bfloat16)
        yield f"model-{name}-warm-up", Healthy(make, scheduler=warm_up(8))
    yield "model-regression", Healthy(plain, classes=False)
    yield "model-normed", Healthy(Normed)
    yield "model-zero-gains", Healthy(ZeroGain)
    yield "model-zero-gains-warm-up", Healthy(ZeroGain, scheduler=warm_up(20))
    yield "model-zero-gains-sgd", Healthy(ZeroGain, lambda own: optim.SGD(own, lr=0.1))
    yield "model-unused-pooler", Healthy(Unused)
    yield "model-tasks-in-turn", Healthy(Tasks)
    yield "model-float64", Healthy(plain, dtype=torch.float64)
    yield "model-checkpointed", Healthy(lambda: Language(checkpointed=True))
    yield "tied", Healthy(lambda: Language(tied=True))
    yield "tied-sgd", Healthy(lambda: Language(tied=True), lambda own: optim.SGD(own, lr=0.1))
    yield (
        "tied-checkpointed-accumulated",
        Healthy(lambda: Language(tied=True, checkpointed=True), accumulate=2),
    )
    yield "lora", Healthy(lora)
    yield "lora-decay", Healthy(lora, lambda own: optim.AdamW(own, weight_decay=0.1))
    yield "lora-warm-up", Healthy(lora, scheduler=warm_up(8))
    yield "lora-sgd", Healthy(lora, lambda own: optim.SGD(own, lr=0.1))
    yield "lora-autocast", Healthy(lora, autocast=torch.bfloat16)
    yield "lora-all-parameters", Healthy(lora, parameters=lambda model: model.parameters())
    for frozen in ("frozen", "evaluated", "no-grad"):
        make_tower = lambda frozen=frozen: Tower(no_grad=frozen == "no-grad", evaluated=frozen != "frozen")  # noqa: E731
        yield f"tower-{frozen}", Healthy(make_tower)
        yield (
            f"tower-{frozen}-all-parameters",
            Healthy(make_tower, parameters=lambda model: model.parameters()),
        )
        yield (
            f"tower-{frozen}-decay",
            Healthy(
                make_tower,
                lambda own: optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
                parameters=lambda model: model.parameters(),
                set_to_none=False,
            ),
        )
    yield "tower-unfrozen-later", Healthy(mlp, run=unfrozen)
    for kind in ("called", "empty", "dense"):
        for top in (1, 2):
            yield f"experts-{kind}-top-{top}", Healthy(lambda kind=kind, top=top: Experts(top=top, kind=kind))
    yield "experts-sixteen", Healthy(lambda: Experts(16))
    yield "experts-sgd", Healthy(Experts, lambda own: optim.SGD(own, lr=0.1, momentum=0.9), set_to_none=False)
    yield "experts-accumulated", Healthy(Experts, accumulate=2)
    for needs_grad in (False, True):
        yield (
            f"teacher-{needs_grad}",
            Healthy(
                lambda needs_grad=needs_grad: Momentum(needs_grad=needs_grad),
                parameters=lambda model: model.student.parameters(),
                after=lambda model, step: model.follow(),
            ),
        )
    yield (
        "teacher-all-parameters",
        Healthy(
            Momentum, parameters=lambda model: model.parameters(), after=lambda model, step: model.follow()
        ),
    )
    yield "average-of-weights", Healthy(mlp, after=_averager())
    yield (
        "decay-groups",
        Healthy(
            Image,
            lambda own: optim.AdamW(groups(_holder(own)), lr=1e-3),
            parameters=lambda model: model.parameters(),
        ),
    )
    yield "decay-groups-language", Healthy(Language, lambda own: optim.AdamW(groups(_holder(own)), lr=1e-3))
    yield (
        "decay-groups-sgd",
        Healthy(Image, lambda own: optim.SGD(groups(_holder(own)), lr=0.1, momentum=0.9)),
    )
    yield (
        "rates-by-layer",
        Healthy(
            mlp, lambda own: optim.AdamW([{"params": [x], "lr": 1e-3 / (i + 1)} for i, x in enumerate(own)])
        ),
    )
    yield (
        "schedule-cosine",
        Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.CosineAnnealingLR(o, STEPS - 1)),
    )
    yield "schedule-to-0", Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS))
    yield (
        "schedule-one-cycle",
        Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=20)),
    )
    yield "schedule-steps", Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.StepLR(o, 3, 0.1))
    yield "schedule-warm-up-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=0.1), scheduler=warm_up(10))
    yield "clip-value", Healthy(mlp, clip_value=0.01)
    yield "clip-large", Healthy(mlp, clip=1e6)
    yield "clip-infinite", Healthy(mlp, clip=float("inf"))
    yield "clip-accumulated", Healthy(mlp, clip=0.01, accumulate=3)
    for scale in (128.0, 65536.0, 2.0**127):
        yield f"scaler-{scale:.3g}", Healthy(mlp, autocast=torch.bfloat16, scaler=scale)
        yield f"scaler-{scale:.3g}-clipped", Healthy(plain, autocast=torch.bfloat16, scaler=scale, clip=0.1)
        yield (
            f"scaler-{scale:.3g}-accumulated",
            Healthy(plain, autocast=torch.bfloat16, scaler=scale, accumulate=2),
        )
    yield (
        "scaler-fused",
        Healthy(
            plain, lambda own: optim.AdamW(own, lr=1e-3, fused=True), autocast=torch.bfloat16, scaler=1024.0
        ),
    )
    yield "bfloat16-large-rate", Healthy(plain, lambda own: optim.AdamW(own, lr=1e-2), dtype=torch.bfloat16)
    yield "bfloat16-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=1.0), dtype=torch.bfloat16)
    yield "bfloat16-kahan", Healthy(plain, lambda own: Kahan(own, lr=1e-3), dtype=torch.bfloat16)
    yield "bfloat16-masters", Healthy(plain, Masters, dtype=torch.bfloat16)
    yield (
        "bfloat16-warm-up",
        Healthy(plain, lambda own: optim.AdamW(own, lr=1e-2), dtype=torch.bfloat16, scheduler=warm_up(40)),
    )
    yield "gan", Healthy(plain, run=gan)
    yield "gan-critics", Healthy(plain, run=lambda one: gan(one, critics=5))
    yield "gan-generator-alone", Healthy(plain, run=lambda one: gan(one, apart=True))
    yield "compiled-model", Healthy(plain, run=compiled)
    yield "compiled-step", Healthy(plain, run=compiled_step)
    yield "two-losses", Healthy(plain, run=two_losses)
    yield "policy-and-target", Healthy(plain, run=reinforced)


def _holder(own: Parameters) -> nn.Module:
    return nn.ParameterList(own)


def _averager() -> Callable[[nn.Module, int], object]:
    kept: dict[int, torch.optim.swa_utils.AveragedModel] = {}

    def follow(model: nn.Module, step: int) -> None:
        kept.setdefault(id(model), torch.optim.swa_utils.AveragedModel(model)).update_parameters(model)

    return follow


def main(words: list[str]) -> int:
    """Run the chosen trainings, and return the number of false alarms."""
    chosen = [(name, one) for name, one in trainings() if not words or any(word in name for word in words)]
    alarms = 0
    for name, one in chosen:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = one.train()
        broken = [str(one.message) for one in told if "audits no more" in str(one.message)]
        alarms += bool(found or broken)
        for line in chain(map(str, found), broken):
            print(f"{name}: {line}", flush=True)
    print(f"{len(chosen) - alarms} of {len(chosen)} healthy trainings are silent")
    return alarms


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
