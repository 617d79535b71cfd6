"""A step that makes a weight non-finite: which weight, which state, and a cure that a training with it confirms."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from nanwatch import watch
from support.examined import comment_of
from support.toys import fault_of


def train(kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Make three steps of a model whose first weight has gradients that are zero, and small ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 8)).to(dtype)
    optimizer = kind(model.parameters(), lr=1e-4, **options)
    with watch(model):
        for _ in range(3):
            loss = model(torch.randint(0, 50, (4, 6))).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [(Adam, {"amsgrad": True}, "max_exp_avg_sq"), (AdamW, {"foreach": True}, "exp_avg_sq")],
)
def test_an_eps_that_is_zero_in_the_format_is_named_and_cured(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], key: str
) -> None:
    """The state under the root is 0 in the report, and a training with the eps of the cure stays finite."""
    finding = fault_of(train, kind, options, torch.float16).finding
    assert (finding.module, finding.label, finding.origin) == ("0", "weight", "weight")
    assert finding.operation is not None
    assert "which is 0 in float16" in finding.operation
    (root,) = [record for record in finding.operands if record.label == f"{key}[weight]"]
    assert root.health.num_zero > 0
    (cure,) = finding.cures
    assert cure.works
    eps = re.fullmatch("give the optimizer eps=(.*)", cure.what)
    model = train(kind, {**options, "eps": float(eps[1])}, torch.float16)
    assert all(bool(x.isfinite().all()) for x in model.parameters())


def test_a_fused_step_is_taken_apart_too() -> None:
    """Its arithmetic is float32's, so eps is not 0, and it is lr that leaves the format: there is no cure."""
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters(), lr=1e39, fused=True)
    w, stranger = watch(model), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    stranger.step()  # which holds no weight of the model
    model(torch.ones(1, 2)).sum().backward()

    def step() -> None:
        optimizer.step()  # the step
        w.stop()

    finding = fault_of(step).finding
    update = "exp_avg / (exp_avg_sq.sqrt() + eps) with lr=1e+39 and eps=1e-08"
    assert (finding.operation, finding.cures) == (f"the step of AdamW, {update}", ())
    assert comment_of(finding) == "the step"


@pytest.mark.parametrize(("momentum", "how"), [(0.0, "report"), (0.9, "stop"), (0.9, "with")])
def test_the_last_step_of_a_run_is_looked_at(momentum: float, how: str) -> None:
    """No forward reads its weights: asking for the report says so, and the end of the watch raises."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38, momentum=momentum)
    w = watch(model, every=2)
    (model(torch.randn(4, 8)).square().sum() * 1e3).backward()
    optimizer.step()
    if how == "report":
        finding = w.report().finding
        w._leave()
    else:
        report = fault_of(w.stop) if how == "stop" else fault_of(w.__exit__, None, None, None)
        finding = report.finding
        assert w.report().finding == finding
    assert (finding.label, finding.phase, finding.batch) == ("weight", "step", 0)
    key = "momentum_buffer" if momentum else "gradient"
    assert finding.operation == f"the step of SGD, weight - lr * {key} with lr=1e+38"


def test_a_step_that_leaves_finite_weights_finite_is_not_named() -> None:
    optimizer = torch.optim.SGD((model := nn.Linear(8, 1)).parameters(), lr=0.1, momentum=0.9)
    w = watch(model)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    model.weight.data[0] = torch.nan
    assert fault_of(w.stop).finding.operation is None


class Normalised(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            update = p.grad / p.grad.norm()  # aten.div.Tensor
            p.sub_(update, alpha=0.1)


def test_the_line_in_an_optimizer_of_the_program() -> None:
    """The gradient of a head without a loss is 0: the step that divides by it ends, and no later forward."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)])
    with watch(model):
        x = model[0](torch.ones(3, 2))
        (x.sum() + model[1](x).sum() * 0).backward()
        finding = fault_of(Normalised(model.parameters()).step).finding
    assert (finding.module, finding.label, finding.phase) == ("1", "weight", "step")
    assert finding.operation == f"{comment_of(finding)} in the step of Normalised with lr=0.1"
    (cure,) = finding.cures
    assert cure.works and "p.grad.norm().clamp(min=1e-8)" in cure.patch  # noqa: PT018


def test_a_training_that_diverges() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train() -> None:
        for _ in range(100):
            optimizer.zero_grad()
            (model(torch.full((4, 3), 10.0)) - 1).square().mean().backward()
            optimizer.step()

    with watch(model):
        report = fault_of(train)
    assert report.finding.losses == tuple(sorted(report.finding.losses))
    assert (report.finding.num_steps, report.explanation.advice.code) == (report.batch, "divergence")
