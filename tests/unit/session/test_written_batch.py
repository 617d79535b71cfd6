"""A batch that the model spoils in place is the model's fault, not that of the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError
from support.recorders import WITH_DEVICE, watched
from support.toys import finding_of


def fill(x: Tensor) -> None:
    x[0, 0] = float("nan")  # fill


def log(x: Tensor) -> None:
    x.sub_(2)
    x.log_()  # log


def leave(x: Tensor) -> None:
    x.sum()


class Spoils(nn.Module):
    def __init__(self, write: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.write, self.net = write, nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.net(x)


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("write", [fill, log, leave])
def test_who_wrote_what_the_batch_holds(write: Callable[[Tensor], None], recorder: str) -> None:
    """The report has the line that wrote it, unless nothing did."""
    x = torch.full((2, 4), torch.inf if write is leave else 1.0)
    model = nn.Sequential(Spoils(write))
    with watched(model, recorder), pytest.raises(NonFiniteError) as error:
        model(x)
    finding = finding_of(error)
    assert (finding.module, finding.label) == ("", "input[0]")
    assert finding.origin == ("data" if write is leave else "produced")
    if write is not leave:
        assert finding.place is not None
        line = Path(__file__).read_text().splitlines()[finding.place.line - 1]
        assert line.endswith(f"# {write.__name__}")
        assert not any("came in with" in remark for remark in finding.remarks)


class Keys:
    """A key-value cache: each layer adds to it."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor, cache: Keys) -> Tensor:
        cache.layers.append(self.keys(x).repeat(2, 1))
        return self.out(x + cache.layers[-1][:2] / self.scale)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, cache: Keys) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("origin", ["weight", "received"])
def test_what_a_cache_took_in_is_no_data(origin: str, recorder: str) -> None:
    """At the end of a batch the cache that was passed in holds what the batch has made."""
    model = Decoder()
    with torch.no_grad():
        if origin == "weight":
            model.layers[1].keys.weight[0, 0] = torch.inf
        else:
            model.layers[1].scale = 0.0
        with watched(model, recorder), pytest.raises(NonFiniteError) as error:
            model(torch.ones(2, 4), Keys())
    finding = finding_of(error)
    place = ("layers.1.keys", "weight") if origin == "weight" else ("layers.1.out", "input[0]")
    assert (finding.module, finding.label, finding.origin) == (*place, origin)
