"""The rules of Adafactor and Muon beside torch's and transformers' own, and steps that go another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step", "ignore:.*more finding")
Change = Callable[[Any, dict[Tensor, Tensor]], object]


def optimizer_of(name: str) -> Any:
    if name == "transformers":
        return pytest.importorskip("transformers.optimization").Adafactor
    if name == "another":
        return type("Adafactor", (torch.optim.SGD,), {})
    return getattr(torch.optim, name)


def findings(
    name: str, options: dict[str, Any], change: Change | None = None, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Return the kinds found in 8 audited steps. `change` gets the optimizer and its weights before each step."""
    base = optimizer_of(name)

    class Changed(base):  # type: ignore[misc]
        def step(self, closure: None = None) -> None:
            own = [x for group in self.param_groups for x in group["params"]]
            before = {x: x.detach().clone() for x in own}
            inner(self)
            if change is not None:
                with torch.no_grad():
                    change(self, before)

    base([nn.Parameter(torch.ones(2, 2))], **options)  # which wraps the step of the class for its hooks
    inner = base.step.__wrapped__
    Changed.__name__ = base.__name__
    torch.manual_seed(0)
    # The first matrix is sampled, the second is read as a whole. Muon takes no vectors.
    vectors = name != "Muon"
    model = nn.Sequential(nn.Linear(16, 190, vectors), nn.Tanh(), nn.Linear(190, 5, vectors)).to(dtype)
    optimizer = Changed(model.parameters(), **options)
    with nanwatch.watch(model, updates=1, black_box=False) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            x = torch.randn(32, 16, dtype=dtype)
            (model(x) - x[:, :5]).square().mean().backward()
            optimizer.step()
    return [finding.kind for finding in watch.updates]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adafactor", {"lr": 0.01}),
        ("Adafactor", {"lr": 0.1, "weight_decay": 0.1, "foreach": True}),
        ("Adafactor", {"lr": 0.3, "d": 2.0, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)}),
        ("Adafactor", {"lr": 0.01, "maximize": True}),
        ("transformers", {}),
        ("transformers", {"warmup_init": True, "weight_decay": 0.1}),
        ("transformers", {"lr": 1e-2, "relative_step": False, "scale_parameter": False}),
        ("transformers", {"lr": 1e-2, "relative_step": False, "beta1": 0.9}),
        ("another", {"lr": 0.01}),
        ("Muon", {"lr": 0.02}),
        ("Muon", {"lr": 0.02, "nesterov": False, "momentum": 0.5, "weight_decay": 0.0}),
        ("Muon", {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
    ],
)
def test_a_step_by_the_rule_is_right(name: str, options: dict[str, Any]) -> None:
    assert findings(name, options) == []


def _transposed(optimizer: Any, before: dict[Tensor, Tensor]) -> None:
    """Writes the update of each square's transpose, as a kernel that takes a matrix for contiguous."""
    for x, old in before.items():
        if x.ndim == 2:
            x.copy_(old + (x - old).T.reshape(x.shape))


def _scaled(optimizer: Any, before: dict[Tensor, Tensor]) -> None:
    for x, old in before.items():
        x.copy_(old + 1.5 * (x - old))


def _as_sgd(optimizer: Any, before: dict[Tensor, Tensor]) -> None:
    """Moves as the gradient does, without its normalisation."""
    for x, old in before.items():
        x.copy_(old - x.grad * (x - old).norm() / x.grad.norm())


@pytest.mark.parametrize(
    ("name", "options", "change"),
    [
        ("Adafactor", {"lr": 0.1}, _transposed),
        ("Adafactor", {"lr": 0.1}, _as_sgd),
        ("transformers", {}, _transposed),
        ("Muon", {"lr": 0.02}, _transposed),
        ("Muon", {"lr": 0.02}, _scaled),
        ("Muon", {"lr": 0.02}, _as_sgd),
    ],
)
def test_a_step_by_another_rule_is_told(name: str, options: dict[str, Any], change: Change) -> None:
    assert findings(name, options, change) == ["wrong-update"]


@pytest.mark.parametrize(("name", "options"), [("Adafactor", {"lr": 1e-4}), ("Muon", {"lr": 1e-6})])
def test_a_step_that_rounds_away_is_absorbed(name: str, options: dict[str, Any]) -> None:
    """In bfloat16, where no element or hardly one moves."""
    assert "absorbed" in findings(name, options, None, torch.bfloat16)
