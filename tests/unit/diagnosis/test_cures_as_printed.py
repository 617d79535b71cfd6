"""Each cure that is told as working is applied to a fresh model as it is printed, and then all is finite."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.report.finding import Cure
from support.overflows import HALF, Attention, Op, linear, outlier


@dataclass
class Failure:
    """A failing model, the call of a user, and the verdicts on the changes that are told, by the begin of each."""

    build: Callable[[], nn.Module]
    given: Tensor
    told: list[tuple[str, str]]
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)
    autocast: bool = False
    loss: Callable[[Tensor], Tensor] | None = None  # where gradients are watched

    def run(self, model: nn.Module, x: Tensor, scale: float = 1.0, autocast: Any = None) -> None:
        """Make the call, and the backward and a step where gradients are watched."""
        torch.manual_seed(0)
        modes = autocast or (torch.autocast("cpu", HALF) if self.autocast else nullcontext())
        with torch.set_grad_enabled(self.loss is not None), modes:
            y = self.call(model, x)
        if self.loss is not None:
            (self.loss(y) * scale).backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()

    def cures(self) -> tuple[Cure, ...]:
        """The cures that are told of the failure."""
        model = self.build()
        watched = nanwatch.watch(model, gradients=self.loss is not None)
        with watched, pytest.raises(nanwatch.NonFiniteError) as error:
            self.run(model, self.given)
        finding = error.value.report.finding
        assert finding is not None
        assert (finding.phase == "backward") == (self.loss is not None)
        return finding.cures

    def is_finite(self, cure: str) -> bool:
        """Return whether all modules and gradients are finite after exactly what the text of the cure says."""
        model, x, scale, autocast = self.build(), self.given, 1.0, None
        for code in re.findall(r"nanwatch\.run_in_fp32\([^,]*?(?:, cast_output=False)?\)(?=,|$)", cure):
            eval(code, {"nanwatch": nanwatch, "model": model})
        if "model.to(torch.bfloat16)" in cure:
            model.to(torch.bfloat16)
        if "give it bfloat16 inputs" in cure:
            x = x.bfloat16()
        if code := re.search(r"torch\.autocast\(.*?\)", cure):
            autocast = eval(code[0], {"torch": torch})
        if "the whole of it in float32" in cure:
            model, x, autocast = model.float(), x.float(), nullcontext()
        if limit := re.search(r"clamp the input of `(.*)` to ±(\S+)", cure):
            end = float(limit[2])
            model.get_submodule(limit[1]).register_forward_pre_hook(lambda _, a: (a[0].clamp(-end, end),))
        if factor := re.search(r"a loss scale that is (\S+) times smaller", cure):
            scale = 1 / float(factor[1])
        bad: list[bool] = []
        for module in model.modules():
            module.register_forward_hook(lambda _m, _a, y: bad.append(not bool(y.isfinite().all())))
        self.run(model, x, scale, autocast)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients or self.loss is None
        return not any(bad) and all(bool(one.isfinite().all()) for one in gradients)


class Coder(nn.Module):
    """Called through `decode` and `encode` alone, as diffusers' autoencoders are."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.before = nn.Linear(4, 4)
        self.part = nn.Sequential(*parts)
        with torch.no_grad():
            self.before.weight.copy_(torch.eye(4))
            self.before.bias.zero_()
            self.embed.weight.fill_(100.0)

    def decode(self, x: Tensor) -> Tensor:
        return self.part(self.before(x))

    def encode(self, ids: Tensor) -> Tensor:
        return self.part(ids)


class Rounded(nn.Module):
    """Code that names float16 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(300), linear(1e-4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).half())


class Power(nn.Module):
    """The cube of gelu_new: tanh makes 1 of the inf that it is in float16; its derivative stays inf."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + 1e-6 * torch.pow(x, 3.0)) * x


def embedding(value: float) -> nn.Embedding:
    layer = nn.Embedding(4, 4)
    nn.init.constant_(layer.weight, value)
    return layer


def stack(*parts: nn.Module) -> Callable[[], nn.Module]:
    """Copies of these modules in float16, each time anew."""
    return lambda: nn.Sequential(*map(copy.deepcopy, parts)).half()


def full(value: float, dtype: torch.dtype = HALF) -> Tensor:
    return torch.full((2, 3, 4), value, dtype=dtype)


IDS = torch.zeros(2, 3, dtype=torch.long)
GROWS = (linear(300), linear(1e-4))

FAILURES = {
    "a part is called by a method": Failure(
        lambda: Coder(*map(copy.deepcopy, GROWS)).half(),
        full(100.0),
        [
            ("works", "run `part` in float32, nanwatch.run_in_fp32(model.part)"),
            ("does not help", "run `part.0` in"),
        ],
        call=lambda model, x: model.decode(x),
    ),
    "a part is called with integers": Failure(
        lambda: Coder(embedding(100), *map(copy.deepcopy, GROWS)).half(),
        IDS,
        [
            ("works", "load the weights in bfloat16, model.to(torch.bfloat16)"),
            ("works", "run `part` in float32, nanwatch.run_in_fp32(model.part)"),
            ("does not help", "run `part.1` in"),
        ],
        call=lambda model, x: model.encode(x),
    ),
    "inputs in half": Failure(
        stack(linear(1), Attention()),
        full(2000.0),
        [
            ("works", "run `1` in float32"),
            ("works", "load the weights in bfloat16, model.to(torch.bfloat16), and give it bfloat16 inputs"),
        ],
    ),
    "code that names float16, inside a part": Failure(
        lambda: nn.Sequential(linear(1), Rounded()).half(),
        full(100.0),
        [("does not help", "run `1.first` in float32")],
    ),
    "float32 weights among half ones": Failure(
        lambda: nn.Sequential(linear(1).half(), Op(lambda x: (x * x).float()), nn.LayerNorm(4)),
        full(100.0),
        [("works", "run the whole of it in float32"), ("does not help", "run `1` in float32")],
    ),
    "too little room": Failure(
        stack(linear(1), Op(lambda x: x * x / 100 * 5)),
        full(280.0),
        [("works", "load the weights in bfloat16"), ("not enough", "run `1` in float32")],
    ),
    "under autocast": Failure(
        lambda: nn.Sequential(linear(1), nn.Sequential(linear(300), linear(1e-4)), linear(1)),
        full(100.0, torch.float32),
        [
            ("works", "use bfloat16 in autocast"),
            ("works", "run `1` in float32, nanwatch.run_in_fp32(model[1])"),
            ("does not help", "run `1.0` in float32"),
        ],
        autocast=True,
    ),
    "an outlier may be clamped": Failure(
        lambda: nn.Sequential(linear(1), Op(lambda x: (x.half() * x.half()).float())),
        outlier(500.0),
        [("works", "clamp the input of `1` to ±128"), ("does not help", "run `1` in float32")],
        autocast=True,
    ),
    "a clamp would change all values": Failure(
        lambda: nn.Sequential(linear(1), Op(lambda x: (x.half() * x.half()).float())),
        full(500.0, torch.float32),
        [("does not help", "run `1` in float32")],
        autocast=True,
    ),
    "running statistics in half": Failure(
        stack(linear(300), linear(1e-4), nn.Flatten(0, 1), nn.BatchNorm1d(4)),
        full(100.0),
        [("works", "load the weights in bfloat16"), ("does not help", "run `0` in float32")],
    ),
    "a derivative that leaves float16": Failure(
        stack(linear(1), Power(), linear(0.01)),
        full(40.0),
        [("works", "run `1` in float32, nanwatch.run_in_fp32(model[1]), tried on the backward of `1`")],
        loss=lambda y: y.float().mean(),
    ),
    "gradients that grow on their way to the weights": Failure(
        stack(linear(1e-2), linear(20), linear(60), linear(1e-2)),
        full(1e-3),
        [("works", "a loss scale that is")],
        loss=lambda y: y.float().sum() * 3e4,
    ),
    "a pole": Failure(
        stack(linear(0), Op(torch.sqrt), linear(1)),
        full(1.0),
        [],
        loss=lambda y: y.float().sum(),
    ),
}


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("name", list(FAILURES))
def test_cures_work_as_they_are_printed(name: str) -> None:
    """The verdicts are those expected, working ones first, and each working one is true."""
    failure = FAILURES[name]
    cures = failure.cures()
    assert len(cures) == len(failure.told), [str(cure) for cure in cures]
    for cure, (verdict, begin) in zip(cures, failure.told, strict=True):
        assert (cure.verdict, cure.what[: len(begin)]) == (verdict, begin)
        assert str(cure).startswith(f"{verdict}: {begin}")
        if cure.works:
            assert cure.headroom_bits is None or cure.headroom_bits >= 1
            assert failure.is_finite(cure.what), cure.what


def test_the_failures_are_failures() -> None:
    """Without a change none of the runs is finite."""
    assert not any(failure.is_finite("") for failure in FAILURES.values())


@pytest.mark.usefixtures("each_recorder")
def test_the_users_graph_is_left_alone() -> None:
    """A batch may be called with what has a graph: its hooks run once, and its gradient is what it is unwatched."""
    calls: list[float] = []
    model = nn.Sequential(linear(1), Power(), linear(0.01)).half()
    before = nn.Parameter(full(40.0))
    x = before * 1
    x.register_hook(lambda gradient: calls.append(1.0))
    with nanwatch.watch(model, gradients=True):
        model(x).float().mean().backward()
        with pytest.raises(nanwatch.NonFiniteError) as error:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert error.value.report.finding is not None
    assert [cure.verdict for cure in error.value.report.finding.cures] == ["works"]
    assert len(calls) == 1
    assert before.grad is not None
    assert before.grad.isnan().all()
