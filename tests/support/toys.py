"""Small modules that several tests watch, and what they ask of a Watch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.records.record import Record
from nanwatch.report.finding import Finding
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.watch import Watch


class Scale(nn.Module):
    """Multiplies by its factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Does(nn.Module):
    """A module whose forward is the given function, of its parts and of what it is called with."""

    def __init__(self, forward: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


class Own(nn.Module):
    """Owns a weight of any shape, and hands its input on without using it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.1, 7.0).reshape(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Root(nn.Module):
    """Its derivative at 0 is inf."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def mlp() -> nn.Sequential:
    """Two layers, the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def fresh(x: Tensor) -> tuple[float, float]:
    """The range as torch computes it now."""
    magnitude = x.detach().abs()
    return magnitude.min().item(), magnitude.max().item()


def latest(w: Watch, label: str, name: str = "") -> Record:
    """The record of that label in the latest frame of that module."""
    frame = [frame for frame in w.frames if frame.name == name][-1]
    (match,) = [record for record in frame.records if record.label == label]
    return match


def seen(w: Watch, label: str, name: str = "") -> tuple[float | None, float | None]:
    """The range in the latest frame of that module."""
    record = latest(w, label, name)
    return record.abs_min, record.abs_max


def names(w: Watch) -> list[tuple[int, str]]:
    return [(frame.batch, frame.name) for frame in w.frames]


def finding_of(error: pytest.ExceptionInfo[NonFiniteError]) -> Finding:
    return error.value.report.finding


def fault_of(model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """The report of the error that the call raises."""
    with pytest.raises(NonFiniteError) as error:
        model(*args, **kwargs)
    return error.value.report


def text_of(w: Watch) -> str:
    """All of its report, and of its frames."""
    return w.report().to_json() + repr(w.frames)
