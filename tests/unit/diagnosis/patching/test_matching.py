"""Forms found in the source: by any spelling, through names, and inside of each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from nanwatch.diagnosis.patching.matching import forms_of
from support.source_site import returned


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("torch.log(torch.exp(x))", "x"),
        ("x.exp().log()", "x"),
        ("e = x.exp()\ntorch.log(e)", "x"),
        ("torch.log(1 + torch.exp(x))", "F.softplus(x)"),
        ("torch.log(x.exp() + 1)", "F.softplus(x)"),
        ("torch.log(torch.exp(x) + torch.exp(y))", "torch.logaddexp(x, y)"),
        ("torch.softmax(x, -1).log()", "F.log_softmax(x, -1)"),
        ("torch.softmax(x, -1).log().sum()", None),
        ("torch.log(x + y)", None),
        ("torch.log(torch.exp(x) - torch.exp(x))", "x + torch.log(-torch.expm1(x - x))"),
        ("torch.log(torch.exp(x).gather(-1, y))", "x.gather(-1, y)"),
    ],
)
def test_the_first_form_of_an_expression(tmp_path: Path, body: str, expected: str | None) -> None:
    """None where the table has no formula for it."""
    site, value = returned(body, tmp_path)
    assert next((form.text for form in forms_of(site, value)), None) == expected


@pytest.mark.parametrize(
    "body",
    [
        "torch.log(1 - torch.sigmoid(x))",
        "torch.log(torch.exp(x).mean(dim=-1))",
        "x @ x.T / (x.norm(dim=1)[:, None] * x.norm(dim=1)[None, :])",
    ],
)
def test_a_form_has_the_value_of_the_formula(tmp_path: Path, body: str) -> None:
    """In float64, where the formula itself is exact enough."""
    site, value = returned(body, tmp_path)
    names = {
        "torch": torch,
        "F": F,
        "math": math,
        "x": torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(3, 4),
    }
    form = next(forms_of(site, value))
    torch.testing.assert_close(eval(form.text, dict(names)), eval(body, dict(names)))
    assert value in form.nodes
