"""Lines of a report beside its frames: modules that nobody called, weights that grew or are far from their siblings."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import nanwatch
from nanwatch.report.events import Suspect
from support.toys import fault_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    """Calls one Linear by its forward, one by its weight alone. All others are called, or not trained, or PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.direct = nn.Linear(4, 4)
        self.weight_alone = nn.Linear(4, 4, bias=False)
        self.left_out = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layers[0].inner.weight  # type: ignore[union-attr, assignment]
        self.normed = weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.zero = nn.Linear(4, 4)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)
        self.free = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.direct.forward(x) + nn.functional.linear(x, self.weight_alone.weight)
        x = self.zero(self.normed(nn.functional.linear(x, self.tied.weight)))
        attended: Tensor = self.attention(x, x, x)[0]
        return attended * self.free[0]


def train(model: nn.Module, steps: int) -> Iterator[int]:
    """Train, and yield before each step and at the end, when there are no gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        yield step
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    yield steps


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_modules_that_nobody_called_are_named() -> None:
    """While there are gradients, after the steps have taken them, and when a checkpoint was loaded meanwhile."""
    model = Model()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with nanwatch.watch(model) as watch:
        assert watch.report().never_called == ()
        for step in train(model, 3):
            if step == 0:
                model.load_state_dict(state)
            report = watch.report()
            assert report.never_called == ("direct", "weight_alone")
    assert nanwatch.Report.from_json(report.to_json()) == report
    named = "Never called as modules, though their weights are trained: direct, weight_alone."
    assert named in str(report)
    assert named in report.to_html()


def suspects_of(model: Model, scale: float) -> tuple[Suspect, ...]:
    """Return the suspects of a failure in the third batch, from whose second on one weight is `scale` times larger."""
    with nanwatch.watch(model) as watch:
        model(torch.randn(1, 4))
        with torch.no_grad():
            model.layers[3].norm.weight.mul_(scale)  # type: ignore[union-attr, operator]
        model(torch.randn(1, 4))
        assert watch.report().suspects == ()
        report = fault_of(model, torch.full((1, 4), float("nan")))
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
