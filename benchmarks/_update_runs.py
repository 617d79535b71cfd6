"""Healthy trainings that `judge_updates.py` runs: a plain one, and those of another shape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from _update_models import Language, mlp, plain
from torch import Tensor, nn
from torch.nn import functional as F

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


def gan_by_one_function(one: Healthy) -> tuple[UpdateFinding, ...]:
    """Train a generator and a critic, whose last bias falls out of its loss, by one function for both."""
    both = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), "d": nn.Linear(8, 1)}
    )
    g, d = both["g"], both["d"]
    opt_g, opt_d = (torch.optim.Adam(x.parameters(), lr=2e-4) for x in (g, d))

    def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with watch(both, updates=1, black_box=False, forecast=False) as w:
        for _ in range(STEPS):
            update(opt_d, d(g(torch.randn(16, 4)).detach()).mean() - d(torch.randn(16, 8)).mean())
            update(opt_g, -d(g(torch.randn(16, 4))).mean())
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
