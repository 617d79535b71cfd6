"""Expressions that are evaluated beside the line: those without effects, with names written out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.written import is_pure, judged, written_out
from support.source_site import returned


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.exp(x) + y.sum()", True),
        ("max(len(x), 2)", True),
        ("math.sqrt(2) * x", True),
        ("x.add_(y)", False),
        ("torch.rand_like(x)", False),
        ("F.dropout(x)", False),
        ("self.layer(x)", False),
        ("helper(x)", False),
        ("(w := x) + w", False),
    ],
)
def test_what_has_no_effect(tmp_path: Path, text: str, expected: bool) -> None:
    """Operations of torch on values; nothing that draws, writes in place, calls a module or a function of the user."""
    site, value = returned(text, tmp_path, helper=lambda x: x)
    assert is_pure(site, value) == expected


def test_the_judged_expression_is_the_largest_without_effects(tmp_path: Path) -> None:
    """Around the failing one, and none at all of singular vectors."""
    site, value = returned("torch.rand_like(x) + torch.log(x / y)", tmp_path)
    failing = next(
        one for one in ast.walk(value) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div)
    )
    found = judged(site, failing)
    assert found is not None
    assert ast.unparse(found) == "torch.log(x / y)"
    whole, value = returned("torch.log(x / y)", tmp_path)
    assert judged(whole, None) is value
    vectors, _ = returned("torch.linalg.svd(x)[0]", tmp_path)
    assert judged(vectors, None) is None


@pytest.mark.parametrize(
    ("body", "value", "operands"),
    [
        ("a = x + 1\nb = a * y\ntorch.log(b)", "torch.log((x + 1) * y)", "x, y"),
        ("a = x @ y\ntorch.log(a)", "torch.log(a)", "a"),
        ("a = torch.rand_like(x)\ntorch.log(a)", "torch.log(a)", "a"),
        ("a = x + 1\nx = y * 2\ntorch.log(a + x)", "torch.log(a + y * 2)", "a, y"),
    ],
)
def test_names_are_written_out_where_that_costs_little(
    tmp_path: Path, body: str, value: str, operands: str
) -> None:
    """Not what draws, takes long, or was made from what has changed since; with the names that it begins from."""
    site, expression = returned(body, tmp_path)
    made = written_out(site, expression)
    assert isinstance(made, ast.Tuple)
    assert ast.unparse(made.elts[0]) == value
    assert ast.unparse(made.elts[1]).strip("(),") == operands
