"""Small models and optimizers of healthy trainings, for `judge_updates.py`."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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
