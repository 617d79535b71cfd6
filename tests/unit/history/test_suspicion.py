"""Lines of a report beside its frames: weights that grew or are far from their siblings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.report.events import Suspect


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    """Six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def suspects_of(model: Model, scale: float) -> tuple[Suspect, ...]:
    """Return the suspects of a failure in the third batch, from whose second on one weight is `scale` times larger."""
    with nanwatch.watch(model) as watch:
        model(torch.randn(1, 4))
        with torch.no_grad():
            model.layers[3].norm.weight.mul_(scale)  # type: ignore[union-attr, operator]
        model(torch.randn(1, 4))
        assert watch.report().suspects == ()
        with pytest.raises(nanwatch.NonFiniteError) as error:
            model(torch.full((1, 4), float("nan")))
    report = error.value.report
    assert all(suspect.module in report.to_html() for suspect in report.suspects)
    return nanwatch.Report.from_json(report.to_json()).suspects


@pytest.mark.parametrize(("scale", "is_named"), [(560, True), (8, True), (7, False), (0.01, False)])
def test_a_weight_that_grew_is_named_with_its_siblings(scale: float, is_named: bool) -> None:
    """From eight times on: the weight, its first and its latest abs max, and the median of the other five layers."""
    expected = Suspect("layers.3.norm", "weight", scale, 1.0, "layers.*.norm", 5, 1.0)
    assert suspects_of(Model(), scale) == (expected,) * is_named


def test_a_weight_that_was_far_from_its_siblings_already() -> None:
    """One that was so when the watch began did not grow, and is apart from the others: a bad checkpoint."""
    model = Model()
    nn.init.constant_(model.layers[2].norm.weight, 1e6)  # type: ignore[union-attr, arg-type]
    assert suspects_of(model, 1) == (Suspect("layers.2.norm", "weight", 1e6, None, "layers.*.norm", 5, 1.0),)
