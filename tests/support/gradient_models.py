"""Models whose gradients are non-finite or unusual, and the report of a backward that fails."""

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from nanwatch.records.record import Frame
from nanwatch.report.report import Report
from nanwatch.session.watch import Watch
from support.recorders import watched
from support.toys import fault_of


class Narrow(nn.Module):
    """Its middle goes through float16, whose gradients overflow when the loss is scaled by 2^17 and more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.last.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).half().float())


class Sick(nn.Module):
    """Finite, with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.sick = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.weight * x) if self.sick else self.weight * x


def backward_frames(w: Watch) -> list[Frame]:
    """The frames of backwards."""
    return [frame for frame in w.frames if frame.phase == "backward"]


def failing_backward(model: nn.Module, x: Any, loss: Any = lambda y: y.sum(), **options: Any) -> Report:
    """The report of the error that the step after a backward raises; the weights are as they were."""
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    with watched(model, options.pop("recorder", "native"), gradients=True, **options):
        loss(model(x)).backward()
        report = fault_of(optimizer.step)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    return report


class Step(nn.Module):
    """One operation on one or two tensors of shape (2, 4), with one or two results, perhaps through children."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.kind = rng.choice(["linear", "mul", "add", "pair", "same", "in place", "root", "gated"])
        self.parts = nn.ModuleList(Step(rng, depth - 1) for _ in range(rng.randint(1, 2) if depth else 0))
        if self.kind in ("linear", "gated"):
            self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=rng.random() < 0.8)
            self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for part in self.parts:
            found = part(x, y)
            x, y = (found, y) if isinstance(found, Tensor) else (found[0], found[1])
        if self.kind == "linear":
            return x @ self.weight * self.gain
        if self.kind == "gated":
            return {0: torch.sigmoid(x @ self.weight) * y, 1: y * self.gain}
        if self.kind == "mul":
            return (x * y).tanh()
        if self.kind == "pair":
            return x + 1.0, (y * 2.0, x.detach())[0]
        if self.kind == "in place":
            return (x * 1.0).mul_(0.5).add_(y)
        return {"add": x + y, "same": x, "root": (x * x + 1).sqrt()}[self.kind]


class Net(nn.Module):
    """Some steps, called in any order, some more than once, on what was made before; some results nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed % 2**31)
        self.seed = seed
        self.steps = nn.ModuleList(Step(rng, rng.randint(0, 2)) for _ in range(rng.randint(1, 4)))

    def forward(self, x: Tensor) -> list[Tensor]:
        rng = random.Random(self.seed + 1)
        pool = [x, x * 1.5]
        for _ in range(rng.randint(1, 5)):
            with torch.set_grad_enabled(rng.random() < 0.9):
                found = rng.choice(list(self.steps))(rng.choice(pool), rng.choice(pool))
            pool += [found] if isinstance(found, Tensor) else [found[0], found[1]]
        return [one for one in pool[2:] if rng.random() < 0.7] or [pool[-1]]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A number made of all but, when there are several, the last."""
    return sum((one.square().sum() for one in (outputs[:-1] or outputs)), torch.zeros((), requires_grad=True))


class Spoil(torch.autograd.Function):
    """The identity, whose gradient gets one inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = float("inf")
        return spoilt


class Spoiling(nn.Module):
    """A step whose own code spoils a gradient, before or behind its parts."""

    def __init__(self, step: nn.Module, behind: bool) -> None:
        super().__init__()
        self.step, self.behind = step, behind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        y = y.detach() if y is x else y
        found = self.step(x if self.behind else Spoil.apply(x), y)
        return Spoil.apply(found) if self.behind and isinstance(found, Tensor) else found


class Length(nn.Module):
    """0 / 0 in the derivative of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt() + x


def dead(last: nn.Module) -> nn.Module:
    """A layer that gives zeros before it, and one behind."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), last, nn.Linear(3, 2))
    nn.init.zeros_(model[0].weight)
    return model
