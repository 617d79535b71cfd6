"""`Trace(fingerprints=True)`: every record has the fingerprint of its tensor as it was at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.records.record import Frame
from support.recorders import WITH_DEVICE, watched


class Views(nn.Module):
    """Returns its argument in many shapes, dtypes and layouts, some of which share elements with others."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.weight.sum())


def same_elements(x: Tensor) -> list[Tensor]:
    """Views that the cache of ranges takes for one tensor, as their range is the same."""
    return [x, x.reshape(-1), x.reshape(2, -1), x.T, x.T.contiguous(), x.flatten()[1:], x]


def lazy_bits(x: Tensor) -> list[Tensor]:
    z = torch.complex(x, x + 1)
    return [z, z.conj(), z.imag, z.conj().imag, z.real]


def of_other_dtypes(x: Tensor) -> list[Tensor]:
    return [
        *(x.to(torch.bfloat16), x.to(torch.float64), x.long(), x > 0, x.view(torch.int32)),
        *(x[:0], x[0, 0], x.expand(3, *x.shape), x.to(torch.float8_e5m2)),
    ]


def not_finite(x: Tensor) -> list[Tensor]:
    """Rows that Python makes: failures and masks."""
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).tril() == 0, torch.finfo(torch.float32).min)
    return [x / 0, x.log() * torch.inf, mask, torch.full((3,), torch.nan)]


def written(x: Tensor) -> list[Tensor]:
    before = x.clone()
    return [before, x.add_(1)]


class Chain(nn.Sequential):
    """Hands each output of the first to a module of its own, as a tensor that was read before."""

    def forward(self, x: Tensor) -> Any:
        return [self[1](one) for one in self[0](x)]


def seen(model: nn.Module) -> list[list[int]]:
    """Fill a list with the fingerprints of each call's weights, inputs and outputs, by plain hooks."""
    calls: list[list[int]] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        values = [*module.parameters(recurse=False), *args]
        values += output if isinstance(output, list) else [output]
        calls.append([nanwatch.fingerprint(x.detach()) for x in values])

    for module in model.modules():
        module.register_forward_hook(hook)
    return calls


def recorded(frames: tuple[Frame, ...]) -> list[list[int | None]]:
    return [[record.fingerprint for record in frame.records] for frame in frames]


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("make", [same_elements, lazy_bits, of_other_dtypes, not_finite, written])
def test_each_record_has_the_fingerprint_of_its_tensor(make: Any, recorder: str) -> None:
    """Also where the range is known from another view, and in a second batch, which knows the weights."""
    torch.manual_seed(0)
    model = Chain(Views(make), nn.Identity())
    calls = seen(model)
    with watched(model, recorder, fingerprints=True, max_frames=100, on_nonfinite="record") as w:
        for _ in range(2):
            model(torch.randn(3, 4))
        frames = w.frames
    assert recorded(frames) == calls
    assert w.counters.get("stale_hits", 0) == 0
